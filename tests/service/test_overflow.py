"""NaN and infinity: never an answer; float32 is tried where the model computes in less. Real weights that overflow."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy

from attencode import EncodeRequest, InternalFault, TokenIdsInput, encode_request
from service.artifact import CUDA_GRAPH, CUDA_POOLED_GRAPH, open_artifact
from service.batching import Batch
from service.cuda import CudaGraph
from service.finite import broken_rows, is_finite
from service.inference import BatchResult, NotFinite, infer, join
from service.placement import Placement, choose_placement
from service.session import Session
from tests.service.faulty import Faults, serving
from tests.service.test_faults import counted

# Tokens of which the export's own random batches have none.
LARGE = 4321  # its embedding is beyond float16
HUGE = 4322  # its embedding's sum is beyond float32
VOCAB_SIZE = 5000


@pytest.fixture(scope="module")
def folder(make_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an artifact, with a graph for CUDA, of weights that overflow for two tokens."""
    from model.export import export

    checkpoint = make_bert(vocab_size=VOCAB_SIZE)
    path = checkpoint / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    table = weights["embeddings.word_embeddings.weight"]
    table[LARGE] = np.linspace(-3e5, 4e5, table.shape[1])
    table[HUGE] = 3e38
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    output = tmp_path_factory.mktemp("overflow") / "artifact"
    return export(str(checkpoint), output, precision="float16", report=lambda _line: None)


class OnProcessor(Session):
    """A session on CUDA, but that the processor runs its graphs, as it can everywhere."""

    def _create(self, graph: str, streams: int) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3

        def opener(name: str) -> Callable[[], Any]:
            path = self.artifact.folder / name
            return lambda: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        if graph == "encode" and self.placement.precision == "float16":
            return CudaGraph(opener(CUDA_POOLED_GRAPH), opener(CUDA_GRAPH), opener("encode.onnx"))
        return CudaGraph(opener(f"{graph}.onnx"))


def batch_of(tokens: list[list[int]], *outputs: str) -> Batch:
    lengths = tuple(map(len, tokens))
    shape = (len(tokens), max(lengths))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, numbers in enumerate(tokens):
        ids[row, : len(numbers)], mask[row, : len(numbers)] = numbers, 1
    return Batch(outputs, lengths, ids, mask, np.zeros_like(ids), mask, (), np.arange(len(tokens)))


ROWS = [[2, 7, 8, 3], [2, LARGE, 3], [2, 9, 3], [2, HUGE, 8, 3]]


def sessions(folder: Path) -> tuple[Session, Session]:
    """Give one in float16 and one in float32."""
    artifact = open_artifact(folder)
    half = OnProcessor(artifact, Placement("cuda", "float16", "a test"), threads=1)
    return half, Session(artifact, choose_placement("cpu", "float32"), threads=1)


