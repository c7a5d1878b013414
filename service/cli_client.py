"""How a command reaches a server: the flags of TLS and of the API key, and the client that they make.

The only reader of the variable ATTENCODE_API_KEY. May import: client, credentials, small_files, errors; the first two
when a command runs.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from service.errors import InvalidRequest
from service.small_files import read_small

_VARIABLE = "ATTENCODE_API_KEY"
_FILE_BYTES = 4096


class _NoArgument(argparse.Action):
    """Refuses a key as an argument, and does not repeat it; without this it would pass for a short --api-key-file."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _parsed: argparse.Namespace,
        _values: str | Sequence[Any] | None,
        _flag: str | None = None,
    ) -> None:
        parser.error(f"a key is no argument, which others see: put it into {_VARIABLE}, or use --api-key-file FILE")


def add_connection_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags; any of TLS means TLS."""
    add = command.add_argument_group(
        "TLS", "how the server is known, and who asks; each of them means --tls"
    ).add_argument
    add("--tls", action="store_true", help="the server speaks TLS; plaintext if unset")
    add("--tls-ca", default="", metavar="FILE", help="PEM of the CA of its certificate; the public ones if unset")
    add("--tls-cert", default="", metavar="FILE", help="PEM of a client's certificate, where the server wants one")
    add("--tls-key", default="", metavar="FILE", help="PEM of that certificate's private key")
    add("--tls-server-name", default="", metavar="NAME", help="the name in its certificate; that of --address if unset")
    which = f"file of the API key, where the server wants one; the variable {_VARIABLE} if unset"
    command.add_argument("--api-key-file", default="", metavar="FILE", help=which)
    command.add_argument("--api-key", action=_NoArgument, help=argparse.SUPPRESS)


def tls_of(parsed: argparse.Namespace) -> Any:
    """Give what the flags say: False, or a `Tls`."""
    from service.credentials import Tls  # noqa: PLC0415 - needs gRPC, which other commands may do without

    given = Tls(parsed.tls_ca, parsed.tls_cert, parsed.tls_key, parsed.tls_server_name)
    return given if parsed.tls or given != Tls() else False


def api_key_of(parsed: argparse.Namespace) -> str | None:
    """Give the API key of the file, or of the variable; None where there is neither.

    Raises:
        InvalidRequest: The file cannot be read, or holds more than a key.
    """
    if not parsed.api_key_file:
        return os.environ.get(_VARIABLE)
    try:
        content = read_small(parsed.api_key_file)
    except OSError as error:
        raise InvalidRequest(f"--api-key-file: cannot read {parsed.api_key_file!r}: {error.strerror}") from error
    if len(content) > _FILE_BYTES or not content.strip():
        raise InvalidRequest(f"--api-key-file: {parsed.api_key_file!r} must hold one API key, and nothing else")
    return content.decode("latin-1").rstrip("\r\n")  # what is no key is refused where it is used


def open_client(parsed: argparse.Namespace) -> Any:
    """Open a client of the server that the flags name."""
    from service.client import Client  # noqa: PLC0415 - as above

    return Client(parsed.address, timeout_s=parsed.timeout, tls=tls_of(parsed), api_key=api_key_of(parsed))
