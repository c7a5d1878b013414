"""ServiceConfig: each setting of the server, defined once.

A flag wins over an ATTENCODE_* variable, which wins over the default. The only reader of the environment.
May import: errors, pydantic, pydantic_settings.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    CliPositionalArg,
    NoDecode,
    SettingsConfigDict,
    SettingsError,
)

from service.errors import ConfigError

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Threads = Annotated[int, Field(ge=1, le=512)]
Duration = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Patience = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
# Below these nothing could be asked or answered: GetModel's answer alone has some hundred bytes.
RequestBytes = Annotated[int, Field(ge=1024, le=2**31 - 1)]
MessageBytes = Annotated[int, Field(ge=16_384, le=2**31 - 1)]
AutoCount = Count | Literal["auto"]
Cores = Annotated[float, Field(gt=0, le=4096)]
Share = Annotated[float, Field(ge=0, le=64)]

_RAY_ALONE = {"address", "replicas", "replica_cpus", "replica_gpus", "replica_batches", "batch_attempts"} | {
    "batch_timeout_s"
}
_CLIENTS_KEY = "ATTENCODE_API_KEY"  # of the commands that call a server
_SERVICE_LINKS = ("ATTENCODE_SERVICE_", "ATTENCODE_PORT_")  # for a Service called attencode


class ServiceConfig(BaseSettings):
    """Serve a model over gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="ATTENCODE_",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        cli_prog_name="attencode serve",
        extra="forbid",
        protected_namespaces=(),
    )

    model: CliPositionalArg[str] = Field(
        "",
        description="Artifact folder, checkpoint folder or hub id; what is no artifact yet is exported into the cache",
    )
    model_name: str = Field("", description="Name that requests call it by; its id when empty")
    models: Annotated[list[str], NoDecode] = Field(
        [],
        description="--model NAME=ARTIFACT, once for each further model; without MODEL the first is the default. "
        "As a variable they are parted by commas",
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub")
    cache_dir: Path = Field(Path("~/.cache/attencode"), description="Where exported artifacts are kept")

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface")
    port: Port = Field(50051, description="Port for gRPC; 0 for any free one")
    metrics_port: Port | Literal["none"] = Field(9090, description="Port for Prometheus; 0 for any free one")
    metrics_host: str = Field("", description="Address for Prometheus; as host when empty")
    health_port: Port | Literal["none"] = Field(
        "none", description="Plaintext port for gRPC health alone, for probes that speak no TLS; 0 for any free one"
    )
    tls_cert: str = Field(
        "",
        description="PEM file of the server's certificate and those between it and its CA; read anew when it changes",
    )
    tls_key: str = Field("", description="PEM file of the certificate's private key, without a password")
    tls_client_ca: str = Field("", description="PEM file of the CA of which clients must show a certificate")
    api_keys: str = Field(
        "", description="TOML file of hashed API keys, of which each call must show one; read anew when it changes"
    )
    reflection: bool = Field(default=True, description="Answer gRPC server reflection")

    provider: Literal["auto", "cuda", "openvino", "cpu"] = Field("auto", description="Execution provider")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Arithmetic of the model")
    threads: Threads | Literal["auto"] = Field(
        "auto", description="Threads of the model; auto for every core the process may use"
    )
    streams: Threads | Literal["auto"] = Field(
        "auto", description="Batches that run side by side; auto for one a thread, at most 8, and 2 with CUDA"
    )

    max_batch_tokens: AutoCount = Field("auto", description="Largest batch: rows times padded length")
    max_batch_size: Count = Field(256, description="Largest batch in rows")
    max_queue_delay_ms: Duration = Field(0.0, description="How long a batch waits for company while the device is free")
    max_queue_size: Count = Field(8192, description="Inputs that may wait; beyond it RESOURCE_EXHAUSTED")
    max_queue_tokens: Count = Field(2**20, description="Tokens that may wait; beyond it RESOURCE_EXHAUSTED")
    max_pending_requests: Count = Field(
        4096, description="Requests in work, read, waiting or running; beyond it RESOURCE_EXHAUSTED"
    )
    max_pending_bytes: Count = Field(
        256 * 2**20, description="Memory for the messages, texts and described tokens of requests in work, in bytes"
    )
    max_streams: Count = Field(64, description="Open EncodeStream calls; beyond it RESOURCE_EXHAUSTED")
    max_deadline_s: Patience = Field(
        300.0, description="Longest a request may take, whatever deadline its caller sets; on a stream, each of them"
    )
    max_inputs: Count = Field(1024, description="Inputs of one request")
    max_request_tokens: Count = Field(2**19, description="Tokens of one request, after truncation")
    max_message_bytes: MessageBytes = Field(64 * 2**20, description="Largest message of an answer, in bytes")
    max_answer_bytes: MessageBytes = Field(
        2**29, description="Largest answer on a stream, and memory for all unsent ones of more than 1 MiB, in bytes"
    )
    stalled_after_s: Patience = Field(
        120.0, description="When a stream ends of whose ready answers nothing is read; for each MiB of a message"
    )
    max_request_bytes: RequestBytes = Field(4 * 2**20, description="Largest request, in bytes")
    max_stream_requests: Count = Field(64, description="Unanswered requests of one stream before it is held back")
    max_connections: Count = Field(1024, description="Connections at one time; further ones are closed at once")
    max_connection_requests: Count = Field(
        1024, description="Unanswered requests of one connection, those of its streams included"
    )
    max_connection_streams: Count = Field(64, description="Open EncodeStream calls of one connection")
    max_connection_idle_s: Patience = Field(120.0, description="When a connection without any call is closed")
    handshake_timeout_s: Patience = Field(10.0, description="How long a new connection may take to say what it is")
    keepalive_time_s: Patience = Field(
        60.0, description="After how long a silence a connection must give a sign of life, within 20 s, or is closed"
    )
    pad_to_multiple_of: Count = Field(1, description="Padded lengths are multiples of this")
    stuck_after_s: Patience = Field(
        60.0, description="When a batch that does not end is given up, and with it the process, or on Ray the replica"
    )

    ray: CliImplicitFlag[bool] = Field(default=False, description="Run the models on replicas of Ray Serve")
    address: str = Field("", description="Ray cluster to join: auto for this node's, or HOST:PORT; empty starts one")
    replicas: str = Field("1", description="Replicas of each model: a number, or MIN:MAX to follow the load")
    replica_cpus: Cores | Literal["auto"] = Field(
        "auto", description="Cores and threads of a replica; auto shares this machine's among them"
    )
    replica_gpus: Share | Literal["auto"] = Field(
        "auto", description="GPUs of a replica, a fraction to share one; auto for 1 with CUDA, else 0"
    )
    replica_batches: Count = Field(
        2, description="Batches that each stream of a replica has at once, so that it never waits"
    )
    batch_attempts: Count = Field(3, description="Times an input may run on a replica that dies under it")
    batch_timeout_s: Duration = Field(15.0, description="When a batch without an answer is run on another replica")

    drain_delay_s: Duration = Field(0.0, description="After SIGTERM, how long health says NOT_SERVING before calls end")
    grace_s: Duration = Field(30.0, description="After SIGTERM, how long accepted requests may take")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe lines to log")
    log_format: Literal["text", "json"] = Field(
        "text", description="Log as lines for people, or as one JSON object a line, with trace ids where there are any"
    )
    tracing: CliImplicitFlag[bool] = Field(
        default=False, description="Send spans by OTLP over gRPC, as the OTEL_* variables say; needs attencode[otel]"
    )

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model and not self.models:
            raise ValueError("MODEL is missing: give an artifact folder, a checkpoint folder or a hub id")
        for named in self.models:
            name, _, folder = named.partition("=")
            if not name or not folder:
                raise ValueError(f"--model must be NAME=ARTIFACT, got {named!r}")
        if not self.ray and (given := self.model_fields_set & _RAY_ALONE):
            flags = ", ".join(sorted("--" + name.replace("_", "-") for name in given))
            raise ValueError(f"{flags} goes with --ray; add it, or leave {flags} out")
        read_replicas(self.replicas)
        self._check_files()
        if self.tracing:
            _check_exporter()
        if self.replica_gpus != "auto" and self.replica_gpus > 1 and self.replica_gpus % 1:
            raise ValueError(f"--replica-gpus must be a whole number, or below 1 to share one, got {self.replica_gpus}")
        self.cache_dir = self.cache_dir.expanduser()
        return self

    def _check_files(self) -> None:
        kinds = {"tls_cert": "PEM", "tls_key": "PEM", "tls_client_ca": "PEM", "api_keys": "TOML"}
        for name, kind in kinds.items():  # an empty one would turn TLS, or keys, off without a word
            if name in self.model_fields_set and not getattr(self, name):
                flag = f"--{name.replace('_', '-')} (or ATTENCODE_{name.upper()})"
                raise ValueError(f"{flag} is empty; name a {kind} file, or leave the setting out")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key go together; give both, or neither for plaintext")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca goes with --tls-cert and --tls-key; add them, or leave it out")

    def named_models(self) -> list[tuple[str, str]]:
        """List the models, each with the name that it is given; empty for its own."""
        first = [(self.model_name, self.model)] if self.model else []
        named = [model.partition("=") for model in self.models]
        return first + [(name, model) for name, _, model in named]


