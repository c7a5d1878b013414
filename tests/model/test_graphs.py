"""The graphs of an artifact: their outputs, and the weights that they share."""

from pathlib import Path

import onnx

PAGE_BYTES = 4096


def external_weights(graph: Path) -> dict[str, dict[str, str]]:
    """Give where each external initializer of a graph lies: its file, offset and length."""
    initializers = onnx.load(graph, load_external_data=False).graph.initializer
    return {one.name: {entry.key: entry.value for entry in one.external_data} for one in initializers}


def test_both_graphs_share_their_weights(minilm_artifact: Path):
    """Every weight of encode.onnx lies at the same place of the same file as that of inspect.onnx."""
    encode = external_weights(minilm_artifact / "encode.onnx")
    inspect = external_weights(minilm_artifact / "inspect.onnx")
    assert encode
    assert encode == inspect
    size = (minilm_artifact / "weights.bin").stat().st_size
    for place in encode.values():
        assert place["location"] == "weights.bin"
        assert int(place["offset"]) % PAGE_BYTES == 0
        assert int(place["offset"]) + int(place["length"]) <= size
    assert sum(int(place["length"]) for place in encode.values()) == 4 * 22565376


def test_graphs_are_small(minilm_artifact: Path):
    """A graph holds no weights of its own: below 1 MB each, with the real model's 90 MB beside them."""
    for name in ("encode.onnx", "inspect.onnx"):
        assert (minilm_artifact / name).stat().st_size < 10**6
    assert (minilm_artifact / "weights.bin").stat().st_size > 90 * 10**6


def test_attention_weights_are_an_output_of_inspect_alone(tiny_artifact: Path):
    """encode.onnx yields the last hidden state and the poolings; inspect.onnx every layer's too."""
    encode, inspect = (
        [output.name for output in onnx.load(tiny_artifact / f"{name}.onnx", load_external_data=False).graph.output]
        for name in ("encode", "inspect")
    )
    assert encode == ["last_hidden_state", "pooled_cls", "pooled_mean", "pooled_max", "pooled_last"]
    layers = ["hidden_states_0", "hidden_states_1", "hidden_states_2", "attentions_0", "attentions_1"]
    assert inspect == encode + layers