def test_what_overflows_float16_runs_again_in_float32(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such rows get float32's numbers, others keep float16's, only what float32 cannot hold fails; a warning, once."""
    half, exact = sessions(folder)
    batch = batch_of(ROWS, "pooled_mean", "last_hidden_state", "hidden_states_1")
    plain = half.run(batch)
    assert not np.isfinite(plain["pooled_mean"][1]).any()  # the weights are what they are meant to be
    wanted = exact.run(batch)
    assert np.isfinite(wanted["pooled_mean"][1]).all()
    with caplog.at_level(logging.WARNING):
        results = [infer(half, batch, alone=True) for _ in range(2)]
    assert caplog.text.count("overflows cuda float16") == 1
    for result in results:
        assert list(result.failed) == [3]
        assert isinstance(result.failed[3], NotFinite)
        assert result.again == 2
        np.testing.assert_allclose(result.arrays["pooled_mean"][1], wanted["pooled_mean"][1], atol=1e-5)
        np.testing.assert_allclose(result.arrays["last_hidden_state"][1], wanted["last_hidden_state"][1], atol=1e-5)
        for row in (0, 2):
            np.testing.assert_array_equal(result.arrays["pooled_mean"][row], plain["pooled_mean"][row])


def test_a_model_in_float32_has_no_second_try(folder: Path) -> None:
    """The row fails at once, the others are answered."""
    _, exact = sessions(folder)
    assert exact.in_float32() is None
    result = infer(exact, batch_of(ROWS, "pooled_mean"), alone=True)
    assert list(result.failed) == [3]
    assert "NaN or infinity in pooled_mean (cpu float32)" in str(result.failed[3])
    assert result.again == 0
    assert np.isfinite(result.arrays["pooled_mean"][:3]).all()


def test_where_float32_cannot_be_had_the_rows_fail_alone(folder: Path) -> None:
    """A second session that does not load costs nobody but those who need it."""
    half, _ = sessions(folder)

    class Unloaded(OnProcessor):
        def run(self, batch: Batch, *, alone: bool = False) -> Any:
            raise RuntimeError("it does not load")

    half._exact = Unloaded(half.artifact, half.placement, threads=1)
    result = infer(half, batch_of(ROWS[:3], "pooled_mean"), alone=True)
    assert list(result.failed) == [1]
    assert np.isfinite(result.arrays["pooled_mean"][[0, 2]]).all()


def ids(numbers: list[int], **outputs: Any) -> EncodeRequest:
    return encode_request(TokenIdsInput(numbers), **outputs)


def test_no_caller_ever_gets_nan(folder: Path) -> None:
    """Of a batch with such inputs their callers get INTERNAL, whatever they ask for; the others' answers are right."""
    with serving(folder, Faults().session, max_queue_delay_ms=50) as running:
        client = running.client
        with pytest.raises(InternalFault):
            client.encode(TokenIdsInput([2, HUGE, 3]))
        expected = client.encode_stream([ids([2, 7, 8, 3])])
        (right,) = [answer.pooled for answer in expected]
        before = counted("attencode_batch_faults_total", model="tiny", cause="not_finite")
        asked = [ids([2, 7, 8, 3]), ids([2, HUGE, 3]), ids([2, 7, 8, 3]), ids([2, HUGE, 3], token_embeddings=True)]
        answers = list(client.encode_stream(asked))
        for answer in (answers[0], answers[2]):
            np.testing.assert_allclose(answer.pooled, right, atol=1e-5)
        assert isinstance(answers[1], InternalFault)
        assert isinstance(answers[3], InternalFault)
        assert counted("attencode_batch_faults_total", model="tiny", cause="not_finite") == before + 2
        for further in ({"attention": True}, {"hidden_states": True}):
            with pytest.raises(InternalFault):
                client.encode(TokenIdsInput([2, HUGE, 3]), **further)
        assert client.encode(TokenIdsInput([2, LARGE, 3]), attention=True).results[0].attention.shape[0] == 2


def test_a_server_in_float16_counts_what_ran_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers of such inputs get float32's numbers, and the metric says how many."""
    monkeypatch.setattr("service.backend.choose_placement", lambda *_: Placement("cuda", "float16", "a test"))
    _, exact = sessions(folder)
    wanted = exact.run(batch_of([[2, LARGE, 3]], "pooled_mean"))["pooled_mean"]
    before = counted("attencode_float32_inputs_total", model="tiny")
    with serving(folder, OnProcessor, streams=1) as running:
        vector = running.client.encode(TokenIdsInput([2, LARGE, 3]), normalize=False).pooled
        np.testing.assert_allclose(vector, wanted, atol=1e-5)
        assert counted("attencode_float32_inputs_total", model="tiny") == before + 1
        assert np.isfinite(running.client.encode(TokenIdsInput([2, 7, 3])).pooled).all()
        assert counted("attencode_float32_inputs_total", model="tiny") == before + 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 33, 5)])
def test_every_number_is_looked_at(shape: tuple[int, ...], value: float) -> None:
    """One that is not finite is found wherever it stands; large ones are numbers like others."""
    array = np.full(shape, 1e30, np.float32)  # its square is beyond float32
    assert is_finite(array)
    assert is_finite(np.arange(4))
    for place in (0, array.size // 2, array.size - 1):
        broken = np.ones(shape, np.float32)
        broken.reshape(-1)[place] = value
        assert not is_finite(broken)
        assert not is_finite(np.asfortranarray(broken))
        assert not is_finite(broken.astype(np.float16))


def test_padded_places_do_not_count() -> None:
    """A row is judged by its own tokens, in every output; attention by what was looked at."""
    batch = batch_of([[2, 3], [2, 5, 3], [2, 3]], "last_hidden_state", "hidden_states_0")
    states = np.ones((3, 3, 4), np.float32)
    states[0, 2] = np.nan
    assert broken_rows(batch, {"last_hidden_state": states, "hidden_states_0": states}, {}) == {}
    states[1, 2, 1] = np.inf
    assert broken_rows(batch, {"hidden_states_0": states}, {}) == {1: "hidden_states_0"}
    looked = {2: {"attention": np.array([np.nan]), "attention_keys": np.arange(2)}}
    assert broken_rows(batch, {}, looked) == {2: "attention"}


def test_parts_are_put_together() -> None:
    """Rows of parts stand at their places in the whole, what was looked at and what failed too."""
    batch = batch_of([[2, 3]] * 4, "pooled_mean")
    first = BatchResult({"pooled_mean": np.full((2, 3), 1.0, np.float32)}, 0.1, {1: {"attention": np.ones(1)}})
    second = BatchResult({"pooled_mean": np.full((1, 3), 2.0, np.float32)}, 0.3, failed={0: NotFinite("no")}, again=1)
    joined = join(batch, [([0, 3], first), ([2], second)])
    assert joined.arrays["pooled_mean"][:, 0].tolist() == [1, 0, 2, 1]
    assert (list(joined.looked), list(joined.failed), joined.inference_s, joined.again) == ([3], [2], 0.3, 1)
