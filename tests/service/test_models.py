"""Several models behind one server: each by its name, the first by default, with a health name of its own."""

from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attencode import Client, InvalidRequest, encode_request
from service.config import parse_config
from service.errors import ConfigError


@pytest.fixture(scope="module")
def two(tiny_artifact: Path, make_bert: Callable[..., Path], export_artifact: Callable[[Path], Path]) -> list[str]:
    """Give the flags of two tiny models of different widths."""
    wide = export_artifact(make_bert(hidden_size=48))
    return ["--model", f"narrow={tiny_artifact}", "--model", f"wide={wide}"]


def test_each_model_answers_by_its_name(spawn: Callable[..., object], two: list[str]) -> None:
    """The request names one, the first is the default, GetModel lists them, health knows each."""
    server = spawn(None, *two)
    with Client(server.address) as client:
        assert client.encode("abc").model == "narrow"
        assert client.encode("abc").pooled.shape == (1, 24)
        wide = client.encode("abc", model="wide")
        assert (wide.model, wide.pooled.shape) == ("wide", (1, 48))
        assert client.get_model().models == ["narrow", "wide"]
        assert client.get_model("wide").hidden_size == 48
        assert client.get_model("wide").model_digest == wide.model_digest
        assert client.tokenize("abc", model="wide").model == "wide"
        assert [replica.state for replica in client.get_model().replicas] == ["RUNNING"]
        with pytest.raises(InvalidRequest, match="model 'other' is not served here; served: narrow, wide"):
            client.encode("abc", model="other")
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "attencode.v1.Encoder", "attencode.v1.Encoder/narrow", "attencode.v1.Encoder/wide"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status == 1


def test_models_take_turns_on_one_stream(spawn: Callable[..., object], two: list[str]) -> None:
    """A stream's requests may name any model; each answer is that model's own, in order."""
    server = spawn(None, *two)
    with Client(server.address) as client:
        alone = {name: client.encode("abc def", model=name).pooled for name in ("narrow", "wide")}
        names = ["narrow", "wide", "wide", "narrow"] * 50
        answers = list(client.encode_stream(encode_request("abc def", model=name) for name in names))
    assert [answer.model for answer in answers] == names
    for answer in answers:
        np.testing.assert_allclose(answer.pooled, alone[answer.model], atol=1e-5)


def test_the_first_may_be_the_positional(spawn: Callable[..., object], tiny_artifact: Path, two: list[str]) -> None:
    """MODEL stands before those that --model names."""
    server = spawn(tiny_artifact, "--model-name", "first", *two)
    with Client(server.address) as client:
        assert client.get_model().models == ["first", "narrow", "wide"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "folder"], "--model must be NAME=ARTIFACT, got 'folder'"),
        (["--model", "=folder"], "--model must be NAME=ARTIFACT, got '=folder'"),
        (["m", "--replicas", "2"], "--replicas goes with --ray"),
        (["m", "--ray", "--replicas", "0"], "--replicas must be a number from 1 or MIN:MAX, got '0'"),
        (["m", "--ray", "--replicas", "3:2"], "--replicas must be a number from 1 or MIN:MAX, got '3:2'"),
    ],
)
def test_bad_settings(words: list[str], message: str) -> None:
    """What is malformed or at odds is refused in one line."""
    with pytest.raises(ConfigError) as caught:
        parse_config(words)
    assert message in str(caught.value)


def test_two_of_one_name(tiny_artifact: Path) -> None:
    """Two models of one name are refused."""
    from service.cache import open_models

    with pytest.raises(ConfigError, match="two models are called 'a'"):
        open_models(parse_config(["--model", f"a={tiny_artifact}", "--model", f"a={tiny_artifact}"]))


def test_models_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable parts models by commas."""
    monkeypatch.setenv("ATTENCODE_MODELS", "a=/x,b=/y")
    assert parse_config([]).named_models() == [("a", "/x"), ("b", "/y")]
