"""Whom a server with TLS turns away, by which status, and what its metrics say of its certificate."""

import shutil
import socket
import ssl
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import prometheus_client
import pytest
from authority import Authority, Files

from attencode import Client, Tls, Unavailable
from service.pem import not_after
from service.server import Server
from tests.service.faults.load import wait_until
from tests.service.keyed import APART, ENCODE, LOOK_S, REQUEST, address, serving

HUNG_UP = "UNEXPECTED_EOF_WHILE_READING"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def served(authority: Authority) -> Files:
    return authority.sign("server")


@pytest.fixture(scope="module")
def mutual(tiny_artifact: Path, served: Files, authority: Authority) -> Iterator[Server]:
    files = {"tls_cert": str(served.cert), "tls_key": str(served.key), "tls_client_ca": str(authority.ca)}
    with serving(tiny_artifact, **files) as started:
        yield started


def status(server: Server, ca: Path, own: Files | None = None) -> grpc.StatusCode:
    """Give the status of a call without any of our client's own words."""
    pair = (own.key.read_bytes(), own.cert.read_bytes()) if own else (None, None)
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
    with grpc.secure_channel(address(server), credentials, options=APART) as channel:
        try:
            channel.unary_unary(ENCODE)(REQUEST.SerializeToString(), timeout=20)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_certificates_of_clients(mutual: Server, authority: Authority, stranger: Authority) -> None:
    """One of the CA is served; none, an expired one, and one of another CA are UNAVAILABLE: no call begins."""
    assert status(mutual, authority.ca, authority.sign("client")) == grpc.StatusCode.OK
    for own in (None, authority.sign("late", days=-3), stranger.sign("foreign")):
        assert status(mutual, authority.ca, own) == grpc.StatusCode.UNAVAILABLE
    assert status(mutual, stranger.ca, authority.sign("client")) == grpc.StatusCode.UNAVAILABLE


def test_an_expired_certificate_of_the_server(tiny_artifact: Path, tmp_path: Path) -> None:
    """Clients refuse it, with UNAVAILABLE and in words; once it is renewed they are served."""
    own = Authority(tmp_path)
    expired, fresh = own.sign("server", days=-3), own.sign("fresh")
    with serving(tiny_artifact, tls_cert=str(expired.cert), tls_key=str(expired.key)) as server:
        assert status(server, own.ca) == grpc.StatusCode.UNAVAILABLE
        with (
            Client(address(server), tls=Tls(own.ca)) as client,
            pytest.raises(Unavailable, match="not trusted, certificate has expired"),
        ):
            client.get_model()
        shutil.copy(fresh.key, expired.key)
        shutil.copy(fresh.cert, expired.cert)
        time.sleep(LOOK_S)
        assert status(server, own.ca) == grpc.StatusCode.OK


def handshake(server: Server, authority: Authority, least: ssl.TLSVersion, most: ssl.TLSVersion) -> str:
    """Give the version that a client and the server agree on; empty if the server refuses."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_ciphers("ALL:@SECLEVEL=0")  # else this side itself would not offer what is old
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version, context.maximum_version = least, most
    with socket.create_connection(("127.0.0.1", server.port), 20) as plain:
        try:
            with context.wrap_socket(plain) as spoken:
                return spoken.version() or ""
        except ssl.SSLError as error:
            return error.reason or ""
        except ConnectionResetError:
            return HUNG_UP


def test_tls_of_old(tiny_artifact: Path, served: Files, authority: Authority) -> None:
    """A client that offers 1.1 at most is refused; 1.2 and 1.3 are spoken."""
    old, middle, new = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
    with serving(tiny_artifact, tls_cert=str(served.cert), tls_key=str(served.key)) as server:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert handshake(server, authority, old, ssl.TLSVersion.TLSv1_1) in {
                HUNG_UP,
                "TLSV1_ALERT_PROTOCOL_VERSION",
            }
        assert handshake(server, authority, middle, middle) == "TLSv1.2"
        assert handshake(server, authority, middle, new) == "TLSv1.3"


def test_the_end_of_the_certificate_is_a_metric(tiny_artifact: Path, tmp_path: Path) -> None:
    """It is that of the next connection's certificate, though none comes; a broken pair does not move it."""
    own = Authority(tmp_path)
    shown, renewed = own.sign("server", days=3), own.sign("renewed", days=90)

    def end() -> float:
        return prometheus_client.REGISTRY.get_sample_value("attencode_tls_certificate_expiry_timestamp_seconds") or 0.0

    with serving(tiny_artifact, tls_cert=str(shown.cert), tls_key=str(shown.key)) as server:
        first = not_after(shown.cert.read_bytes()).timestamp()
        assert end() == first
        assert 2 < (first - datetime.now(UTC).timestamp()) / 86_400 < 4
        shutil.copy(renewed.key, shown.key)
        time.sleep(LOOK_S)
        assert end() == first
        shutil.copy(renewed.cert, shown.cert)
        wait_until(lambda: end() == not_after(renewed.cert.read_bytes()).timestamp())
        with Client(address(server), tls=Tls(own.ca)) as client:  # which gRPC has been told of too
            client.get_model()
        seen = ssl.get_server_certificate(("127.0.0.1", server.port))
        assert not_after(seen.encode()) == not_after(renewed.cert.read_bytes())
