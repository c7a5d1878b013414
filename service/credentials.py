"""Credentials: whom a client trusts, and what it shows of itself. May import: pem, values, errors, grpc."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

import grpc

from service import pem
from service.errors import InvalidRequest
from service.values import shown

_LOG = logging.getLogger(__name__)
_KEY = re.compile(r"[!-~]+")
_SCHEME = re.compile(r"^(?:dns|ipv4|ipv6|passthrough):(?://[^/]*/)?")

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """A connection by TLS: its files are PEM, read when a client is made.

    Attributes:
        ca: File of the CAs that the server's certificate may be of; empty for the public ones that gRPC knows.
        cert: File of the client's own certificate, where the server asks for one (mutual TLS).
        key: File of its private key.
        server_name: The name in the server's certificate, where it is called by another one, as behind a tunnel.
    """

    ca: PathLike = ""
    cert: PathLike = ""
    key: PathLike = ""
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Channel:
    """What opens a channel.

    Attributes:
        credentials: None for plaintext.
        options: That go with them.
        shows_certificate: Whether the server sees who the client is.
    """

    credentials: grpc.ChannelCredentials | None = None
    options: tuple[tuple[str, Any], ...] = ()
    shows_certificate: bool = False

    def open(self, module: Any, address: str, options: Sequence[tuple[str, Any]]) -> Any:
        """Open a channel of `grpc`, or of `grpc.aio`."""
        every = [*options, *self.options]
        if self.credentials is None:
            return module.insecure_channel(address, options=every)
        return module.secure_channel(address, self.credentials, options=every)


def channel(tls: Tls | bool, credentials: grpc.ChannelCredentials | None = None) -> Channel:  # noqa: FBT001
    """Read what a client says of its connection.

    Args:
        tls: True for a server with a certificate of a public CA; False for plaintext.
        credentials: Ready-made ones instead.

    Raises:
        InvalidRequest: A file cannot be used, or things are given that do not go together.
    """
    if not isinstance(tls, Tls | bool):
        raise InvalidRequest(f"tls must be True, False or attencode.Tls(ca=..., cert=..., key=...), got {shown(tls)}")
    if credentials is not None:
        if tls is not False:
            raise InvalidRequest("tls and credentials are two ways to say the same; give one of them")
        return Channel(credentials)
    if tls is False:
        return Channel()
    wanted = Tls() if tls is True else tls
    try:
        ca, cert, key = (os.fspath(path) for path in (wanted.ca, wanted.cert, wanted.key))
        if bool(cert) != bool(key):
            raise ValueError("a client's certificate and its key go together; give both, or neither")
        roots = pem.read_authorities(ca, "the server's CA") if ca else None
        pair = pem.read_pair(cert, key, "the client's certificate", "the client's key") if cert else None
        if pair is not None and (told := pem.when_invalid(pair.cert)):  # of which the server would only hang up
            raise ValueError(f"the client's certificate in {cert!r} {told}; give one that is valid now")
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"tls: {error}") from error
    made = grpc.ssl_channel_credentials(roots, pair and pair.key, pair and pair.cert)
    name = (("grpc.ssl_target_name_override", wanted.server_name),) if wanted.server_name else ()
    return Channel(made, name, pair is not None)


def authorization(api_key: str | None, address: str, *, encrypted: bool) -> tuple[tuple[str, str], ...]:
    """Give the metadata by which calls show an API key; none without one.

    Args:
        api_key: The key; in no message, whatever is wrong with it.
        address: Of the server.
        encrypted: Whether nobody on the way there can read it.

    Raises:
        InvalidRequest: It is no key.
    """
    if api_key is None:
        return ()
    if not isinstance(api_key, str):
        raise InvalidRequest(f"api_key must be a text, got one of type {type(api_key).__name__}")
    if not api_key:
        raise InvalidRequest("the API key is empty; give one, or none: leave api_key out, or ATTENCODE_API_KEY unset")
    if not _KEY.fullmatch(api_key):
        raise InvalidRequest(
            "the API key holds what no key does, a blank, a line's end or something outside ASCII; give it as "
            "`attencode keys new` printed it"
        )
    if not encrypted and not _is_near(address):
        _warn_of_plaintext(address)
    return (("authorization", f"Bearer {api_key}"),)


def _is_near(address: str) -> bool:
    """Tell whether an address is plainly on this machine; no name is looked up."""
    if address.startswith("unix"):
        return True
    place = _SCHEME.sub("", address)
    host = place[1 : place.find("]")] if place.startswith("[") else place.rpartition(":")[0] or place
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=256)  # once for each address
def _warn_of_plaintext(address: str) -> None:
    _LOG.warning(
        "NO TLS to %s: whoever is on the way there reads the API key; use tls=, or --tls, unless a mesh encrypts",
        address,
    )
