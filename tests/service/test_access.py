"""Who may call: API keys and the limits of keys and connections, at a real server with real clients."""

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import attencode
from attencode import Client, QueueFull, Unauthenticated
from service.cli import main
from service.config import parse_config
from service.errors import ConfigError
from service.keys import digest_of
from service.pb import encoder_pb2 as pb
from service.server import Server
from tests.service.keyed import (
    APART,
    ENCODE,
    LOOK_S,
    REQUEST,
    STREAM,
    Keys,
    address,
    refused,
    retry_delay_s,
    serving,
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("keys"))
    made.add("search")
    made.add("rated", requests_per_second=0.001, burst=3)
    made.add("narrow", max_concurrent=2)
    made.add("heavy", weight=3)
    made.add("heavier", weight=4)
    return made


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, keys: Keys) -> Iterator[Server]:
    """Serve with keys; a batch waits for company, so that requests can be found in work."""
    with serving(tiny_artifact, api_keys=str(keys.path), max_queue_delay_ms=300) as started:
        yield started


def ask(address: str, *metadata: tuple[str, str], data: bytes | None = None) -> grpc.RpcError:
    """Give the refusal of a call with any metadata."""
    with grpc.insecure_channel(address) as channel:
        message = REQUEST.SerializeToString() if data is None else data
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(ENCODE)(message, metadata=metadata, timeout=20)
    return caught.value


def test_who_is_let_in(server: Server, keys: Keys) -> None:
    """With a key every method answers, both clients and streams; without, with a wrong one or a malformed one none."""
    with Client(address(server), api_key=keys.known["search"]) as client:
        pooled = client.encode("abc").pooled
        client.tokenize("abc")
        client.get_model()
        assert len(list(client.encode_stream([attencode.encode_request("abc")]))) == 1

    async def answered() -> Any:
        async with attencode.AsyncClient(address(server), api_key=keys.known["search"]) as other:
            (item,) = [answer async for answer in other.encode_stream([attencode.encode_request("abc")])]
            await other.get_model()
            return item, (await other.encode("abc")).pooled

    assert (asyncio.run(answered())[1] == pooled).all()
    for key in (None, "atc_wrong"):
        with Client(address(server), api_key=key) as client:
            for call in (
                lambda: client.encode("abc"),
                lambda: client.tokenize("abc"),
                client.get_model,
                lambda: list(client.encode_stream([attencode.encode_request("abc")])),
            ):
                with pytest.raises(Unauthenticated, match="api_key=KEY, or for a command ATTENCODE_API_KEY"):
                    call()


def test_no_key_wrong_key_malformed_header(server: Server, keys: Keys) -> None:
    """Each is UNAUTHENTICATED, counted, and told what to send; no wrong key is told from another."""
    good, before = keys.known["search"], refused("unauthenticated")
    none = ask(address(server))
    wrong = [ask(address(server), ("authorization", f"Bearer {key}")) for key in ("x", good[:-1], good + "x")]
    malformed = [
        ask(address(server), *metadata)
        for metadata in (
            [("authorization", good)],
            [("authorization", f"Basic {good}")],
            [("authorization", f"Bearer {good}")] * 2,
            [("authorization", "")],
            [("authorization-bin", b"\xff" + good.encode())],
        )
    ]
    for error in (none, *wrong, *malformed):
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert good not in str(error)
    assert len({error.details() for error in wrong}) == 1
    for error in (none, *malformed):
        assert "`authorization: Bearer KEY`" in error.details()
    assert refused("unauthenticated") - before == 9


def test_a_stranger_costs_no_work(server: Server) -> None:
    """What a stranger sends is not parsed, and not even waited for."""
    garbage = ask(address(server), data=b"\xff" * 3_000_000)
    assert garbage.code() == grpc.StatusCode.UNAUTHENTICATED
    beyond = ask(address(server), data=b"\xff" * 5_000_000)  # more than a request may have
    assert beyond.code() == grpc.StatusCode.UNAUTHENTICATED
    never = threading.Event()
    with grpc.insecure_channel(address(server)) as channel:
        for method in (ENCODE, STREAM):
            call = channel.stream_stream(method)(iter(never.wait, None), timeout=20)
            assert call.code() == grpc.StatusCode.UNAUTHENTICATED
            never.set()
            never.clear()


