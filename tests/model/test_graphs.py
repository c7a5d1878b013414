"""The graphs of an artifact: their outputs, and the weights that they share."""

import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

PAGE_BYTES = 4096


def external_weights(graph: Path) -> dict[str, dict[str, str]]:
    """Give where each external initializer of a graph lies: its file, offset and length."""
    initializers = onnx.load(graph, load_external_data=False).graph.initializer
    return {one.name: {entry.key: entry.value for entry in one.external_data} for one in initializers}


def test_graphs_share_their_weights(minilm_artifact: Path):
    """Every weight of a graph lies at the same place of the same file as that of encode.onnx."""
    encode = external_weights(minilm_artifact / "encode.onnx")
    assert encode
    assert external_weights(minilm_artifact / "attention.onnx").items() <= encode.items()
    described = json.loads((minilm_artifact / "artifact.json").read_text())["attention_weights"]
    offsets = {int(place["offset"]): int(place["length"]) for place in encode.values()}
    assert [len(layer) for layer in described] == [4] * 6  # W^Q, W^K and their biases
    assert {4 * math.prod(one["shape"]) - offsets[one["offset"]] for layer in described for one in layer.values()} == {
        0
    }
    size = (minilm_artifact / "weights.bin").stat().st_size
    for place in encode.values():
        assert place["location"] == "weights.bin"
        assert int(place["offset"]) % PAGE_BYTES == 0
        assert int(place["offset"]) + int(place["length"]) <= size
    assert sum(int(place["length"]) for place in encode.values()) == 4 * 22565376


def test_graphs_are_small(minilm_artifact: Path):
    """A graph holds no weights of its own: below 1 MB each, with the real model's 90 MB beside them."""
    for name in ("encode.onnx", "attention.onnx"):
        assert (minilm_artifact / name).stat().st_size < 10**6
    assert (minilm_artifact / "weights.bin").stat().st_size > 90 * 10**6


def test_each_graph_yields_its_own(tiny_artifact: Path):
    """encode.onnx yields the hidden states and the poolings, the other attention."""
    encode, attention = (
        [output.name for output in onnx.load(tiny_artifact / f"{name}.onnx", load_external_data=False).graph.output]
        for name in ("encode", "attention")
    )
    poolings = ["pooled_cls", "pooled_mean", "pooled_max", "pooled_last"]
    assert encode == ["last_hidden_state", *poolings, "hidden_states"]
    assert attention == ["attention", "query_vectors", "key_vectors"]


@pytest.mark.parametrize("rows", [[], [1], [2, 0], [0, 1, 2]])
def test_states_are_those_of_the_rows_that_are_named(tiny_artifact: Path, rows: list[int]):
    """The hidden states come of any rows, in their order, of none too, and the last is the last hidden state."""
    session = onnxruntime.InferenceSession(tiny_artifact / "encode.onnx", providers=["CPUExecutionProvider"])
    ids = np.arange(5, 20).reshape(3, 5)
    fed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    names = ["last_hidden_state", "hidden_states"]
    last, states = session.run(names, {**fed, "state_rows": np.asarray(rows, np.int64)})
    everything = session.run(["hidden_states"], {**fed, "state_rows": np.arange(3)})[0]
    assert states.shape == (3, len(rows), 5, last.shape[-1])
    np.testing.assert_array_equal(states, everything[:, rows])
    np.testing.assert_array_equal(everything[-1], last)
