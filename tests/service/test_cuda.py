"""CUDA: which graph runs in which precision, what is asked of the provider, and, on a GPU, the numbers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from service.artifact import CUDA_GRAPH, CUDA_POOLED_GRAPH, Artifact, open_artifact
from service.batching import Batch
from service.cuda import CudaGraph, choose_precision, provider_options
from service.errors import ArtifactError, ProviderError
from service.placement import choose_placement
from service.session import Session

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(make_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a tiny artifact with a graph for CUDA."""
    from model.export import export

    output = tmp_path_factory.mktemp("float16") / "artifact"
    return export(str(make_bert()), output, precision="float16", report=lambda _line: None)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Give a copy of it, to be changed."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def on_processor(folder: Path, name: str = CUDA_GRAPH) -> onnxruntime.InferenceSession:
    """Open a graph for CUDA where every machine can run it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"])


def random_batch(artifact: Artifact, lengths: tuple[int, ...], outputs: tuple[str, ...]) -> Batch:
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(3).integers(5, artifact.vocab_size, shape) * mask
    return Batch(outputs, lengths, ids, mask, np.zeros_like(ids), mask)


def feeds(artifact: Artifact, batch: Batch) -> dict[str, np.ndarray]:
    return {name: getattr(batch, name) for name in artifact.inputs}


def run_on(session: onnxruntime.InferenceSession, names: list[str], fed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return session.run(names, {put.name: fed[put.name] for put in session.get_inputs()})


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min())


def test_auto_takes_float16_where_the_artifact_has_it(folder: Path, tiny_artifact: Path) -> None:
    """`auto` follows the artifact, float32 stays what was asked for."""
    with_graph, without = open_artifact(folder), open_artifact(tiny_artifact)
    assert choose_precision(with_graph, "auto") == "float16"
    assert choose_precision(without, "auto") == "float32"
    assert choose_precision(with_graph, "float32") == "float32"
    assert choose_precision(with_graph, "float16") == "float16"


def test_float16_without_its_graph_stops_the_start(tiny_artifact: Path) -> None:
    """Asked for by name and not there: the error says how to export."""
    with pytest.raises(ProviderError, match="export the model again with --precision float16"):
        choose_precision(open_artifact(tiny_artifact), "float16")


def test_the_processor_never_takes_it(copied: Path) -> None:
    """On the CPU provider an artifact with the graph runs as one without."""
    artifact = open_artifact(copied)
    placement = choose_placement("cpu", "auto", artifact)
    assert placement.precision == "float32"
    for name in (CUDA_GRAPH, CUDA_POOLED_GRAPH):
        (copied / name).unlink()
    Session(artifact, placement, threads=1).warm_up()
    with pytest.raises(ProviderError, match="provider cpu does not run float16"):
        choose_placement("cpu", "float16", artifact)


def test_the_optional_files_are_verified(copied: Path) -> None:
    """Their digests are held against the description, and one does not come without the other."""
    weights = copied / "weights.cuda.bin"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"weights\.cuda\.bin was changed or damaged"):
        open_artifact(copied)
    path = copied / "artifact.json"
    described = json.loads(path.read_text("utf-8"))
    del described["files"][weights.name]
    path.write_text(json.dumps(described), "utf-8")
    with pytest.raises(ArtifactError, match=r"must name weights\.cuda\.bin too"):
        open_artifact(copied)


def test_a_run_gives_the_named_outputs(folder: Path) -> None:
    """Outputs are those of a plain run of the whole graph, which is loaded once and only when needed."""
    artifact = open_artifact(folder)
    session = on_processor(folder)
    opened: list[str] = []

    def open_whole() -> onnxruntime.InferenceSession:
        opened.append(CUDA_GRAPH)
        return on_processor(folder)

    graph = CudaGraph(lambda: on_processor(folder, CUDA_POOLED_GRAPH), open_whole)
    batch = random_batch(artifact, (5, 17, 9), ())
    for names in (["pooled_mean"], ["last_hidden_state"], ["pooled_max", "last_hidden_state"], ["pooled_cls"]):
        assert opened == [] or "pooled_mean" not in names
        expected = run_on(session, names, feeds(artifact, batch))
        with ThreadPoolExecutor(2) as threads:
            for got in threads.map(lambda _, names=names: graph.run(names, feeds(artifact, batch)), range(8)):
                assert [array.dtype for array in got] == [np.float32] * len(names)
                for ours, theirs in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(ours, theirs)
    assert opened == [CUDA_GRAPH]


def test_states_come_from_the_exact_graph(folder: Path) -> None:
    """Rows whose inner states are wanted run through the float32 graph alone, the others' outputs stay float16's."""
    artifact = open_artifact(folder)
    openers = [lambda name=name: on_processor(folder, name) for name in (CUDA_POOLED_GRAPH, CUDA_GRAPH, "encode.onnx")]
    graph = CudaGraph(*openers)
    batch = random_batch(artifact, (5, 17, 9), ())
    fed = {**feeds(artifact, batch), "state_rows": np.array([0, 2])}
    states, pooled = graph.run(["hidden_states", "pooled_mean"], fed)
    np.testing.assert_array_equal(pooled, run_on(on_processor(folder), ["pooled_mean"], fed)[0])
    exact = run_on(on_processor(folder, "encode.onnx"), ["hidden_states"], {**fed, "state_rows": np.arange(3)})[0]
    assert states.shape == (3, 2, 17, artifact.hidden_size)
    for place, (row, length) in enumerate([(0, 5), (2, 9)]):
        np.testing.assert_allclose(states[:, place, :length], exact[:, row, :length], atol=1e-5)
    alone = CudaGraph(openers[-1])  # in float32
    assert alone.run(["pooled_mean"], feeds(artifact, batch))[0].shape == (3, artifact.hidden_size)
    np.testing.assert_allclose(alone.run(["hidden_states"], fed)[0], states, atol=1e-5)
    with pytest.raises(ProviderError, match="no graph has the outputs pooled_sum"):
        alone.run(["pooled_sum"], fed)


def test_the_smaller_graph_leaves_the_other_poolings_out(folder: Path) -> None:
    """It yields the token embeddings and the model's own pooling, with fewer operators over the same weights."""
    import onnx

    whole, pooled = (onnx.load(folder / name, load_external_data=False) for name in (CUDA_GRAPH, CUDA_POOLED_GRAPH))
    assert [output.name for output in pooled.graph.output] == ["last_hidden_state", "pooled_mean"]
    assert len(pooled.graph.node) < len(whole.graph.node)
    assert sum(node.op_type == "Attention" for node in pooled.graph.node) == 2


