"""The graph for CUDA: which operators it holds, and that it computes what the plain encoder computes."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import families
from model.checkpoint import load_encoder
from model.encoder import Encoder
from model.errors import ExportError
from model.export import MAX_DIFFERENCE, MIN_COSINES, check_float16, export
from model.fused import FusedEncoder, _length_mask
from model.graphs import CUDA_WEIGHTS_FILE, EncoderGraph, attach_weights, fold_weights, trace, write_weights
from model.head import SentenceHead

LENGTHS = ((1,), (7, 3, 12), (16, 33, 5, 64))
FLOAT16_MAX = 65504
# Of each case: the operator of its activation, and skip-norms a layer; the attention is one operator everywhere.
CASES = {
    "bert": ("BiasGelu", 2),
    "bert, relu, one head": ("Relu", 2),
    "bert, gelu_new, three segments": ("FastGelu", 2),
    "roberta": ("BiasGelu", 2),
    "roberta, 1e-5, silu": ("Sigmoid", 2),
    "camembert, four heads": ("BiasGelu", 2),
    "distilbert": ("BiasGelu", 2),
    "electra, small embeddings": ("BiasGelu", 2),
    "mpnet": ("BiasGelu", 2),
    "t5, plain": ("Relu", 0),
    "t5, gated, other head width": ("Gelu", 0),
    "mt5, gated silu": ("Sigmoid", 0),
}


@pytest.fixture(scope="module")
def encoder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Encoder]:
    """Give a function that loads a family's case, saved once."""
    made: dict[str, Encoder] = {}

    def load(name: str) -> Encoder:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            families.save(name, folder)
            made[name] = load_encoder(folder)
        return made[name]

    return load


def write(encoder: Encoder, dtype: torch.dtype, folder: Path) -> EncoderGraph:
    graph = EncoderGraph(FusedEncoder(encoder, dtype), SentenceHead(["mean"]))
    model = trace(graph)
    names = fold_weights(model, graph)
    attach_weights(model, graph, names, write_weights(folder / CUDA_WEIGHTS_FILE, graph.state_dict(), names))
    onnx.save_model(model, folder / graph.file)
    return graph


def feeds(graph: EncoderGraph, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    config = graph.encoder.config
    draw = torch.Generator().manual_seed(sum(lengths))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, config.vocab_size, mask.shape, generator=draw) * mask + config.pad_token_id * (1 - mask)
    fed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    return {name: fed[name] for name in graph.inputs}


def expected_of(plain: EncoderGraph, fed: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """Give what the plain graph gives, without inner hidden states."""
    with torch.inference_mode():
        outputs = plain(*fed.values(), torch.zeros(0, dtype=torch.int64))
    return [tensor.numpy() for tensor in outputs[:-1]]


def run(graph: EncoderGraph, folder: Path, fed: dict[str, torch.Tensor]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / graph.file, options, providers=["CPUExecutionProvider"])
    return session.run(graph.outputs, {name: tensor.numpy() for name, tensor in fed.items()})


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min())


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_plain_graph(name: str, encoder_of: Callable[[str], Encoder], tmp_path: Path):
    """In float32 the fused graph is the plain one within 1e-4, padded and unpadded, and its operators are fused."""
    encoder = encoder_of(name)
    plain = EncoderGraph(encoder, SentenceHead(["mean"]))
    graph = write(encoder, torch.float32, tmp_path)
    for lengths in LENGTHS:
        fed = feeds(graph, lengths)
        expected = expected_of(plain, fed)
        got = run(graph, tmp_path, fed)
        kept = fed["attention_mask"].bool().numpy()
        unit = max(1.0, float(np.abs(expected[0][kept]).max()) / 10)
        assert np.abs(got[0][kept] - expected[0][kept]).max() <= MAX_DIFFERENCE * unit
        for ours, theirs in zip(got[1:], expected[1:], strict=True):
            assert np.abs(ours - theirs).max() <= MAX_DIFFERENCE * unit
    layers = encoder.config.num_hidden_layers
    counts = Counter(node.op_type for node in onnx.load(tmp_path / graph.file, load_external_data=False).graph.node)
    activation, skip_norms = CASES[name]
    assert counts["Attention"] == layers
    assert counts["SkipLayerNormalization"] == skip_norms * layers
    assert counts[activation] == layers
    assert counts["Softmax"] == counts["Erf"] == 0


@pytest.mark.parametrize("name", CASES)
def test_float16_stays_close(name: str, encoder_of: Callable[[str], Encoder], tmp_path: Path):
    """In float16 every token is within cosine 0.999 of float32 and every pooled vector within 0.9999."""
    encoder = encoder_of(name)
    plain = EncoderGraph(encoder, SentenceHead(["mean"]))
    graph = write(encoder, torch.float16, tmp_path)
    worst = check_float16(tmp_path, graph, plain)
    assert worst["token"] > MIN_COSINES["token"]
    assert worst["pooled"] > MIN_COSINES["pooled"]


