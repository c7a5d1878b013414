"""A server process from start to drain: readiness, health, reflection, metrics, SIGTERM."""

import asyncio
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

import attencode
from service.config import parse_config
from service.errors import ConfigError
from service.served import Models

SERVING = health_pb2.HealthCheckResponse.SERVING
STAGES = ("tokenize", "queue", "inference", "other")
TIMES = ("batch", "inference")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(address: str, name: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
        return status


def test_a_lean_start(spawn_local: Callable[..., object], minilm_artifact: Path) -> None:
    """From an artifact the server is ready at once, small, and without torch, transformers and ray."""
    server = spawn_local(minilm_artifact, "--provider", "cpu")
    with attencode.Client(server.address) as client:
        client.encode("time flies")
    process = psutil.Process(server.process.pid)
    mapped = {Path(region.path).name for region in process.memory_maps()}
    assert not {name for name in mapped if name.startswith(("libtorch", "libc10", "_raylet"))}
    assert process.memory_info().rss < 400 * 2**20
    assert "cpu float32, asked for" in server.line
    assert server.terminate() == 0


def test_health(spawn: Callable[..., object], tiny_artifact: Path) -> None:
    """Ready services are SERVING under each name, unknown names are NOT_FOUND."""
    server = spawn(tiny_artifact)
    for name in ("", "attencode.v1.Encoder", "liveness"):
        assert health(server.address, name) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health(server.address, "nope")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_reflection_lists_the_service(spawn: Callable[..., object], tiny_artifact: Path) -> None:
    """Reflection answers with the contract's service, and is off when told so."""
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    server = spawn(tiny_artifact)
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "attencode.v1.Encoder" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("attencode.v1.Encoder")
        assert set(service.methods_by_name) == {"Encode", "EncodeStream", "Align", "Tokenize", "GetModel"}
    closed = spawn(tiny_artifact, "--reflection", "false")
    with grpc.insecure_channel(closed.address) as channel, pytest.raises(grpc.RpcError):
        ProtoReflectionDescriptorDatabase(channel).get_services()


def test_metrics_follow_the_traffic(spawn: Callable[..., object], tiny_artifact: Path) -> None:
    """Prometheus' page counts requests by status, inputs, tokens, padding and batches."""
    server = spawn(tiny_artifact, "--model-name", "tiny")
    with attencode.Client(server.address) as client:
        client.encode(["a", "abc def"])
        client.encode("abc", attention=True)
        client.encode("a " * 100)
        with pytest.raises(attencode.InvalidRequest):
            client.encode("")
    page = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5).read().decode()

    def value(sample: str) -> float:
        match = re.search(rf"^{re.escape(sample)} (\S+)$", page, re.MULTILINE)
        assert match, sample
        return float(match[1])

    assert value('attencode_requests_total{code="OK",method="Encode"}') == 3
    assert value('attencode_requests_total{code="INVALID_ARGUMENT",method="Encode"}') == 1
    assert value('attencode_inputs_total{model="tiny"}') == 4
    assert value('attencode_tokens_total{model="tiny"}') == 3 + 8 + 5 + 40
    assert value('attencode_pad_tokens_total{model="tiny"}') == 5
    assert value('attencode_truncated_inputs_total{model="tiny"}') == 1
    assert value('attencode_batches_total{model="tiny",outcome="ok"}') == 3
    assert value("attencode_requests_in_flight") == 0
    assert value('attencode_queue_inputs{model="tiny"}') == 0
    assert value('attencode_ready{model="tiny"}') == 1
    assert value('attencode_requests_total{code="INTERNAL",method="Encode"}') == 0  # there before the first
    times = [value(f'attencode_stage_seconds_total{{model="tiny",stage="{stage}"}}') for stage in STAGES]
    assert min(times) > 0
    assert sum(times) <= value('attencode_request_duration_seconds_sum{method="Encode"}')
    whole_s, inference_s = (value(f'attencode_{name}_duration_seconds_sum{{model="tiny"}}') for name in TIMES)
    assert whole_s >= inference_s > 0
    assert value('attencode_compute_streams{model="tiny"}') >= 1
    assert 'provider="' in page