def test_float32_is_float32() -> None:
    """TF32 is for float16's few float32 products alone; options are texts, as the provider takes them."""
    assert provider_options("float32")["use_tf32"] == "0"
    assert provider_options("float16")["use_tf32"] == "1"
    assert all(isinstance(value, str) for value in provider_options("float16").values())


@pytest.mark.gpu
def test_float16_on_a_gpu(folder: Path) -> None:
    """On the GPU every token is within cosine 0.999 of the processor's float32, pooled vectors within 0.9999."""
    artifact = open_artifact(folder)
    try:
        placement = choose_placement("cuda", "float16", artifact)
    except ProviderError as error:
        pytest.skip(str(error))
    batch = random_batch(artifact, (7, 31, 23, 40), ("last_hidden_state", "pooled_mean"))
    exact = Session(artifact, choose_placement("cpu", "float32"), threads=2).run(batch)
    session = Session(artifact, placement, threads=2, streams=2)
    session.warm_up()
    kept = batch.attention_mask.astype(bool)
    with ThreadPoolExecutor(2) as threads:
        for close in threads.map(session.run, [batch] * 8):
            assert cosine(exact["last_hidden_state"][kept], close["last_hidden_state"][kept]) > 0.999
            assert cosine(exact["pooled_mean"], close["pooled_mean"]) > 0.9999


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mpnet", "t5, plain", "camembert, four heads"])
def test_families_with_a_bias_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Padding as an additive bias holds on the GPU, at lengths that its fast kernel takes and at others."""
    import families
    from model.export import export

    try:
        choose_placement("cuda", "float32")
    except ProviderError as error:
        pytest.skip(str(error))
    families.save(name, tmp_path / "checkpoint")
    place = export(str(tmp_path / "checkpoint"), tmp_path / "artifact", precision="float16", report=lambda _line: None)
    artifact = open_artifact(place)
    session = Session(artifact, choose_placement("cuda", "float16", artifact), threads=2)
    for lengths in ((3, 16, 9), (5, 13)):
        batch = random_batch(artifact, lengths, ("pooled_mean",))
        exact = Session(artifact, choose_placement("cpu", "float32"), threads=2).run(batch)["pooled_mean"]
        assert cosine(exact, session.run(batch)["pooled_mean"]) > 0.999


def run_load_test(*words: str) -> subprocess.CompletedProcess[str]:
    """Run loadtests/gpu.py where gRPC is not installed."""
    code = "import runpy, sys; sys.modules['grpc'] = None; sys.argv = ['gpu.py', *sys.argv[1:]]\n"
    code += "runpy.run_path('loadtests/gpu.py', run_name='__main__')"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_load_test_runs_without_a_gpu() -> None:
    """`--smoke` takes the way of the real run on the processor and prints its table."""
    done = run_load_test("--smoke", "--seconds", "0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert [row[1] for row in rows] == ["2x8", "4x16"]
    assert float(rows[0][7]) > 0.999


def test_the_load_test_says_that_there_is_no_gpu() -> None:
    """Without one: a line that says so, and exit status 2."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_load_test()
    assert done.returncode == 2
    assert done.stderr.startswith("gpu.py needs an NVIDIA GPU: ")
    assert done.stderr.count("\n") == 1
