"""Server: the life of a grpc.aio server, from binding its port to draining it.

Health says NOT_SERVING until the model is warm, and again from the first SIGTERM on.
May import: everything below it; pb for reflection.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import grpc
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from service import metrics
from service.artifact import Artifact
from service.batching import BatchLimits
from service.config import ServiceConfig
from service.engine import Engine
from service.errors import ConfigError
from service.request import ModelInfo
from service.runner import LocalRunner
from service.servicer import SERVICE_NAME, EncoderServicer, RequestLimits
from service.session import Placement, Session, choose_placement, usable_cores
from service.tokenization import TextTokenizer

_LOG = logging.getLogger(__name__)

READINESS = ("", SERVICE_NAME)
"""Health names that are SERVING while requests are taken in."""
LIVENESS = "liveness"
"""Health name that is SERVING as long as the process answers at all."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LINGER_S = 0.2


class Server:
    """One model behind one port."""

    def __init__(self, config: ServiceConfig, artifact: Artifact) -> None:
        """Choose where the model runs and wire the parts; nothing runs yet.

        Raises:
            StartupError: The artifact or the provider cannot be used.
        """
        self._config = config
        self._artifact = artifact
        self._placement = choose_placement(config.provider, config.precision)
        threads = usable_cores() if config.threads == "auto" else config.threads
        session = Session(artifact, self._placement, threads=threads, streams=config.streams)
        limits = BatchLimits(
            max_batch_tokens=_max_batch_tokens(config, self._placement, threads),
            max_batch_size=config.max_batch_size,
            max_queue_delay_ms=config.max_queue_delay_ms,
            pad_to_multiple_of=config.pad_to_multiple_of,
            max_length=artifact.max_tokens,
        )
        self._engine = Engine(
            LocalRunner(session, streams=config.streams),
            limits,
            pad_token_id=artifact.pad_token_id,
            max_queue_size=config.max_queue_size,
        )
        self._info = _model_info(config, artifact, self._placement)
        request_limits = RequestLimits(config.max_inputs, config.max_message_bytes, config.max_stream_requests)
        self._servicer = EncoderServicer(artifact, TextTokenizer(artifact), self._engine, request_limits, self._info)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._metrics_server: tuple[object, object] | None = None
        self.port = 0
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Bind the ports, load and warm the model, and begin to serve.

        Raises:
            StartupError: A port is taken, or the model cannot be loaded.
        """
        self._server = self._bind()
        self._start_metrics()
        await self._say(_NOT_SERVING)
        await self._health.set(LIVENESS, _SERVING)
        await self._server.start()
        await self._engine.start()
        _spare_the_collector()
        await self._say(_SERVING)
        metrics.record_ready(ready=True)

    async def stop(self) -> None:
        """Drain: say NOT_SERVING, refuse new calls, answer the accepted ones, then close."""
        await self._say(_NOT_SERVING)
        metrics.record_ready(ready=False)
        await asyncio.sleep(self._config.drain_delay_s)
        started = time.monotonic()
        await self._engine.finish(self._config.grace_s)
        # Calls that are on their way now still get UNAVAILABLE from us, which clients try again; a call
        # that meets the closing itself would see CANCELLED.
        await asyncio.sleep(_LINGER_S)
        if self._server is not None:
            await self._server.stop(max(0.0, self._config.grace_s - (time.monotonic() - started)))
        await self._engine.stop()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server[0].shutdown)  # type: ignore[attr-defined]

    def ready_line(self) -> str:
        """Say in one line what runs where."""
        placement = self._placement
        line = (
            f"attencode serves {self._info.model} at {self._config.host}:{self.port}, "
            f"{placement.provider} {placement.precision}, {placement.reason}"
        )
        return line if self.metrics_port is None else f"{line}; metrics on port {self.metrics_port}"

    def _bind(self) -> grpc.aio.Server:
        config = self._config
        options = (
            ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a riddle
            ("grpc.max_receive_message_length", config.max_request_bytes),
            ("grpc.max_send_message_length", -1),  # the servicer bounds its answers, with a better message
        )
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._servicer.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        _check_address(config.host, config.port)
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self.port = server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
        return server

    def _start_metrics(self) -> None:
        config = self._config
        if config.metrics_port == "none":
            return
        host = config.metrics_host or config.host
        try:
            self._metrics_server = prometheus_client.start_http_server(config.metrics_port, host)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{config.metrics_port}: {error.strerror}; "
                "choose another --metrics-port, or none"
            ) from error
        self.metrics_port = self._metrics_server[0].server_port
        facts = {"model": self._info.model, "digest": self._artifact.digest, "version": self._info.server_version}
        metrics.record_model(facts | {"provider": self._placement.provider, "precision": self._placement.precision})

    async def _say(self, status: int) -> None:
        for name in READINESS:
            await self._health.set(name, status)


async def serve(config: ServiceConfig, artifact: Artifact, started: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Args:
        config: The settings.
        artifact: The model.
        started: When the process began, on the clock of `time.perf_counter`.

    Raises:
        StartupError: The server cannot start.
    """
    server = Server(config, artifact)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    sys.stdout.write(f"{server.ready_line()} (ready after {time.perf_counter() - started:.1f} s)\n")
    sys.stdout.flush()
    await stop.wait()
    _LOG.info("draining: new calls are refused, accepted ones have %.0f s", config.grace_s)
    await server.stop()
    _LOG.info("drained")


def _check_address(host: str, port: int) -> None:
    """Bind the address once ourselves: gRPC would not say what is wrong with it.

    Raises:
        ConfigError: The host is unknown, or the port is taken or not ours to take.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "nohost.invalid", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}, port {port}: {error.strerror}") from error


def _model_info(config: ServiceConfig, artifact: Artifact, placement: Placement) -> ModelInfo:
    name = config.model_name or artifact.model_id
    return ModelInfo(
        model=name,
        model_digest=artifact.digest,
        model_id=artifact.model_id,
        revision=artifact.revision or "",
        family=artifact.family,
        hidden_size=artifact.hidden_size,
        num_hidden_layers=artifact.num_hidden_layers,
        num_attention_heads=artifact.num_attention_heads,
        vocab_size=artifact.vocab_size,
        num_parameters=artifact.num_parameters,
        max_tokens=artifact.max_tokens,
        default_pooling=artifact.pooling,
        default_normalize=artifact.normalize,
        default_prompt_name=artifact.default_prompt_name or "",
        prompts=dict(artifact.prompts),
        provider=placement.provider,
        precision=placement.precision,
        provider_reason=placement.reason,
        max_inputs=config.max_inputs,
        max_message_bytes=config.max_message_bytes,
        server_version=_version(),
        models=[name],
        pooled_size=artifact.pooled_size(artifact.pooling),
    )


def _max_batch_tokens(config: ServiceConfig, placement: Placement, threads: int) -> int:
    """Give the token budget of a batch.

    256 tokens a core keep it busy: on two cores budgets from 384 to 4096 were equally fast within the noise,
    and smaller batches answer sooner. A GPU wants many more (read, not measured).
    """
    if config.max_batch_tokens != "auto":
        return config.max_batch_tokens
    return 16_384 if placement.provider == "cuda" else 256 * threads


def _spare_the_collector() -> None:
    """Leave what lives as long as the server out of garbage collection, and collect less often.

    Requests make no cycles to speak of; at the default pace collecting took 0.8 % of both cores under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _version() -> str:
    try:
        return version("attencode")
    except PackageNotFoundError:
        return "unknown"
