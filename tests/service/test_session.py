"""Session and placement: the right provider, the same numbers, and no silent fallback."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from service import placement as placement_module
from service.artifact import Artifact, open_artifact
from service.attention import Attention
from service.batching import Batch
from service.errors import ArtifactError, ProviderError
from service.placement import Placement, choose_placement, streams_for, usable_cores
from service.reduce import look_at
from service.request import Tokens
from service.session import Session


@pytest.fixture(scope="module")
def artifact(minilm_artifact: Path) -> Artifact:
    """Give the opened artifact of the real weights."""
    return open_artifact(minilm_artifact)


def random_batch(artifact: Artifact, lengths: tuple[int, ...], outputs: tuple[str, ...]) -> Batch:
    draw = np.random.default_rng(3)
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    ids = draw.integers(1000, artifact.vocab_size, shape) * mask
    return Batch(outputs, lengths, ids, mask, np.zeros_like(ids), mask)


def looking_batch(artifact: Artifact, lengths: tuple[int, ...], layer: int) -> Batch:
    """Make a batch of whose every row one layer's attention is wanted."""
    heads = tuple(range(artifact.num_attention_heads))
    looks = []
    for length in lengths:
        nothing = [(0, 0)] * length
        tokens = Tokens([0] * length, [""] * length, nothing, nothing, [-1] * length, [0] * length, [False] * length)
        asked = Attention((layer,), heads)
        looks.append(look_at(asked, None, tokens, head_dim=artifact.head_dim, data_type="float32"))
    return replace(random_batch(artifact, lengths, ()), looks=tuple(looks), state_rows=np.arange(len(lengths)))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_graphs_are_loaded_when_first_needed(artifact: Artifact) -> None:
    """Plain traffic holds one graph; the first request for attention loads the other."""
    session = Session(artifact, choose_placement("cpu", "float32"), threads=2)
    session.load()
    session.warm_up()
    assert {graph for graph, _ in session._sessions} == {"encode"}
    batch = looking_batch(artifact, (5, 9), 2)
    looked = session.look(batch, session.run(batch)["hidden_states"])
    assert [looked[row]["attention"].shape for row in (0, 1)] == [(1, 12, 5, 5), (1, 12, 9, 9)]
    assert {graph for graph, _ in session._sessions} == {"encode", "attention"}


@pytest.mark.parametrize("provider", ["cpu", "openvino"])
def test_streams_compute_the_same(artifact: Artifact, provider: str) -> None:
    """Batches that run side by side, each on one thread, yield what one yields that is alone on all of them."""
    try:
        placement = choose_placement(provider, "float32")
    except ProviderError as error:
        pytest.skip(str(error))
    session = Session(artifact, placement, threads=2, streams=2)
    session.load()
    batches = [random_batch(artifact, lengths, ("pooled_mean",)) for lengths in ((5, 9), (40, 3), (7,), (64, 64))]
    alone = [session.run(batch, alone=True)["pooled_mean"] for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda batch: session.run(batch)["pooled_mean"], batches * 5))
    for number, pooled in enumerate(together):
        np.testing.assert_allclose(pooled, alone[number % len(batches)], atol=1e-5)
    assert set(session._sessions) == {("encode", 1), ("encode", 2)}


def test_streams_follow_the_cores() -> None:
    """One thread a stream up to eight cores, then more threads for each; two batches at once on a GPU."""
    assert [streams_for("cpu", cores) for cores in (1, 2, 4, 8, 64)] == [1, 2, 4, 8, 8]
    assert streams_for("cuda", 16) == 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_openvino_agrees_with_float32(artifact: Artifact, precision: str) -> None:
    """OpenVINO's bf16 keeps every token within cosine 0.999 and pooled vectors within 0.9999."""
    try:
        placement = choose_placement("openvino", precision)
    except ProviderError as error:
        pytest.skip(str(error))
    outputs = ("last_hidden_state", "pooled_mean")
    batch = random_batch(artifact, (7, 64, 23, 40), outputs)
    exact = Session(artifact, choose_placement("cpu", "float32"), threads=2).run(batch)
    close = Session(artifact, placement, threads=2).run(batch)
    kept = batch.attention_mask.astype(bool)
    assert cosines(exact["last_hidden_state"][kept], close["last_hidden_state"][kept]).min() > 0.999
    assert cosines(exact["pooled_mean"], close["pooled_mean"]).min() > 0.9999
    if precision == "float32":
        np.testing.assert_allclose(close["pooled_mean"], exact["pooled_mean"], atol=1e-4)


def test_openvino_company_changes_little(artifact: Artifact) -> None:
    """In bf16 a sequence alone and in a padded batch: cosine 0.9999 pooled, 0.999 for each token."""
    try:
        session = Session(artifact, choose_placement("openvino", "bfloat16"), threads=2)
    except ProviderError as error:
        pytest.skip(str(error))
    outputs = ("last_hidden_state", "pooled_mean")
    batch = random_batch(artifact, (7, 64, 23, 40), outputs)
    together = session.run(batch)
    for row, length in enumerate(batch.lengths):
        ids, mask = batch.input_ids[row : row + 1, :length], batch.attention_mask[row : row + 1, :length]
        alone = session.run(Batch(outputs, (length,), ids, mask, np.zeros_like(ids), mask))
        assert cosines(alone["pooled_mean"][0], together["pooled_mean"][row]) > 0.9999
        assert cosines(alone["last_hidden_state"][0], together["last_hidden_state"][row, :length]).min() > 0.999