def read_replicas(words: str) -> tuple[int, int]:
    """Read how many replicas there may be: `N`, or `MIN:MAX`.

    Raises:
        ValueError: They are not such numbers.
    """
    low, _, high = words.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most or words.endswith(":"):
        raise ValueError(f"--replicas must be a number from 1 or MIN:MAX, got {words!r}")
    return least, most


def _check_exporter() -> None:
    """Refuse variables of OpenTelemetry that ask for another way than OTLP over gRPC, the only one there is here.

    Raises:
        ValueError: One does.
    """
    for name, word in (
        ("OTEL_TRACES_EXPORTER", "otlp"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc"),
    ):
        if os.environ.get(name, word) not in (word, ""):
            raise ValueError(f"--tracing sends spans by OTLP over gRPC alone, but {name} is {os.environ[name]!r}")


RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 2**20),  # answers of more than 4 MiB
}
"""What Ray reads from variables alone."""


def prepare_ray_environment() -> None:
    """Set Ray's variables before it is imported; what the user has set stays.

    Ray's own nodes take to authentication by token as soon as a token is there; who joins them must be told to.
    """
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_TOKEN" in os.environ or Path("~/.ray/auth_token").expanduser().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def parse_config(arguments: Sequence[str]) -> ServiceConfig:
    """Read the settings from flags, the environment and defaults.

    Args:
        arguments: The command line after `attencode serve`.

    Raises:
        ConfigError: A setting is unknown or malformed; one line names it.
        SystemExit: The flags ask for help.
    """
    words = [re.sub(r"^--model(?==|$)", "--models", word) for word in arguments]
    if "://" in os.environ.get("ATTENCODE_PORT", ""):
        del os.environ["ATTENCODE_PORT"]  # Kubernetes' link to a Service called attencode, not a setting
    try:
        config = ServiceConfig(_cli_parse_args=words)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError("; ".join(map(_fault, error.errors()))) from error
    except SettingsError as error:
        raise ConfigError(str(error).removeprefix("error parsing CLI: ")) from error
    _refuse_unknown_variables()
    return config


def _refuse_unknown_variables() -> None:
    """Refuse a misspelt ATTENCODE_* variable; those that Kubernetes makes for a Service are let pass."""
    prefix = "ATTENCODE_"
    known = {prefix + name.upper() for name in ServiceConfig.model_fields} | {_CLIENTS_KEY}
    for name in os.environ:
        if name.startswith(prefix) and name not in known and not name.startswith(_SERVICE_LINKS):
            raise ConfigError(f"the environment variable {name} is no setting; `attencode serve --help` lists them")


def _fault(fault: Mapping[str, Any]) -> str:
    """Say in a few words what is wrong with one setting."""
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    name = str(fault["loc"][0])
    flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
    if "ATTENCODE_" + name.upper() in os.environ:
        flag += f" (or ATTENCODE_{name.upper()})"
    return f"{flag}: {message}, got {fault['input']!r}"
