"""Clients and commands that show an API key."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import attencode
from attencode import Client
from service.cli import main
from service.errors import InvalidRequest
from service.server import Server
from tests.service.keyed import Keys, address, serving


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("keys"))
    made.add("search")
    return made


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, keys: Keys) -> Iterator[Server]:
    with serving(tiny_artifact, api_keys=str(keys.path)) as started:
        yield started


def test_commands_show_a_key(
    server: Server, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from a file or the variable, in every command; as an argument it is refused and not repeated."""
    good, target = keys.known["search"], ["--address", address(server)]
    (tmp_path / "key").write_text(good + "\n")
    (tmp_path / "texts.txt").write_text("abc\n")
    files = ["--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "vectors.npy")]
    for words in (["encode", "abc"], ["attend", "abc"], ["info"], ["health"], ["encode", *files]):
        assert main([*words, *target, "--api-key-file", str(tmp_path / "key")]) == 0, words
    assert main(["info", *target]) == 1
    assert "wants an API key" in capsys.readouterr().err
    monkeypatch.setenv("ATTENCODE_API_KEY", good)
    assert main(["info", *target]) == 0
    (tmp_path / "other").write_text("atc_other")
    assert main(["info", *target, "--api-key-file", str(tmp_path / "other")]) == 1
    assert "does not know the API key" in capsys.readouterr().err
    for content, told in ((b"", "must hold one API key"), (b"a" * 5000, "must hold one API key")):
        (tmp_path / "other").write_bytes(content)
        assert main(["info", *target, "--api-key-file", str(tmp_path / "other")]) == 1
        assert told in capsys.readouterr().err
    for content in (b"se cret", b"secret\nsecret", "s\u00fccret".encode(), b"\xff"):
        (tmp_path / "other").write_bytes(content)
        assert main(["info", *target, "--api-key-file", str(tmp_path / "other")]) == 1
        printed = capsys.readouterr().err
        assert "holds what no key does" in printed
        assert "cret" not in printed
    assert main(["info", *target, "--api-key-file", str(tmp_path / "none")]) == 1
    assert "none': No such file" in capsys.readouterr().err
    for words in (["--api-key", "swordfish"], ["--api-key=swordfish"]):
        with pytest.raises(SystemExit):
            main(["info", *target, *words])
        printed = capsys.readouterr().err
        assert "a key is no argument" in printed
        assert "swordfish" not in printed
    monkeypatch.setenv("ATTENCODE_API_KEY", "")
    assert main(["info", *target]) == 1
    assert "ATTENCODE_API_KEY unset" in capsys.readouterr().err


def test_a_client_and_its_key(caplog: pytest.LogCaptureFixture) -> None:
    """What is no key is refused and not repeated, none of its parts shows it, and plaintext abroad is told once."""
    for key in ("swordfish\n", "sword fish", "sw\u00f6rdfish", b"swordfish", ""):
        with pytest.raises(InvalidRequest) as caught:
            Client("127.0.0.1:1", api_key=key)  # type: ignore[arg-type]
        assert "fish" not in str(caught.value)
    with Client("127.0.0.1:1", api_key="swordfish", timeout_s=0.2) as client:
        with pytest.raises(attencode.AttencodeError) as failed:
            client.encode("abc")
        assert "swordfish" not in f"{client!r} {vars(client)} {failed.value!r} {failed.value.__cause__!r}"
    for place in ("localhost:1", "[::1]:1", "dns:///localhost:1", "unix:/tmp/x", "ipv4:127.0.0.1:1"):
        Client(place, api_key="swordfish").close()
    Client("far.example:1", api_key="swordfish", tls=True).close()
    Client("far.example:1").close()
    assert not caplog.text
    for place in ("far.example:1", "dns:///far.example:1", "10.0.0.1:1", "far.example:1"):
        Client(place, api_key="swordfish").close()
    assert caplog.text.count("NO TLS to ") == 3
    assert "swordfish" not in caplog.text
