"""TLS between real clients and real servers: who is let in, what is said of it, certificates that change."""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from authority import Authority, Files, shown_serial
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import attencode
from attencode import Client, Tls, Unavailable
from service.cli import main
from service.config import parse_config
from service.errors import ConfigError, InvalidRequest
from service.pem import not_after
from service.tls import Certificates
from tests.service.faults.load import wait_until
from tests.service.keyed import LOOK_S


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def started(spawn_for_all: Callable[..., object]) -> Callable[..., object]:
    return partial(spawn_for_all, ATTENCODE_PROVIDER="cpu", ATTENCODE_PRECISION="float32")


@pytest.fixture(scope="module")
def served(authority: Authority) -> Files:
    """Give the certificate that the server of these tests shows."""
    return authority.sign("server")


@pytest.fixture(scope="module")
def server(started: Callable[..., object], tiny_artifact: Path, served: Files) -> object:
    return started(tiny_artifact, "--tls-cert", str(served.cert), "--tls-key", str(served.key), "--health-port", "0")


@pytest.fixture(scope="module")
def mutual(started: Callable[..., object], tiny_artifact: Path, served: Files, authority: Authority) -> object:
    flags = ("--tls-cert", str(served.cert), "--tls-key", str(served.key), "--tls-client-ca", str(authority.ca))
    return started(tiny_artifact, *flags)


def refusal(address: str, tls: Tls | bool) -> str:
    """Give the words of a call that does not come through."""
    with Client(address, tls=tls, timeout_s=10) as client, pytest.raises(Unavailable) as caught:
        client.get_model()
    return str(caught.value)


def test_calls_by_tls(server: object, authority: Authority) -> None:
    """Both clients are answered by a server whose CA they know, which says that it speaks TLS."""
    assert "; TLS; health on port " in server.line
    with Client(server.address, tls=Tls(ca=authority.ca)) as client:
        pooled = client.encode(["abc", "d"]).pooled
        assert len(list(client.encode_stream([attencode.encode_request("abc")]))) == 1

    async def ask() -> object:
        async with attencode.AsyncClient(server.address, tls=Tls(ca=str(authority.ca))) as other:
            return (await other.encode(["abc", "d"])).pooled

    assert (asyncio.run(ask()) == pooled).all()
    port = server.address.rpartition(":")[2]
    with Client(f"localhost:{port}", tls=Tls(ca=authority.ca, server_name="server.test")) as client:
        client.get_model()