def test_inputs_outputs_and_weights(encoder_of: Callable[[str], Encoder], tmp_path: Path):
    """It takes int64 and gives float32, as the plain graph does; the layers' weights are float16."""
    graph = write(encoder_of("bert"), torch.float16, tmp_path)
    model = onnx.load(tmp_path / graph.file, load_external_data=False).graph
    assert {value.type.tensor_type.elem_type for value in model.input} == {onnx.TensorProto.INT64}
    assert {value.type.tensor_type.elem_type for value in model.output} == {onnx.TensorProto.FLOAT}
    weights = {one.name: one for one in model.initializer if one.external_data}
    assert {one.data_type for one in weights.values()} == {onnx.TensorProto.FLOAT16}
    assert {entry.value for one in weights.values() for entry in one.external_data if entry.key == "location"} == {
        CUDA_WEIGHTS_FILE
    }


def test_the_length_mask():
    """Lengths, then twice the starts of the padded rows with the end of the last one."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    assert _length_mask(mask).tolist() == [2, 4, 1, 0, 4, 8, 12, 0, 4, 8, 12]


@pytest.mark.parametrize("name", ["camembert, four heads", "mpnet", "t5, plain"])
def test_the_bias_mask_fits_into_float16(name: str, encoder_of: Callable[[str], Encoder]):
    """Where padding is an additive bias, it is finite in float16 and far below every score."""
    fused = FusedEncoder(encoder_of(name), torch.float16)
    assert not fused.by_length
    bias = fused._bias_mask(torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert bias.dtype == torch.float16
    assert bias.shape[-2:] == (3, 3)
    assert bias.isfinite().all()
    assert (bias[1, ..., 1:] < -FLOAT16_MAX / 4).all()
    assert (bias[0].abs() < 100).all()


def test_t5_beyond_the_range_of_float16(encoder_of: Callable[[str], Encoder], tmp_path: Path):
    """A T5 whose running sum exceeds float16's largest number still answers, close to float32."""
    encoder = load_scaled(encoder_of("t5, plain"))
    graph = write(encoder, torch.float16, tmp_path)
    plain = EncoderGraph(encoder, SentenceHead(["mean"]))
    fed = feeds(graph, (7, 12))
    with torch.inference_mode():
        sums = encoder(fed["input_ids"], fed["attention_mask"], output_hidden_states=True).hidden_states[1]
    expected = expected_of(plain, fed)[0]
    assert sums.abs().max() > FLOAT16_MAX
    kept = fed["attention_mask"].bool().numpy()
    assert cosine(run(graph, tmp_path, fed)[0][kept], expected[kept]) > MIN_COSINES["token"]


def load_scaled(encoder: Encoder) -> Encoder:
    """Give a copy whose feed-forward blocks yield values a hundred thousand times as large."""
    import copy

    scaled = copy.deepcopy(encoder)
    with torch.no_grad():
        for layer in scaled.layers:
            layer.feed_forward.output.weight.mul_(1e5)
    return scaled


def test_export_adds_the_graph(make_bert: Callable[..., Path], tmp_path: Path):
    """`precision="float16"` adds three files, says how close they are, and changes nothing else."""
    checkpoint, lines = make_bert(), []
    plain = export(str(checkpoint), tmp_path / "plain", report=lambda _line: None)
    both = export(str(checkpoint), tmp_path / "both", precision="float16", report=lines.append)
    added = {path.name for path in both.iterdir()} - {path.name for path in plain.iterdir()}
    assert added == {"encode.cuda.onnx", "pooled.cuda.onnx", "weights.cuda.bin"}
    assert (both / "weights.bin").read_bytes() == (plain / "weights.bin").read_bytes()
    form = r"checked float16 for CUDA: smallest cosine of a token (0\.999|1\.000)\d+"
    assert any(re.fullmatch(form, line) for line in lines)


def test_a_graph_that_is_not_close_is_refused(encoder_of: Callable[[str], Encoder]):
    """The export's check names the vector and its cosine."""
    encoder = encoder_of("bert")
    plain = EncoderGraph(encoder, SentenceHead(["mean"]))
    with tempfile.TemporaryDirectory() as folder:
        graph = write(encoder_of("bert, relu, one head"), torch.float16, Path(folder))
        with pytest.raises(ExportError, match=r"in float16 a token vector has a cosine of"):
            check_float16(Path(folder), graph, plain)
