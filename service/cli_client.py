"""How a command reaches a server: the flags of TLS, and the client that they make.

May import: client, credentials; both when a command runs.
"""

import argparse
from typing import Any


def add_tls_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags; any of them means TLS."""
    add = command.add_argument_group(
        "TLS", "how the server is known, and who asks; each of them means --tls"
    ).add_argument
    add("--tls", action="store_true", help="the server speaks TLS; plaintext if unset")
    add("--tls-ca", default="", metavar="FILE", help="PEM of the CA of its certificate; the public ones if unset")
    add("--tls-cert", default="", metavar="FILE", help="PEM of a client's certificate, where the server wants one")
    add("--tls-key", default="", metavar="FILE", help="PEM of that certificate's private key")
    add("--tls-server-name", default="", metavar="NAME", help="the name in its certificate; that of --address if unset")


def tls_of(parsed: argparse.Namespace) -> Any:
    """Give what the flags say: False, or a `Tls`."""
    from service.credentials import Tls  # noqa: PLC0415 - needs gRPC, which other commands may do without

    given = Tls(parsed.tls_ca, parsed.tls_cert, parsed.tls_key, parsed.tls_server_name)
    return given if parsed.tls or given != Tls() else False


def open_client(parsed: argparse.Namespace) -> Any:
    """Open a client of the server that the flags name."""
    from service.client import Client  # noqa: PLC0415 - as above

    return Client(parsed.address, timeout_s=parsed.timeout, tls=tls_of(parsed))