def test_a_taken_port_stops_the_start(tiny_artifact: Path) -> None:
    """A port that is in use is one line on stderr and a failing exit status, for either port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags in (["--port", port, "--metrics-port", "none"], ["--port", "0", "--metrics-port", port]):
            command = [sys.executable, "-m", "service", "serve", str(tiny_artifact), *flags]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert ended.returncode == 1
            assert port in ended.stderr
            assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_an_idle_server(spawn: Callable[..., object], tiny_artifact: Path, number: int) -> None:
    """An idle server ends with exit code 0 on SIGTERM and on Ctrl-C."""
    server = spawn(tiny_artifact)
    server.process.send_signal(number)
    assert server.process.wait(timeout=30) == 0


def test_health_turns_before_calls_end(spawn: Callable[..., object], tiny_artifact: Path) -> None:
    """During the drain delay health says NOT_SERVING while calls are still answered."""
    server = spawn(tiny_artifact, "--drain-delay-s", "1.5")
    with attencode.Client(server.address) as client:
        client.encode("abc")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert health(server.address) == NOT_SERVING
        assert health(server.address, "liveness") == SERVING
        client.encode("abc")
    assert server.process.wait(timeout=30) == 0


def test_padding_never_exceeds_the_model(spawn: Callable[..., object], tiny_artifact: Path) -> None:
    """A padding step above the model's positions pads to them at most."""
    server = spawn(tiny_artifact, "--pad-to-multiple-of", "1000")
    with attencode.Client(server.address) as client:
        assert client.encode(["a", "a b c"]).pooled is not None


