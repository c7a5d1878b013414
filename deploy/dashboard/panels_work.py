"""What the dashboard shows of the work inside: the bottleneck, the padding, the replicas."""

from deploy.dashboard.panel import (
    ALL,
    BATCHES,
    COMPUTED,
    DURATION,
    ENCODE,
    FAULTS,
    INPUTS,
    MODELS,
    PAD,
    RANGE,
    REPLICA,
    REQUESTS,
    SERVER,
    SERVERS,
    TOKENS,
    Panel,
    mean,
    over,
    quantile,
    rate,
)

BOTTLENECK = (
    Panel(
        "Where a request's time passes",
        "Share of all answered requests' time. tokenize: the tokenizer. queue: waiting for a batch, so for the device. "
        "inference: the graph. other: reading and writing messages, room for large answers, a busy event loop, the "
        "way to a replica.",
        "s",
        ((rate("attencode_stage_seconds_total", "stage", MODELS), "{{stage}}"),),
        stack="percent",
    ),
    Panel(
        "Device: share of its streams at work",
        "1 means that every stream computes all the time: the device is full, and more of them help. Models of one "
        "process share its streams, so that theirs add up.",
        "percentunit",
        (
            (
                (
                    f"sum by (pod, instance, model) (rate(attencode_inference_duration_seconds_sum{{{MODELS}}}{RANGE}))"
                    f" / sum by (pod, instance, model) (attencode_compute_streams{{{MODELS}}})"
                ),
                "{{model}} " + SERVER,
            ),
        ),
        thresholds=(0.9, 1),
    ),
    Panel(
        "Event loop: share of its core",
        "Reading, writing, tokenizing of short texts and batching run on one thread. Near 1 this process is full "
        "though the device is not: more servers (or gateways) help, or larger requests.",
        "percentunit",
        ((rate("attencode_event_loop_cpu_seconds_total", "pod, instance", SERVERS), SERVER),),
        thresholds=(0.7, 0.9),
        most=1,
    ),
    Panel(
        "Waiting work, in seconds",
        "Tokens that wait, by the rate at which they are computed: about how long a newcomer waits behind them. "
        "Callers take turns, so that one with little work waits less.",
        "s",
        (
            (
                (
                    f"attencode_queue_tokens{{{MODELS}}}"
                    f" / clamp_min(rate(attencode_computed_tokens_total{{{MODELS}}}{RANGE})"
                    f" - rate(attencode_pad_tokens_total{{{MODELS}}}{RANGE}), 1)"
                ),
                "{{model}} " + SERVER,
            ),
        ),
    ),
    Panel(
        "Waiting inputs",
        "Inputs in the queue of each model, beyond --max-queue-size requests are refused; and those that were computed "
        "for callers who were gone by then, a second.",
        "none",
        (
            (f"sum by (model) (attencode_queue_inputs{{{MODELS}}})", "{{model}}"),
            (f"sum by (model) (rate(attencode_wasted_inputs_total{{{MODELS}}}{RANGE}))", "{{model}} for nobody"),
        ),
    ),
    Panel(
        "Stages, 99 % within",
        "queue: the oldest input of each batch. inference: the graph alone. batch: from its hand-over to its return, "
        "so that what it has more than inference is the way to a replica and the wait for a stream there.",
        "s",
        (
            (quantile(0.99, "attencode_tokenize_duration_seconds", MODELS), "tokenize"),
            (quantile(0.99, "attencode_queue_duration_seconds", MODELS), "queue"),
            (quantile(0.99, "attencode_inference_duration_seconds", MODELS), "inference"),
            (quantile(0.99, "attencode_batch_duration_seconds", MODELS), "batch"),
        ),
        logarithmic=True,
    ),
    Panel(
        "Batches under way",
        "Batches that the runner holds, and how many can be computed side by side. With replicas more are sent than "
        "that, so that none of them waits for work.",
        "none",
        (
            (f"sum by (model) (attencode_batches_in_flight{{{MODELS}}})", "{{model}} under way"),
            (f"sum by (model) (attencode_compute_streams{{{MODELS}}})", "{{model}} streams"),
        ),
    ),
    Panel(
        "Mean way of a batch",
        "How much longer a batch is away than its graph runs: the hand-over to a thread, or the way to a replica and "
        "back with the wait there.",
        "s",
        (
            (
                (
                    f"{mean('attencode_batch_duration_seconds', 'model', MODELS)}"
                    f" - {mean('attencode_inference_duration_seconds', 'model', MODELS)}"
                ),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Event loop: how late, 99 % within",
        "How late the loop wakes a task. Everything that this server says comes at least so late.",
        "s",
        ((quantile(0.99, "attencode_event_loop_lag_seconds", SERVERS, "pod, instance"), SERVER),),
    ),
)

PADDING = (
    Panel(
        "Padding, share of computed tokens",
        "Tokens that were computed for nothing, because texts of different lengths ran together.",
        "percentunit",
        (
            (
                over(PAD, COMPUTED),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Device time that padding takes",
        "The share above, of the device's time: 0.2 is a fifth of one stream, all the time. That is what sorting "
        "texts by length, or --pad-to-multiple-of 1, could save at most.",
        "none",
        (
            (
                (f"{rate('attencode_inference_duration_seconds_sum', 'model', MODELS)} * {over(PAD, COMPUTED)}"),
                "{{model}} streams",
            ),
        ),
    ),
    Panel(
        "Truncated inputs",
        "Share of inputs that lost tokens, because they are longer than the model, or than the caller allowed.",
        "percentunit",
        (
            (
                over(rate("attencode_truncated_inputs_total", "model", MODELS), INPUTS),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Rows of a batch",
        "Batches a second by their rows. Few rows under load: each request waits for nobody, or lengths differ much.",
        "none",
        ((rate("attencode_batch_inputs_bucket", "le", MODELS), "{{le}}"),),
        kind="heatmap",
    ),
    Panel(
        "Tokens of a batch",
        "Mean, padding included, against the tokens of its inputs: the gap is padding.",
        "short",
        (
            (
                f"{COMPUTED} / {BATCHES}",
                "{{model}} computed",
            ),
            (
                f"({COMPUTED} - {PAD}) / {BATCHES}",
                "{{model}} of inputs",
            ),
        ),
    ),
    Panel(
        "Tokens of an input",
        "Mean. Where it grows, everything gets slower though the number of requests stays.",
        "short",
        (
            (
                f"{TOKENS} / {INPUTS}",
                "{{model}}",
            ),
        ),
    ),
)

REPLICAS = (
    Panel(
        "Servers: p99 of Encode",
        "Each server's own. One above the others is slow, or has the long texts.",
        "s",
        ((quantile(0.99, DURATION, ENCODE, "pod, instance"), SERVER),),
    ),
    Panel(
        "Servers: faults",
        "Each server's share of requests that ended with INTERNAL or UNAVAILABLE.",
        "percentunit",
        (
            (
                over(f"sum by (pod, instance) (rate({FAULTS}{RANGE}))", f"sum by (pod, instance) (rate({ALL}{RANGE}))"),
                SERVER,
            ),
        ),
    ),
    Panel(
        "Servers: requests",
        "One far below the others is not found by the balancing: gRPC clients stay with the connection that they have.",
        "reqps",
        ((rate(REQUESTS, "pod, instance", SERVERS), SERVER),),
    ),
    Panel(
        "Replicas: tokens for a second of computing",
        "How fast each replica is while it computes, padding included. One far below the others has a slow or shared "
        "device.",
        "short",
        (
            (
                (
                    f"{rate('attencode_replica_tokens_total', 'model, replica, node', MODELS)}"
                    f" / {rate('attencode_replica_inference_seconds_total', 'model, replica, node', MODELS)}"
                ),
                REPLICA,
            ),
        ),
        fed_by_ray=True,
    ),
    Panel(
        "Replicas: batches",
        "Batches a second that each replica answered. One at 0 among busy ones hangs.",
        "short",
        ((rate("attencode_replica_batches_total", "model, replica, node", MODELS), REPLICA),),
        fed_by_ray=True,
    ),
    Panel(
        "Replicas: batches under way",
        "Batches at each replica when it last spoke. One that stays full while others are empty hangs.",
        "none",
        ((f"max by (model, replica, node) (attencode_replica_batches_in_flight{{{MODELS}}})", REPLICA),),
        fed_by_ray=True,
    ),
    Panel(
        "Replicas: batches that failed",
        "Batches a second on which the model raised an error there; their callers got INTERNAL.",
        "short",
        ((rate("attencode_replica_errors_total", "model, replica, node", MODELS), REPLICA),),
        fed_by_ray=True,
    ),
    Panel(
        "Batches sent again",
        "A second, by reason. died: the replica is gone. hung: no answer within --batch-timeout-s. other_version: "
        "the model is being replaced.",
        "short",
        ((rate("attencode_batch_retries_total", "model, reason", MODELS), "{{model}} {{reason}}"),),
        fed_by_ray=True,
    ),
    Panel(
        "Replicas that answer",
        "Of each model, as the gateways see them.",
        "none",
        ((f"max by (model) (attencode_replicas{{{MODELS}}})", "{{model}}"),),
        fed_by_ray=True,
    ),
)