def listed(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> list[Any]:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return list(stub.ServerReflectionInfo(iter([asked]), metadata=metadata, timeout=20))


def test_health_is_open_and_reflection_is_not(server: Server, keys: Keys) -> None:
    """A probe needs no key; who asks what there is to call does."""
    assert main(["health", "--address", address(server)]) == 0
    with grpc.insecure_channel(address(server)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status
        for metadata in ([], [("authorization", "Bearer atc_wrong")]):
            with pytest.raises(grpc.RpcError) as caught:
                listed(channel, metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        (answer,) = listed(channel, [("authorization", f"Bearer {keys.known['search']}")])
        assert len(answer.list_services_response.service) == 3


def test_a_key_that_asks_too_often(server: Server, keys: Keys) -> None:
    """Beyond its burst a key is told when to try again, in a call and in a stream's items; others are not held up."""
    before, metadata = refused("key_rate"), (("authorization", f"Bearer {keys.known['rated']}"),)
    with Client(address(server), api_key=keys.known["rated"]) as client:
        client.encode("abc")
        answers = list(client.encode_stream([attencode.encode_request("abc")] * 4))
        assert [type(answer) for answer in answers[:2]] == [attencode.EncodeResult] * 2
        assert all(isinstance(answer, QueueFull) and answer.retry_delay_s > 100 for answer in answers[2:])
        with pytest.raises(QueueFull) as caught:
            client.encode("abc")
        assert caught.value.reason == "key_rate"
    error = ask(address(server), *metadata)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 100 < retry_delay_s(error) <= 1000
    assert "'rated' may ask 0.001 times a second" in error.details()
    assert refused("key_rate") - before == 4
    with Client(address(server), api_key=keys.known["search"]) as client:
        client.encode("abc")


def test_a_key_with_too_much_in_work(server: Server, keys: Keys) -> None:
    """More requests at once than a key may have are refused; those of one stream are held back instead."""
    before = refused("key_concurrency")

    async def many() -> list[object]:
        async with attencode.AsyncClient(address(server), api_key=keys.known["narrow"]) as client:
            return await asyncio.gather(*(client.encode("abc") for _ in range(6)), return_exceptions=True)

    answers = asyncio.run(many())
    full = [answer for answer in answers if isinstance(answer, QueueFull)]
    assert len(full) == 4
    assert "'narrow' has 2 requests in work" in str(full[0])
    assert full[0].retry_delay_s > 0
    assert refused("key_concurrency") - before == 4
    with Client(address(server), api_key=keys.known["narrow"]) as client:
        client.encode("abc")  # what was in work is not any more
        answers = list(client.encode_stream([attencode.encode_request("abc")] * 6))
    assert all(isinstance(answer, attencode.EncodeResult) for answer in answers)


def test_a_key_that_is_removed(tiny_artifact: Path, tmp_path: Path) -> None:
    """It stops at its next call, and at the next item of a stream that is open; its other items are answered."""
    made = Keys(tmp_path)
    gone, kept = made.add("gone"), made.add("kept")
    with (
        serving(tiny_artifact, api_keys=str(made.path)) as server,
        Client(address(server), api_key=gone) as client,
        Client(address(server), api_key=kept) as other,
    ):
        client.encode("abc")

        def requests() -> Iterator[attencode.EncodeRequest]:
            yield attencode.encode_request("abc")
            yield attencode.encode_request("abc")
            made.remove("gone")
            time.sleep(LOOK_S)
            yield attencode.encode_request("abc")

        first, second, third = client.encode_stream(requests())
        assert isinstance(first, attencode.EncodeResult)
        assert isinstance(second, attencode.EncodeResult)
        assert isinstance(third, Unauthenticated)
        with pytest.raises(Unauthenticated):
            client.encode("abc")
        other.encode("abc")


def test_a_file_of_keys_that_is_replaced_under_calls(tiny_artifact: Path, tmp_path: Path) -> None:
    """No call of a key that stays fails, while others come and go and the file is broken between."""
    made = Keys(tmp_path)
    stays = made.add("stays", max_concurrent=50)
    with serving(tiny_artifact, api_keys=str(made.path)) as server, ThreadPoolExecutor(3) as pool:
        over = threading.Event()

        def call_often() -> int:
            calls = 0
            with Client(address(server), api_key=stays, options=APART) as client:
                while not over.is_set():
                    client.encode("abc")
                    calls += 1
            return calls

        calls = [pool.submit(call_often) for _ in range(3)]
        for number in range(2):
            late = made.add(f"late-{number}")
            time.sleep(LOOK_S)
            with Client(address(server), api_key=late) as client:
                client.encode("abc")
            made.path.with_suffix(".tmp").write_text("[[keys]")
            good = made.path.read_text()
            made.path.with_suffix(".tmp").replace(made.path)
            time.sleep(LOOK_S)
            made.path.write_text(good)
            if number:
                made.remove(f"late-{number}")
        over.set()
        assert min(call.result(60) for call in calls) > 10


def test_settings_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is none stops the start before a model is looked at; an empty setting turns nothing off."""
    (tmp_path / "keys.toml").write_text("[[keys]]\nname = 'a'\nsha256 = 'secret'\n")
    assert main(["serve", str(tmp_path / "no-model"), "--api-keys", str(tmp_path / "keys.toml")]) == 1
    printed = capsys.readouterr().err
    assert "no sha256 of 64 hexadecimal digits" in printed
    assert printed.count("\n") == 1
    assert "secret" not in printed
    monkeypatch.setenv("ATTENCODE_API_KEY", "a client's")  # no setting of the server, and no misspelt one
    assert parse_config(["m"]).api_keys == ""
    monkeypatch.setenv("ATTENCODE_API_KEYS", "")
    with pytest.raises(ConfigError, match=r"ATTENCODE_API_KEYS.* is empty; name a TOML file"):
        parse_config(["m"])


def test_no_secret_leaves(
    spawn_local: Callable[..., Any], tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a key nor its hash is in the log at its most talkative, in an error, a metric or an argument."""
    made = Keys(tmp_path)
    good, gone = made.add("good", requests_per_second=0.001, burst=4), made.add("gone")
    flags = ("--api-keys", str(made.path), "--log-level", "debug", "--log-format", "json", "--host", "0.0.0.0")
    started = spawn_local(tiny_artifact, *flags, ATTENCODE_API_KEY=good)
    target = f"127.0.0.1:{started.address.rpartition(':')[2]}"
    told = [started.line, Path(f"/proc/{started.process.pid}/cmdline").read_text()]
    for key in (good, gone, "atc_wrong-key", None):
        with Client(target, api_key=key) as client:
            for text in ("abc", "", "abc", "abc", "abc"):
                try:
                    client.encode(text)
                except attencode.AttencodeError as error:
                    told += [repr(error), repr(error.__cause__)]
    made.remove("gone")
    time.sleep(LOOK_S)
    with Client(target, api_key=gone) as client, pytest.raises(Unauthenticated):
        client.encode("abc")
    made.path.write_text(f"[[keys]]\nname = '{good}'\nsha256 = '{good}'\n")
    time.sleep(LOOK_S)
    with Client(target, api_key=good) as client, pytest.raises(QueueFull) as full:
        client.encode("abc")
    told.append(repr(full.value))
    with urllib.request.urlopen(f"http://127.0.0.1:{started.metrics_port}/metrics") as answer:
        told.append(answer.read().decode())
    assert started.terminate() == 0
    logged = started.process.stderr.read()
    told += [logged, *capsys.readouterr()]
    everything = "\n".join(told)
    for secret in (good, gone, "wrong-key"):
        for form in (secret, digest_of(secret).hex()):
            assert form not in everything
    assert logged.count("NO TLS on ") == 1
    assert "reads API KEYS" in logged
    assert "the keys of before stay" in logged
    assert "1 removed" in logged
    assert all(isinstance(json.loads(line), dict) for line in logged.splitlines())


def test_a_request_is_its_keys(server: Server, keys: Keys) -> None:
    """In the queue a call and a stream's item have the key's name and weight, wherever they come from."""
    item = pb.EncodeStreamRequest(id=0, request=REQUEST).SerializeToString()
    weights = server._models.find("").engine._waiting._weight_of  # of those who wait, or have lately
    with grpc.insecure_channel(address(server)) as channel:

        def shown(name: str) -> dict[str, Any]:
            return {"metadata": (("authorization", f"Bearer {keys.known[name]}"),), "timeout": 20}

        channel.unary_unary(ENCODE)(REQUEST.SerializeToString(), **shown("heavy"))
        list(channel.stream_stream(STREAM)(iter([item]), **shown("heavier")))
    assert (weights["heavy"], weights["heavier"]) == (3.0, 4.0)
    assert weights.keys() <= keys.known.keys()