def test_openvino_attention_rows_sum_to_one(artifact: Artifact) -> None:
    """Attention weights in bf16 are still a distribution over the real keys."""
    try:
        placement = choose_placement("openvino", "bfloat16")
    except ProviderError as error:
        pytest.skip(str(error))
    batch = looking_batch(artifact, (7, 40), 3)
    session = Session(artifact, placement, threads=2)
    for arrays in session.look(batch, session.run(batch)["hidden_states"]).values():
        np.testing.assert_allclose(arrays["attention"].sum(-1), 1.0, atol=1e-4)


def test_the_second_try_maps_no_weights_again(artifact: Artifact) -> None:
    """A session in float32 beside another one takes its mapped weights, and no descriptors for them."""
    session = Session(artifact, Placement("cpu", "bfloat16", ""), threads=2)
    exact = session.in_float32()
    assert exact is not None
    batch = looking_batch(artifact, (7, 4), 3)
    states = exact.run(batch)["hidden_states"]
    session.look(batch, states)
    before = mapped(artifact)
    assert before
    exact.look(batch, states)
    assert mapped(artifact) == before


def mapped(artifact: Artifact) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(str(artifact.folder / "weights.bin")) for line in lines)


@pytest.mark.gpu
def test_cuda_agrees_with_float32(artifact: Artifact) -> None:
    """CUDA computes what the processor computes."""
    try:
        placement = choose_placement("cuda", "auto")
    except ProviderError as error:
        pytest.skip(str(error))
    batch = random_batch(artifact, (7, 64, 23), ("pooled_mean",))
    exact = Session(artifact, choose_placement("cpu", "float32"), threads=2).run(batch)
    close = Session(artifact, placement, threads=2).run(batch)
    np.testing.assert_allclose(close["pooled_mean"], exact["pooled_mean"], atol=1e-2)


def test_auto_takes_what_is_present_and_says_why() -> None:
    """`auto` names the providers that it passed over."""
    placement = choose_placement("auto", "auto")
    assert placement.provider in ("cuda", "openvino", "cpu")
    assert placement.reason.startswith("fastest present")
    if placement.provider != "cuda":
        assert "cuda: " in placement.reason


def test_a_named_provider_that_is_absent_stops_the_start() -> None:
    """No fallback: what was asked for by name and is not there is an error with the mend."""
    with patch.object(placement_module, "_nvidia_present", return_value=False), pytest.raises(ProviderError) as caught:
        choose_placement("cuda", "auto")
    assert str(caught.value).startswith("provider cuda cannot run here: ")


def test_a_precision_that_the_provider_lacks() -> None:
    """A precision that the provider does not run is named with those it runs."""
    with pytest.raises(ProviderError, match="provider cpu does not run float16; it runs float32"):
        choose_placement("cpu", "float16")


def test_two_runtimes_stop_the_start() -> None:
    """Onnxruntime and onnxruntime-gpu installed over one another are refused."""
    with (
        patch.object(placement_module, "distribution", side_effect=lambda name: name),
        pytest.raises(ProviderError, match=r"onnxruntime and onnxruntime-gpu .*are installed over one another"),
    ):
        choose_placement("cpu", "float32")


def test_a_broken_graph_stops_the_start(artifact: Artifact, tmp_path: Path) -> None:
    """A graph that cannot be loaded is a provider's error with the file's name."""
    (tmp_path / "encode.onnx").write_bytes(b"nonsense")
    broken = Session(
        Artifact(**{name: getattr(artifact, name) for name in Artifact.__slots__} | {"folder": tmp_path}),
        Placement("cpu", "float32", "asked for"),
        threads=1,
    )
    with pytest.raises(ProviderError, match=r"cpu cannot load .*encode\.onnx"):
        broken.load()


def test_usable_cores_follow_the_affinity() -> None:
    """The count is that of the cores this process may use, not of those the machine has."""
    import os

    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_a_process_on_one_core_runs_one_stream() -> None:
    """What counts are the cores that the process may use: bound to one, it has one thread and one stream."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from service.placement import streams_for, usable_cores\n"
        "print(usable_cores(), streams_for('cpu', usable_cores()))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["1", "1"]


def edit(folder: Path, **values: object) -> None:
    """Change values of an artifact's description."""
    path = folder / "artifact.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json cannot be read"),
        (lambda folder: (folder / "artifact.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "artifact.json").write_text('{"format_version": 99}'), "has format 99"),
        (lambda folder: (folder / "artifact.json").unlink(), "is no artifact"),
        (lambda folder: (folder / "encode.onnx").write_bytes(b"x"), "was changed or damaged"),
        (
            lambda folder: edit(folder, files={"encode.onnx": 3}),
            "must name attention.onnx, encode.onnx",
        ),
        (lambda folder: edit(folder, poolings=None), "no export writes for poolings"),
        (lambda folder: edit(folder, max_tokens="x", prompts=[1]), "no export writes for max_tokens, prompts"),
        (lambda folder: edit(folder, attention_weights=[{}]), "no export writes for attention_weights"),
        (lambda folder: edit(folder, hidden_size=0), "no export writes for hidden_size"),
        (lambda folder: edit(folder, pad_token_id=99999), "no export writes for pad_token_id"),
        (lambda folder: edit(folder, default_prompt_name="zz"), "no export writes for default_prompt_name"),
        (lambda folder: edit(folder, normalize="no", model_id=5), "no export writes for model_id, normalize"),
    ],
)
def test_a_spoilt_artifact_is_refused(
    tiny_artifact: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    """An artifact that is not as it was written does not load, and the error names the file."""
    import shutil

    folder = tmp_path / "artifact"
    shutil.copytree(tiny_artifact, folder)
    open_artifact(folder)
    spoil(folder)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(folder)
