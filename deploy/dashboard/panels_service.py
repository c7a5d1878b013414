"""What the dashboard shows of the service as callers meet it: is it healthy, is it fast."""

from deploy.dashboard.panel import (
    ALL,
    COMPUTED,
    DURATION,
    ENCODE,
    FAULTS,
    INPUTS,
    LATE,
    MODELS,
    PAD,
    RANGE,
    REFUSED,
    REQUESTS,
    SERVER,
    SERVERS,
    TOKENS,
    Panel,
    quantile,
    rate,
    share,
)

HEALTHY = (
    Panel(
        "Servers that answer",
        "Targets that Prometheus can scrape. Red: none.",
        "none",
        (('sum(up{job=~"$job", namespace=~"$namespace"})', "up"),),
        width=4,
        kind="stat",
        thresholds=(1,),
        low_is_bad=True,
    ),
    Panel(
        "Models without a ready server",
        "Models that no server has a runner for: their requests are answered with UNAVAILABLE, or wait.",
        "none",
        ((f"count(max by (model) (attencode_ready{{{MODELS}}}) == 0) or vector(0)", "not ready"),),
        width=4,
        kind="stat",
        thresholds=(1,),
    ),
    Panel(
        "Requests",
        "Requests and stream items that ended, of all methods.",
        "reqps",
        ((f"sum(rate({ALL}{RANGE}))", "requests"),),
        width=4,
        kind="stat",
    ),
    Panel(
        "Our faults",
        "Share of requests that ended with INTERNAL or UNAVAILABLE.",
        "percentunit",
        ((share(FAULTS), "faults"),),
        width=4,
        kind="stat",
        thresholds=(0.01, 0.05),
    ),
    Panel(
        "Refused",
        "Share of requests that ended with RESOURCE_EXHAUSTED: there is more work than the servers can do.",
        "percentunit",
        ((share(REFUSED), "refused"),),
        width=4,
        kind="stat",
        thresholds=(0.01, 0.05),
    ),
    Panel(
        "Too late",
        "Share of requests whose deadline passed.",
        "percentunit",
        ((share(LATE), "late"),),
        width=4,
        kind="stat",
        thresholds=(0.01, 0.05),
    ),
    Panel(
        "Requests by status",
        "How requests ended. INVALID_ARGUMENT is the caller's mistake, CANCELLED a caller that left.",
        "reqps",
        ((rate(REQUESTS, "code", SERVERS), "{{code}}"),),
        stack="normal",
    ),
    Panel(
        "Refused requests by reason",
        "queue_full, queue_tokens: as many inputs or tokens wait as may. deadline: what waits takes longer than the "
        "caller allows. requests, request_bytes, streams: as much is in work or open as may. slow_message: it did not "
        "come in time. unsent_answers: nobody reads large ones. not_accepting: starting or draining. "
        "unauthenticated: no API key that is known. key_rate, key_concurrency, connection_requests, "
        "connection_streams: one key, or one connection, has as much as it may.",
        "reqps",
        ((rate("attencode_refused_requests_total", "reason", SERVERS), "{{reason}}"),),
    ),
    Panel(
        "Ready servers of each model",
        "Servers that have a runner for it. During a rollout it dips; it should not stay below the number of servers.",
        "none",
        ((f"sum by (model) (attencode_ready{{{MODELS}}})", "{{model}}"),),
    ),
    Panel(
        "Memory, share of the limit",
        "Of the container, without file pages that the kernel takes back first. At 100 % the kernel ends it.",
        "percentunit",
        ((f"attencode_memory_bytes{{{SERVERS}}} / attencode_memory_limit_bytes{{{SERVERS}}}", SERVER),),
        thresholds=(0.8, 0.9),
        most=1,
    ),
    Panel(
        "Unsent answers",
        "Bytes of answers that are computed, or begun, and not yet sent. They stay high where readers are slow. Large "
        "answers wait for room at attencode_unsent_limit_bytes (--max-answer-bytes, 512 MiB if unset).",
        "bytes",
        ((f"attencode_unsent_bytes{{{SERVERS}}}", SERVER),),
    ),
    Panel(
        "Streams",
        "EncodeStream calls that are open, and those that were ended because nobody read their answers, a minute.",
        "none",
        (
            (f"sum(attencode_open_streams{{{SERVERS}}})", "open"),
            (f"60 * sum(rate(attencode_stalled_streams_total{{{SERVERS}}}{RANGE}))", "stalled a minute"),
        ),
    ),
    Panel(
        "Connections, share of the limit",
        "TCP connections to the port for gRPC, silent ones too, of --max-connections. At 100 % new ones are closed.",
        "percentunit",
        ((f"attencode_connections{{{SERVERS}}} / attencode_connections_limit{{{SERVERS}}}", SERVER),),
        width=6,
        thresholds=(0.8, 0.9),
        most=1,
    ),
    Panel(
        "Failed batches by cause",
        "A second. memory: none was left, even for one input. device: the device's own error. stuck: it did not end. "
        "not_finite counts inputs for which the model has NaN or infinity. Their callers got INTERNAL.",
        "short",
        ((rate("attencode_batch_faults_total", "model, cause", MODELS), "{{model}} {{cause}}"),),
        width=6,
    ),
    Panel(
        "Inputs computed again in float32",
        "Inputs a second that overflow the model's precision. Each costs a second run.",
        "short",
        ((rate("attencode_float32_inputs_total", "model", MODELS), "{{model}}"),),
        width=6,
    ),
    Panel(
        "Failures of the server's own tasks",
        "An hour, by task. 0 is right: each has a traceback in the log.",
        "short",
        ((f"3600 * {rate('attencode_crashes_total', 'task', SERVERS)}", "{{task}}"),),
        width=6,
    ),
)

FAST = (
    Panel(
        "Encode: how long",
        "From a request's arrival to its answer. The target is the rule attencode:request_duration_target_seconds; "
        "an alert compares the p99 with it.",
        "s",
        (
            (quantile(0.5, DURATION, ENCODE), "half within"),
            (quantile(0.9, DURATION, ENCODE), "90 % within"),
            (quantile(0.99, DURATION, ENCODE), "99 % within"),
            ("attencode:request_duration_target_seconds", "target"),
        ),
        width=12,
        logarithmic=True,
    ),
    Panel(
        "Encode: how many took how long",
        "Requests a second by duration. Two bands are two kinds of requests, or a slow and a fast server.",
        "s",
        ((rate(f"{DURATION}_bucket", "le", ENCODE), "{{le}}"),),
        width=12,
        kind="heatmap",
    ),
    Panel(
        "p99 by method",
        "An item of EncodeStream counts from when it is read until its answer is there, the sending not included. "
        "Bulk clients keep many items waiting, so that theirs are slow on purpose.",
        "s",
        ((quantile(0.99, DURATION, SERVERS, "method"), "{{method}}"),),
        logarithmic=True,
    ),
    Panel(
        "Tokens",
        "Tokens of inputs a second, special ones included, padding not: those that were computed, and those that "
        "came, of which refused ones are part.",
        "short",
        (
            (f"{COMPUTED} - {PAD}", "{{model}} computed"),
            (TOKENS, "{{model}} came"),
        ),
    ),
    Panel(
        "Inputs",
        "Texts, pairs or token lists a second: those that were computed, and those that came.",
        "short",
        (
            (rate("attencode_batch_inputs_sum", "model", MODELS), "{{model}} computed"),
            (INPUTS, "{{model}} came"),
        ),
    ),
)