def test_the_example_of_the_readme(
    server: object, authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs as it stands, where `ca.pem` is, against a server at another port."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    found = re.search(r"<!-- test: tls -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert found
    monkeypatch.chdir(authority.ca.parent)
    exec(compile(found[1].replace("127.0.0.1:50051", server.address), "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.startswith("(1, ")


def test_who_is_not_served(server: object, stranger: Authority, authority: Authority) -> None:
    """Plaintext, a CA that is not the server's, and a name that is not in its certificate: each is said in words."""
    assert "speaks TLS" in refusal(server.address, tls=False)
    assert "not trusted, unable to get local issuer certificate; give the file of its CA" in refusal(
        server.address, Tls(ca=stranger.ca)
    )
    assert "not trusted" in refusal(server.address, tls=True)
    assert "for other names than this address" in refusal(
        server.address, Tls(ca=authority.ca, server_name="other.test")
    )


def test_tls_to_a_server_without(started: Callable[..., object], tiny_artifact: Path) -> None:
    """A client that speaks TLS to a plaintext server is told to leave it out."""
    assert "speaks plaintext" in refusal(started(tiny_artifact).address, tls=True)


def test_mutual_tls(mutual: object, authority: Authority, stranger: Authority) -> None:
    """A client with a certificate of the CA is served; one without, or with another CA's, is not, and told so."""
    assert "; mutual TLS" in mutual.line
    good, foreign = authority.sign("client"), stranger.sign("client")
    with Client(mutual.address, tls=Tls(authority.ca, good.cert, good.key)) as client:
        client.encode("abc")
    assert "wants a client's certificate" in refusal(mutual.address, Tls(authority.ca))
    assert "trusts another CA" in refusal(mutual.address, Tls(authority.ca, foreign.cert, foreign.key))


def test_commands_by_tls(
    mutual: object, authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that calls a server takes the flags; what is wrong is one line."""
    own = authority.sign("command")
    flags = ["--address", mutual.address, "--tls-ca", str(authority.ca), "--tls-cert", str(own.cert)]
    flags += ["--tls-key", str(own.key)]
    (tmp_path / "texts.txt").write_text("abc\n")
    files = ["--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "vectors.npy")]
    for words in (["encode", "abc"], ["attend", "abc"], ["info"], ["health"], ["encode", *files]):
        assert main([*words, *flags]) == 0, words
    capsys.readouterr()
    for words in (["info"], ["health"]):
        assert main([*words, "--address", mutual.address, "--tls-ca", str(authority.ca)]) == 1
        printed = capsys.readouterr().err
        assert "show one, as tls=attencode.Tls(cert=FILE, key=FILE) or --tls-cert FILE" in printed
        assert printed.count("\n") == 1
    assert main(["info", "--address", mutual.address, "--tls-ca", str(tmp_path / "none.pem")]) == 1
    assert "none.pem': No such file" in capsys.readouterr().err


def test_what_a_client_is_given(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    """Files that are no certificates, no pair or not valid, and credentials twice, are refused when it is made."""
    own, other = authority.sign("one"), stranger.sign("two")
    old, early = authority.sign("old", days=-3), authority.sign("early", since=3, days=9)
    (tmp_path / "text.pem").write_text("secret")
    for tls, words in (
        (Tls(ca=tmp_path / "text.pem"), "holds no certificate in PEM"),
        (Tls(ca="/dev/zero"), "it is a character device; name a regular file"),
        (Tls(cert=own.cert), "go together"),
        (
            Tls(cert=old.cert, key=old.key),
            rf"old.pem' expired on {not_after(old.cert.read_bytes()):%Y-%m-%d %H:%M} UTC",
        ),
        (
            Tls(cert=early.cert, key=early.key),
            r"early.pem' is not valid before \d{4}-\d\d-\d\d \d\d:\d\d UTC; give one",
        ),
        (Tls(cert=own.cert, key=other.key), "does not match the certificate"),
        ("ca.pem", "tls must be True, False or attencode.Tls"),
    ):
        with pytest.raises(InvalidRequest, match=words) as caught:
            Client("127.0.0.1:1", tls=tls)  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest, match="give one of them"):
        Client("127.0.0.1:1", tls=True, credentials=grpc.ssl_channel_credentials())


def put(source: Files, target: Files) -> None:
    """Replace one pair of files by another, as a volume of Kubernetes does: file by file, each at once."""
    for before, after in ((source.cert, target.cert), (source.key, target.key)):
        copied = Path(shutil.copy(before, f"{after}.new"))
        copied.replace(after)


def test_a_certificate_that_is_replaced_under_calls(
    started: Callable[..., object], tiny_artifact: Path, authority: Authority
) -> None:
    """No call fails while the files change; new connections see the new serial; a broken pair changes nothing."""
    served, new, other = (authority.sign(name) for name in ("rolled", "new", "unmatched"))
    server = started(tiny_artifact, "--tls-cert", str(served.cert), "--tls-key", str(served.key))
    unshared = (("grpc.use_local_subchannel_pool", 1),)

    def call_often(number: int) -> int:
        with Client(server.address, tls=Tls(ca=authority.ca), options=unshared) as kept:
            for _ in range(30):
                kept.encode("abc")
                with Client(server.address, tls=Tls(ca=authority.ca), options=unshared) as fresh:
                    fresh.encode("abc")
        return number

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call_often, number) for number in range(3)]
        assert shown_serial(server.address) == served.serial
        put(new, served)
        wait_until(lambda: shown_serial(server.address) == new.serial)
        Path(shutil.copy(other.key, f"{served.key}.new")).replace(served.key)
        for _ in range(3):
            assert shown_serial(server.address) == new.serial
            time.sleep(LOOK_S)
        assert [call.result(60) for call in calls] == [0, 1, 2]
    assert server.terminate() == 0
    logged = server.process.stderr.read()
    assert 1 <= logged.count("new TLS files cannot be used") <= 3  # not once a look
    assert "does not match the certificate" in logged
    assert "new connections get a new certificate, valid until 20" in logged
    assert "PRIVATE" not in logged


def test_the_port_for_probes(server: object, capsys: pytest.CaptureFixture[str]) -> None:
    """It answers health in plaintext under every name, and nothing else: no model, no reflection."""
    port = server.line.partition("health on port ")[2].split(";")[0]
    for name in ("", "attencode.v1.Encoder", "liveness"):
        assert main(["health", "--address", f"127.0.0.1:{port}", "--service", name]) == 0
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        statuses = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(statuses).status == health_pb2.HealthCheckResponse.SERVING
        statuses.cancel()
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing])))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    with Client(f"127.0.0.1:{port}") as client, pytest.raises(attencode.RemoteError, match="UNIMPLEMENTED"):
        client.encode("abc")


def test_the_port_for_probes_while_draining(started: Callable[..., object], tiny_artifact: Path) -> None:
    """From SIGTERM on it says NOT_SERVING, and that the process lives; the server still ends in order."""
    server = started(tiny_artifact, "--health-port", "0", "--drain-delay-s", "2")
    address = f"127.0.0.1:{server.line.partition('health on port ')[2].split(';')[0]}"
    server.process.terminate()
    for _ in range(100):  # the signal is on its way
        if main(["health", "--address", address]):
            break
    assert main(["health", "--address", address, "--service", "attencode.v1.Encoder"]) == 1
    assert main(["health", "--address", address, "--service", "liveness"]) == 0
    assert server.process.wait(30) == 0


def test_plaintext_in_the_open_is_told(started: Callable[..., object], tiny_artifact: Path) -> None:
    """A server that others can reach without TLS says so in one line of its log; one on loopback does not."""
    for host, told in (("0.0.0.0", 1), ("localhost", 0)):
        server = started(tiny_artifact, "--host", host)
        assert server.terminate() == 0
        assert server.process.stderr.read().count("NO TLS on ") == told


def test_settings_that_go_together(served: Files, authority: Authority) -> None:
    """A certificate without its key, or a CA of clients without a certificate, is refused."""
    cert, key, ca = ("--tls-cert", str(served.cert)), ("--tls-key", str(served.key)), ("--tls-client-ca", "ca.pem")
    assert parse_config(["m", *cert, *key, *ca, "--health-port", "1"]).health_port == 1
    assert parse_config(["m"]).health_port == "none"
    for flags, words in ((cert, "both, or neither"), (key, "both, or neither"), (ca, "goes with --tls-cert")):
        with pytest.raises(ConfigError, match=words):
            parse_config(["m", *flags])


@pytest.mark.parametrize("name", ["TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA"])
def test_an_empty_setting_turns_nothing_off(served: Files, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A variable that is set to nothing, as a template may leave it, is refused by its name."""
    flags = {"TLS_CERT": f"--tls-cert={served.cert}", "TLS_KEY": f"--tls-key={served.key}"}
    monkeypatch.setenv(f"ATTENCODE_{name}", "")
    with pytest.raises(ConfigError, match=f"ATTENCODE_{name}.* is empty; name a PEM file"):
        parse_config(["m", *(flag for other, flag in flags.items() if other != name)])


def test_a_strangers_words_are_not_logged(
    spawn_local: Callable[..., Any], tiny_artifact: Path, served: Files, authority: Authority
) -> None:
    """A handshake that fails, and the name that its client asks for, leave no line in a log of JSON objects."""
    flags = ("--tls-cert", str(served.cert), "--tls-key", str(served.key), "--log-format", "json")
    started = spawn_local(tiny_artifact, *flags, "--tls-client-ca", str(authority.ca))
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.check_hostname = False
    host, _, port = started.address.rpartition(":")
    for _ in range(3):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="words-of-a-stranger.example") as spoken,
        ):
            spoken.recv(1)
    assert started.terminate() == 0
    lines = started.process.stderr.read().splitlines()
    assert lines
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert "stranger" not in "".join(lines)


def test_files_that_stop_the_start(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    """Each is said in words with the flag and the file, and without what is in it."""
    good, other = authority.sign("good"), stranger.sign("other")
    locked = authority.sign("locked", password=b"swordfish")
    text, broken, pipe = tmp_path / "text.pem", tmp_path / "broken.pem", tmp_path / "pipe.pem"
    os.mkfifo(pipe)
    text.write_text("secret")
    broken.write_text("-----BEGIN CERTIFICATE-----\nc2VjcmV0\n-----END CERTIFICATE-----\n")
    for cert, key, ca, words in (
        (tmp_path / "none", good.key, "", "--tls-cert: cannot read '.*none': No such file"),
        (pipe, good.key, "", "--tls-cert: cannot read '.*': it is a named pipe; name a regular file"),
        ("/dev/zero", good.key, "", "--tls-cert: cannot read '.*': it is a character device"),
        (good.cert, good.key, "/dev/zero", "--tls-client-ca: cannot read '.*': it is a character device"),
        (good.cert, tmp_path, "", "--tls-key: cannot read '.*': Is a directory"),
        (text, good.key, "", "--tls-cert: '.*' holds no certificate in PEM"),
        (good.key, good.cert, "", "--tls-cert: '.*' holds no certificate in PEM"),
        (good.cert, text, "", "--tls-key: '.*' holds no private key in PEM"),
        (broken, good.key, "", "no certificate and key that can be used"),
        (good.cert, other.key, "", "--tls-key: the key in '.*' does not match the certificate in"),
        (good.cert, locked.key, "", "--tls-key: the key in '.*' wants a password"),
        (good.cert, good.key, text, "--tls-client-ca: '.*' holds no certificate in PEM"),
        (good.cert, good.key, broken, "--tls-client-ca: '.*' holds a certificate that cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            Certificates(str(cert), str(key), str(ca)).check()
        assert "secret" not in str(caught.value)
    Certificates(str(good.cert), str(good.key), str(authority.ca)).check()


def test_keys_that_grpc_takes(authority: Authority) -> None:
    """RSA, P-256 and P-384 serve a call of a gRPC client; other keys, which none would take, are refused in words."""
    for number, key in enumerate((rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1()))):
        files = authority.sign(f"taken-{number}", key=key)
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_secure_port("127.0.0.1:0", Certificates(str(files.cert), str(files.key)).credentials())
        server.start()
        with (
            Client(f"127.0.0.1:{port}", tls=Tls(authority.ca)) as client,
            pytest.raises(attencode.RemoteError) as caught,
        ):
            client.get_model()
        assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED  # it was reached, and knows no method
        server.stop(None).wait()
    for number, key in enumerate((ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP521R1()))):
        files = authority.sign(f"refused-{number}", key=key)
        with pytest.raises(ConfigError, match="must be RSA, or ECDSA on P-256 or P-384"):
            Certificates(str(files.cert), str(files.key)).check()


def test_a_wrong_key_stops_the_command(
    authority: Authority, stranger: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`attencode serve` ends before it looks at its model, with one line."""
    cert, key = authority.sign("server-2").cert, stranger.sign("server-2").key
    assert main(["serve", str(tmp_path / "no-model"), "--tls-cert", str(cert), "--tls-key", str(key)]) == 1
    printed = capsys.readouterr().err
    assert "does not match the certificate" in printed
    assert printed.count("\n") == 1


def test_a_certificate_that_is_not_valid_is_a_warning(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """The server starts with it, expired or not valid yet, and says when clients refuse it; its end is as written."""
    expired = authority.sign("expired", days=-3)
    with caplog.at_level(logging.WARNING, "service.tls"):
        Certificates(str(expired.cert), str(expired.key)).credentials()
    end = not_after(expired.cert.read_bytes())
    assert f"expired on {end:%Y-%m-%d %H:%M} UTC" in caplog.text
    early = authority.sign("awaited", since=3, days=9)
    with caplog.at_level(logging.WARNING, "service.tls"):
        Certificates(str(early.cert), str(early.key)).credentials()
    from cryptography import x509

    begin = x509.load_pem_x509_certificate(early.cert.read_bytes()).not_valid_before_utc
    assert f"awaited.pem' is not valid before {begin:%Y-%m-%d %H:%M} UTC; clients will refuse it" in caplog.text
    for days in (1, 365 * 40):  # the second is written as another kind of time
        cert = authority.sign("dated", days=days).cert.read_bytes()
        assert not_after(cert) == x509.load_pem_x509_certificate(cert).not_valid_after_utc
