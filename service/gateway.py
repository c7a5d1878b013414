"""Gateway: a whole server as a Ray Serve deployment, for clusters: at most one on a node, with a port of its own.

`gateway` builds the application from plain settings, for `serve run` and `serve deploy`.
May import: cluster, server, config, ray, pydantic.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve

from service.cluster import RayBackend
from service.config import ServiceConfig
from service.server import Server

GATEWAY = "Gateway"
_HEALTH_PERIOD_S = 2.0


class GatewaySettings(BaseModel):
    """What a gateway application is made of.

    Attributes:
        models: Names of the models to serve, each an application `attencode-NAME`; the first is the default.
        gateways: How many, on as many nodes: each opens the same port.
        gateway_cpus: Cores of each.
        settings: Settings of `attencode serve`, by their names: host, port, metrics_port, limits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: list[str]
    gateways: int = 1
    gateway_cpus: float = 1.0
    settings: dict[str, Any] = {}


class Gateway:
    """A whole server on one node, its port open to clients; its models run on the replicas of other applications."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Store the settings; the first health check starts the server, on the loop that goes on."""
        config = ServiceConfig.model_validate({"ray": True, "model": settings.models[0], **settings.settings})
        self._server = Server(config, RayBackend(config, names=settings.models))
        self._started = False

    async def check_health(self) -> None:
        """Start the server once."""
        if not self._started:
            self._started = True
            await self._server.start()

    async def address(self) -> str:
        """Say where this gateway listens."""
        return self._server.ready_line()

    async def __del__(self) -> None:
        """Drain."""
        if self._started:
            self._started = False
            await self._server.stop()


def gateway(settings: GatewaySettings) -> serve.Application:
    """Build the gateways' application."""
    deployment = serve.deployment(
        name=GATEWAY,
        num_replicas=settings.gateways,
        max_replicas_per_node=1,
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=40.0,
        ray_actor_options={
            "num_cpus": settings.gateway_cpus,
            "runtime_env": {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}},
        },
    )(Gateway)
    return deployment.bind(settings)
