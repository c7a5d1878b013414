"""Server: the life of a grpc.aio server, from binding its port to draining it.

Health says NOT_SERVING until the model is warm, and again from the first SIGTERM on.
May import: everything below it; pb for reflection.
"""

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
import sys
import time
from functools import partial

import grpc
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from service import metrics, reflection
from service.access import Access, ConnectionLimits
from service.admission import WorkLimits
from service.backend import Backend
from service.config import ServiceConfig
from service.connections import Connections
from service.encoding import RequestLimits
from service.errors import ClusterLost, ConfigError, Lost
from service.following import follow
from service.keyring import KeyRing
from service.logs import line
from service.memory import Memory
from service.scrape import Scrape
from service.served import Models
from service.servicer import SERVICE_NAME, EncoderServicer
from service.supervision import keep, watch_loop, watch_threads
from service.tls import Certificates
from service.tracing import Tracing, otlp_tracing
from service.transport import probe_options, server_options

_LOG = logging.getLogger(__name__)

READINESS = ("", SERVICE_NAME)
"""Health names that are SERVING while a model answers; each model has `attencode.v1.Encoder/NAME` besides."""
LIVENESS = "liveness"
"""Health name that is SERVING as long as the process answers at all, and need not be started anew."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LINGER_S = 0.2
_PULSE_S = 0.1
_LOST_GRACE_S = 5.0  # for accepted requests to end where the models are gone for good


class Server:
    """The models of one backend behind one port."""

    def __init__(self, config: ServiceConfig, backend: Backend, tracing: Tracing | None = None) -> None:
        """Wire the parts; nothing runs yet.

        Args:
            config: The settings.
            backend: Where the models run.
            tracing: Where spans go, if not where the settings say.

        Raises:
            ConfigError: The settings ask for tracing, and it cannot be had.
        """
        self._config = config
        self._tracing = otlp_tracing() if tracing is None and config.tracing else tracing
        self._backend = backend
        self._models = Models(backend.names)
        limits = RequestLimits(
            config.max_inputs,
            config.max_request_tokens,
            config.max_deadline_s,
            config.max_request_bytes,
            config.max_message_bytes,
            config.max_answer_bytes,
            config.max_stream_requests,
            config.stalled_after_s,
        )
        self._keys = KeyRing(config.api_keys) if config.api_keys else None
        connection = ConnectionLimits(config.max_connection_requests, config.max_connection_streams)
        self._access = Access(connection, self._keys)
        work = WorkLimits(config.max_pending_requests, config.max_pending_bytes, config.max_streams)
        self._servicer = EncoderServicer(self._models, limits, work, self._access, self._tracing)
        self._health = health.aio.HealthServicer()
        self._announcer: asyncio.Task[None] | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._followers: list[asyncio.Task[None]] = []
        self._certificates = (
            Certificates(config.tls_cert, config.tls_key, config.tls_client_ca) if config.tls_cert else None
        )
        self._server: grpc.aio.Server | None = None
        self._health_server: grpc.aio.Server | None = None
        self._scrape: Scrape | None = None
        self.port = 0
        self.health_port: int | None = None
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Bind the ports, bring the models up, and begin to serve.

        Raises:
            StartupError: A port is taken, a certificate or the API keys cannot be used, or a model cannot be loaded.
        """
        if self._keys is not None:
            self._keys.load()
        self._server = self._bind()
        self._health_server = self._bind_health()
        self._start_metrics()
        await self._health.set(LIVENESS, _SERVING)
        await self._announce()
        self._follow_files()
        for server in self._servers():
            await server.start()
        try:
            await self._backend.start(self._models)
        except BaseException:
            for task in self._followers:
                task.cancel()
            for server in self._servers():
                await server.stop(None)
            raise
        _spare_the_collector()
        await self._announce()
        loop, lost = asyncio.get_running_loop(), self._models.lost
        self._announcer = loop.create_task(keep("health", self._keep_announcing, lost))
        self._pulse = loop.create_task(keep("pulse", _feel_the_pulse, lost))

    async def stop(self) -> None:
        """Drain: say NOT_SERVING, refuse new calls, answer the accepted ones, then close."""
        if self._announcer is not None:
            self._announcer.cancel()
        await self._announce(draining=True)
        is_lost = self._models.lost.done() and bool(self._models.lost.exception())
        await asyncio.sleep(0 if is_lost else self._config.drain_delay_s)
        grace_s = min(_LOST_GRACE_S, self._config.grace_s) if is_lost else self._config.grace_s
        started = time.monotonic()
        self._models.refuse()
        await asyncio.gather(*(served.engine.finish(grace_s) for served in self._models.all()))
        # Calls that are on their way now still get UNAVAILABLE from us, which clients try again; a call
        # that meets the closing itself would see CANCELLED.
        await asyncio.sleep(_LINGER_S)
        if self._server is not None:
            await self._server.stop(max(0.0, grace_s - (time.monotonic() - started)))
        await self._backend.stop()
        if self._health_server is not None:  # alive for its probes until nothing is left to do
            await self._health_server.stop(None)
        if self._scrape is not None:
            await asyncio.to_thread(self._scrape.close)
        for task in (self._pulse, *self._followers):
            if task is not None:
                task.cancel()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def lost(self) -> None:
        """Wait for ever, or until the models are gone for good.

        Raises:
            Lost: They are.
        """
        await asyncio.shield(self._models.lost)

    def check(self) -> None:
        """Do nothing while the models are there.

        Raises:
            Lost: They are gone for good.
        """
        if self._models.lost.done():
            self._models.lost.result()

    def ready_line(self) -> str:
        """Say in one line what runs where."""
        names = ", ".join(self._models.names)
        parts = [f"attencode serves {names} at {self._config.host}:{self.port}, {self._backend.summary()}"]
        if self._certificates is not None:
            parts.append("mutual TLS" if self._certificates.mutual else "TLS")
        if self._keys is not None:
            parts.append("API keys")
        if self.health_port is not None:
            parts.append(f"health on port {self.health_port}")
        if self.metrics_port is not None:
            parts.append(f"metrics on port {self.metrics_port}")
        return "; ".join(parts)

    def _servers(self) -> list[grpc.aio.Server]:
        return [server for server in (self._server, self._health_server) if server is not None]

    def _bind(self) -> grpc.aio.Server:
        config = self._config
        server = grpc.aio.server(options=server_options(config))
        server.add_generic_rpc_handlers((self._servicer.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            guarded = reflection.GuardedReflection(names, self._access)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(guarded, server)
        credentials = None if self._certificates is None else self._certificates.credentials()
        self.port = _listen(server, config.host, config.port, credentials)
        if credentials is None and not _is_loopback(config.host):
            read = "what clients send, and anyone may call" if self._keys is None else "API KEYS and what clients send"
            _LOG.warning(
                "NO TLS on %s:%d: whoever is on the way reads %s; give --tls-cert and --tls-key, unless a mesh or a "
                "gateway in front of this port encrypts",
                *(config.host, self.port, read),
            )
        return server

    def _bind_health(self) -> grpc.aio.Server | None:
        """Bind the port for probes that speak no TLS: health, and nothing else."""
        config = self._config
        if config.health_port == "none":
            return None
        server = grpc.aio.server(options=probe_options(config))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.health_port = _listen(server, config.host, config.health_port, None)
        return server

    def _follow_files(self) -> None:
        """Look again and again at the files that may be replaced while the server runs."""
        for name, files in (("api_keys", self._keys), ("tls", self._certificates)):
            if files is not None:
                work = keep(name, partial(follow, name, files.look), self._models.lost)
                self._followers.append(asyncio.get_running_loop().create_task(work))

    def _start_metrics(self) -> None:
        config = self._config
        if config.metrics_port == "none":
            return
        host = config.metrics_host or config.host
        # They are a fifth of all series, and of use to nobody here.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        memory = Memory()
        metrics.watch_memory(memory.used_bytes, memory.limit_bytes)
        metrics.watch_connections(Connections(self.port).count, config.max_connections)
        try:
            self._scrape = Scrape(host, config.metrics_port)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{config.metrics_port}: {error.strerror}; "
                "choose another --metrics-port, or none"
            ) from error
        self.metrics_port = self._scrape.port

    async def _announce(self, *, draining: bool = False) -> None:
        """Tell health which models answer; the server as a whole is ready while one of them does."""
        ready = [name for name in self._models.names if self._models.is_ready(name) and not draining]
        for name in self._models.names:
            await self._health.set(f"{SERVICE_NAME}/{name}", _SERVING if name in ready else _NOT_SERVING)
        for name in READINESS:
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)
        if self._models.lost.done():
            await self._health.set(LIVENESS, _NOT_SERVING)

    async def _keep_announcing(self) -> None:
        while True:
            await self._models.changed.wait()
            self._models.changed.clear()
            await self._announce()


