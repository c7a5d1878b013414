"""The command `attencode health`: one question to a server's gRPC health service, answered by the exit status.

For health checks of container images, which bring no other client. May import: cli_client, credentials,
statuses, errors, grpc, grpc_health.
"""

import argparse
import sys
from typing import Any

from service.cli_client import add_connection_arguments, api_key_of, tls_of
from service.errors import InvalidRequest

_TIMEOUT_S = 3.0


def add(commands: Any, default_address: str, seconds: Any) -> None:
    """Add the command.

    Args:
        commands: Where argparse keeps subcommands.
        default_address: Of the server, where the command line has none.
        seconds: Reads a deadline from a word.
    """
    health = commands.add_parser("health", help="ask whether a server is healthy: exit status 0 if it is, else 1")
    health.add_argument("--address", default=default_address, help=f"the server, {default_address} if unset")
    health.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="what to ask after: liveness, attencode.v1.Encoder, attencode.v1.Encoder/MODEL; the whole server if unset",
    )
    health.add_argument("--timeout", type=seconds, default=_TIMEOUT_S, metavar="SECONDS", help="deadline, 3 if unset")
    add_connection_arguments(health)
    health.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Ask, print one line, and give 0 where the answer is SERVING, else 1."""
    import grpc  # noqa: PLC0415 - slow to import, as is the next
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    from service.credentials import authorization, channel  # noqa: PLC0415
    from service.statuses import Callee  # noqa: PLC0415

    if not parsed.address:
        raise InvalidRequest("the server's address is empty; give host and port, for instance 127.0.0.1:50051")
    wanted = channel(tls_of(parsed))
    encrypted = wanted.credentials is not None
    callee = Callee(parsed.address, parsed.timeout, encrypted, wanted.shows_certificate)
    metadata = authorization(api_key_of(parsed), parsed.address, encrypted=encrypted)
    # A proxy of the environment is for the world outside, not for the port beside us.
    with wanted.open(grpc, parsed.address, (("grpc.enable_http_proxy", 0),)) as opened:
        stub: Any = health_pb2_grpc.HealthStub(opened)
        try:
            asked_for = health_pb2.HealthCheckRequest(service=parsed.service)
            answer = stub.Check(asked_for, timeout=parsed.timeout, metadata=metadata)
        except grpc.RpcError as error:
            unavailable = error.code() == grpc.StatusCode.UNAVAILABLE
            details = str(callee.error(error)) if unavailable else error.details() or ""
            status, details = error.code().name, " ".join(details.split())
        else:
            status, details = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status), ""
    healthy = status == "SERVING"
    asked = f"{parsed.service} at {parsed.address}" if parsed.service else parsed.address
    line = f"{asked}: {status}" + (f", {details}" if details else "")
    (sys.stdout if healthy else sys.stderr).write(line + "\n")
    return 0 if healthy else 1