def test_an_unknown_host_stops_the_start(tiny_artifact: Path) -> None:
    """A host that is not ours is one line that says what is wrong with it."""
    command = [sys.executable, "-m", "service", "serve", str(tiny_artifact), "--host", "nohost.invalid"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "host 'nohost.invalid'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def mixed_texts(count: int) -> list[str]:
    draw = random.Random(5)
    words = [
        "time",
        "flies",
        "like",
        "an",
        "arrow",
        "fruit",
        "banana",
        "the",
        "old",
        "man",
        "was",
        "sleepy",
        "attention",
        "is",
        "all",
        "you",
        "need",
    ]
    return [" ".join(draw.choices(words, k=draw.choice((1, 3, 8, 20, 60)))) for _ in range(count)]


def test_a_thousand_mixed_requests(minilm_address: str) -> None:
    """1,000 mixed requests from 32 concurrent clients: every answer is the one obtained alone."""
    texts = mixed_texts(40)
    with attencode.Client(minilm_address) as client:
        alone = [client.encode(text, pooled=True, attention=[0], heads=[1]) for text in texts]
    draw = random.Random(6)
    requests = [[draw.randrange(len(texts)) for _ in range(draw.choice((1, 1, 1, 2, 9)))] for _ in range(1000)]

    async def one_client(todo: list[list[int]]) -> None:
        async with attencode.AsyncClient(minilm_address, timeout_s=300) as client:  # however slow the machine
            while todo:
                numbers = todo.pop()
                with_attention = len(numbers) == 2
                options = {"pooled": True, "attention": [0], "heads": [1]} if with_attention else {}
                answer = await client.encode([texts[number] for number in numbers], **options)
                for number, vector, item in zip(numbers, answer.pooled, answer.results, strict=True):
                    np.testing.assert_allclose(vector, alone[number].pooled[0], atol=1e-5)
                    if with_attention:
                        np.testing.assert_allclose(item.attention, alone[number].results[0].attention, atol=1e-5)

    async def everyone() -> None:
        await asyncio.gather(*(one_client(requests) for _ in range(32)))

    asyncio.run(everyone())
    assert not requests


def test_sigterm_under_load(spawn: Callable[..., object], minilm_artifact: Path) -> None:
    """On SIGTERM all that was accepted is answered, new calls get UNAVAILABLE, and the exit code is 0."""
    server = spawn(minilm_artifact, "--provider", "cpu")
    texts = mixed_texts(16)
    with attencode.Client(server.address) as client:
        expected = [client.encode(text).pooled for text in texts]
    outcomes: list[str] = []

    def work() -> None:
        no_retries = [("grpc.enable_retries", 0)]
        with attencode.Client(server.address, timeout_s=300, options=no_retries) as client:
            while True:
                number = random.randrange(len(texts))
                try:
                    answer = client.encode([texts[number]] * 8)
                except attencode.AttencodeError as error:
                    outcomes.append("Unavailable" if isinstance(error, attencode.Unavailable) else repr(error))
                    return
                np.testing.assert_allclose(answer.pooled, np.repeat(expected[number], 8, axis=0), atol=1e-5)
                outcomes.append("ok")

    def stream() -> None:
        requests = (attencode.encode_request(text) for _ in range(1000) for text in texts)
        with attencode.Client(server.address, timeout_s=300) as client:
            try:
                for answer in client.encode_stream(requests):  # what was not taken in any more says so
                    assert isinstance(answer, attencode.EncodeResult | attencode.Unavailable)
                outcomes.append("ended")
            except attencode.AttencodeError as error:
                outcomes.append("Unavailable" if isinstance(error, attencode.Unavailable) else repr(error))

    threads = [threading.Thread(target=work) for _ in range(16)] + [threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(timeout=60)
    assert server.process.wait(timeout=60) == 0
    assert set(outcomes) == {"ok", "Unavailable"}
    assert outcomes.count("Unavailable") == 17


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--port", "seventy"], "--port: Input should be a valid integer"),
        (["m", "--threads", "0"], "--threads: Input should be greater than or equal to 1"),
        (["m", "--max-message-bytes", "10"], "--max-message-bytes: Input should be greater than or equal to 16384"),
        (["m", "--max-request-bytes", "1"], "--max-request-bytes: Input should be greater than or equal to 1024"),
        (["m", "--provider", "tpu"], "--provider: Input should be 'auto', 'cuda', 'openvino' or 'cpu'"),
        (["m", "--max-queue-delay-ms", "inf"], "--max-queue-delay-ms: Input should be a finite number"),
        (["m", "--max-inputs", "4294967296"], "--max-inputs: Input should be less than or equal to 2147483647"),
        (["m", "--bogus", "1"], "unrecognized arguments: --bogus 1"),
        ([], "MODEL is missing"),
    ],
)
def test_bad_settings(words: list[str], message: str) -> None:
    """A setting that is unknown or malformed is one line that names it."""
    with pytest.raises(ConfigError) as caught:
        parse_config(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag wins over an ATTENCODE_ variable, which wins over the default; misspelt variables are refused."""
    assert parse_config(["m"]).max_inputs == 1024
    monkeypatch.setenv("ATTENCODE_MAX_INPUTS", "7")
    monkeypatch.setenv("ATTENCODE_MODEL", "from-the-environment")
    assert (parse_config([]).model, parse_config([]).max_inputs) == ("from-the-environment", 7)
    assert parse_config(["m", "--max-inputs", "9"]).max_inputs == 9
    monkeypatch.setenv("ATTENCODE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("ATTENCODE_PORT", "tcp://10.0.0.1:50051")  # as Kubernetes sets it
    assert parse_config([]).port == 50051
    monkeypatch.setenv("ATTENCODE_PORT", "x")
    with pytest.raises(ConfigError, match=r"--port \(or ATTENCODE_PORT\): Input should be a valid integer"):
        parse_config([])
    monkeypatch.delenv("ATTENCODE_PORT")
    monkeypatch.setenv("ATTENCODE_MAX_IMPUTS", "7")
    with pytest.raises(ConfigError, match="ATTENCODE_MAX_IMPUTS is no setting"):
        parse_config([])


def test_a_model_that_is_not_up_yet_is_not_ready() -> None:
    """Its series is there from the start, at 0, so that an alert sees a model that never comes up."""

    async def made() -> None:
        Models(["late"])

    asyncio.run(made())
    assert REGISTRY.get_sample_value("attencode_ready", {"model": "late"}) == 0
