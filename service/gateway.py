"""Gateway: a whole server as a Ray Serve deployment, for clusters: at most one on a node, with a port of its own.

`gateway` builds the application from plain settings, for `serve run` and `serve deploy`.
May import: cluster, server, config, ray, pydantic.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve

from service.cluster import RayBackend
from service.config import RAY_VARIABLES, ServiceConfig
from service.server import Server

GATEWAY = "Gateway"


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

    async def __init__(self, settings: GatewaySettings) -> None:  # type: ignore[misc]
        """Start the server."""
        config = ServiceConfig.model_validate({"ray": True, "model": settings.models[0], **settings.settings})
        self._server = Server(config, RayBackend(config, settings.models, wait=False))
        await self._server.start()

    async def check_health(self) -> None:
        """Do nothing while the models are there; that it is answered says that the loop runs.

        Raises:
            Lost: They are gone for good; Serve replaces the gateway.
        """
        self._server.check()

    async def address(self) -> str:
        """Say where this gateway listens."""
        return self._server.ready_line()

    async def __del__(self) -> None:
        """Drain."""
        await self._server.stop()


def gateway(settings: GatewaySettings) -> serve.Application:
    """Build the gateways' application."""
    deployment = serve.deployment(
        name=GATEWAY,
        num_replicas=settings.gateways,
        max_replicas_per_node=1,
        graceful_shutdown_timeout_s=40.0,
        ray_actor_options={
            "num_cpus": settings.gateway_cpus,
            "runtime_env": {"env_vars": RAY_VARIABLES},
        },
    )(Gateway)
    return deployment.bind(settings)