async def _feel_the_pulse() -> None:
    """Measure for ever how late the event loop is, and how much of a core its thread uses."""
    loop = asyncio.get_running_loop()
    while True:
        due_s, used_s = loop.time() + _PULSE_S, time.thread_time()
        await asyncio.sleep(_PULSE_S)
        metrics.record_loop(max(0.0, loop.time() - due_s), time.thread_time() - used_s)


async def serve(config: ServiceConfig, backend: Backend, started: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Args:
        config: The settings.
        backend: Where the models run.
        started: When the process began, on the clock of `time.perf_counter`.

    Raises:
        StartupError: The server cannot start.
        Lost: The models are gone for good; what could still be answered is.
    """
    server = Server(config, backend)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    watch_loop(loop)
    watch_threads()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    out = sys.__stdout__ or sys.stdout  # Ray's own words go to stderr
    ready = f"{server.ready_line()} (ready after {time.perf_counter() - started:.1f} s)"
    out.write(line(ready, __name__, config.log_format) + "\n")
    out.flush()
    ends = {loop.create_task(stop.wait()), loop.create_task(server.lost())}
    ended, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    if lost := [
        error for task in ended if isinstance(error := task.exception(), Lost) and not isinstance(error, ClusterLost)
    ]:
        await server.stop()
        raise lost[0]
    for task in ended:
        task.result()
    warned = f"not ready, says health; new calls are refused in {config.drain_delay_s:g} s, "
    still = warned if config.drain_delay_s else "new calls are refused, "
    _LOG.info("draining: %saccepted ones have %.0f s", still, config.grace_s)
    await server.stop()
    _LOG.info("drained")


def _listen(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Bind a server's port; gives its number.

    Raises:
        ConfigError: It cannot be had.
    """
    _check_address(host, port)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error


def _is_loopback(host: str) -> bool:
    """Tell whether nobody outside this machine reaches an address, or a name of some."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


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


def _spare_the_collector() -> None:
    """Leave what lives as long as the server out of garbage collection, and collect less often.

    Requests make no cycles to speak of; at the default pace collecting took 0.8 % of both cores under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
