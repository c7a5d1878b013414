"""Fuzzing, a short run of what `make fuzz` does: whatever comes, an answer or a refusal, and nothing else."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from authority import Authority
from fuzz import files, targets
from fuzz.storm import METHODS, Storm, counted, in_excess, left_behind
from hypothesis import given, settings
from hypothesis import strategies as st

from attencode import AttencodeError
from service.session import Session
from tests.service import translators
from tests.service.faulty import serving

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
some = settings(max_examples=300, deadline=None, derandomize=True, database=None)
few = settings(some, max_examples=120)
MIB = 2**20


@pytest.fixture(scope="module")
def on_artifact(tiny_artifact: Path) -> targets.OnArtifact:
    """Give the targets that take an artifact."""
    return targets.OnArtifact(tiny_artifact)


@pytest.fixture(scope="module")
def on_minilm(minilm_artifact: Path) -> targets.OnArtifact:
    """Give the same of the real weights' artifact, with its vocabulary of 30,522."""
    return targets.OnArtifact(minilm_artifact)


@pytest.fixture(scope="module")
def on_files(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> files.OnFiles:
    """Give the targets that read files."""
    signed = Authority(tmp_path_factory.mktemp("ca")).sign("server")
    pair = signed.cert.read_bytes(), signed.key.read_bytes()
    return files.OnFiles(tmp_path_factory.mktemp("fuzz"), tiny_artifact, pair)


def kinds_of(error: type[Exception]) -> set[type[Exception]]:
    """List an error's kinds, and theirs."""
    return {error}.union(*(kinds_of(kind) for kind in error.__subclasses__()))


@some
@given(st.binary(max_size=600))
def test_requests(data: bytes) -> None:
    """A request is read or refused, and says the same when it is written again."""
    assert targets.codec_requests(data) in {"read", "refused", "refused later"}


@some
@given(st.binary(max_size=400))
def test_tokenization(on_artifact: targets.OnArtifact, data: bytes) -> None:
    """Any text becomes tokens whose spans lie in it, or is refused."""
    assert on_artifact.tokenization(data) in {"tokens", "refused"}


@few
@given(st.binary(max_size=400))
def test_tokenization_of_a_real_vocabulary(on_minilm: targets.OnArtifact, data: bytes) -> None:
    """The same with thirty thousand words."""
    assert on_minilm.tokenization(data) in {"tokens", "refused"}


@some
@given(st.binary(max_size=600))
def test_selection(on_artifact: targets.OnArtifact, data: bytes) -> None:
    """What is asked for is refused, or the answer has the bytes that were reckoned, whole or in chunks."""
    assert on_artifact.selection(data) in {"answered", "refused", "nothing asked"}


@some
@given(st.binary(max_size=600))
def test_answers(data: bytes) -> None:
    """A client makes an answer or an error of its own of whatever comes."""
    assert targets.answers(data) in {"read", "refused", "no message"}


@some
@given(st.binary(max_size=600))
def test_streamed_answers(data: bytes) -> None:
    """The same of whatever comes on a stream."""
    assert targets.streamed_answers(data) in {"read", "refused", "error", "nothing"}


@some
@given(st.binary(max_size=200))
def test_statuses(data: bytes) -> None:
    """The same of whatever status a call ends with."""
    assert targets.statuses(data) in {kind.__name__ for kind in kinds_of(AttencodeError)}


@few
@given(st.binary(max_size=300))
def test_certificates(on_files: files.OnFiles, data: bytes) -> None:
    """Files of certificates and keys are read or refused."""
    assert on_files.certificates(data) in {"read", "refused"}


@few
@given(st.binary(max_size=300))
def test_descriptions(on_files: files.OnFiles, data: bytes) -> None:
    """Descriptions of artifacts are read or refused."""
    assert on_files.description(data) in {"read", "refused"}


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*-*")), ids=lambda path: path.name)
def test_what_was_once_found(path: Path, on_artifact: targets.OnArtifact, on_files: files.OnFiles) -> None:
    """Bytes that once brought a fault to light bring none."""
    name = path.name.partition("-")[0]
    owner: Any = next(owner for owner in (targets, on_artifact, on_files) if hasattr(owner, name))
    assert getattr(owner, name)(path.read_bytes()) not in {"", "told a secret"}


@pytest.fixture(scope="module")
def stormy(spawn_for_all: Callable[..., Any], tiny_artifact: Path) -> Any:
    """Give a server process of the tiny BERT."""
    return spawn_for_all(tiny_artifact, "--provider", "cpu", "--precision", "float32")


@pytest.mark.parametrize("hasty", [False, True], ids=["patient", "hasty"])
def test_a_whole_server(stormy: Any, hasty: bool) -> None:
    """Messages of every kind end with a documented status, plain requests among them with the same answer as ever.

    The server counts what its clients count, keeps its memory, and nothing is left on its way.
    """
    before, process = counted(stormy.metrics_port), psutil.Process(stormy.process.pid)
    asyncio.run(Storm(stormy.address, seed=1).run(100))
    before, resident = counted(stormy.metrics_port), process.memory_info().rss
    told = asyncio.run(Storm(stormy.address, seed=7, hasty=hasty).run(1500))
    assert not told.faults
    assert told.canaries > 10
    assert told.statuses["Encode", "OK"] > 20
    assert told.statuses["EncodeStream", "OK"] > 20
    if not hasty:  # a call that its client leaves may not have come to be counted
        assert not in_excess(told.statuses, counted(stormy.metrics_port) - before)
    for _ in range(50):
        if not (left := left_behind(stormy.metrics_port)):
            break
        asyncio.run(asyncio.sleep(0.1))
    assert not left
    assert process.memory_info().rss - resident < 150 * MIB


def test_pairs_in_a_storm(export_artifact: Callable[[Path], Path], tmp_path: Path) -> None:
    """Where there is a decoder pairs of every kind are answered or refused, and plain requests among them as ever."""
    translators.save("t5", tmp_path / "t5")
    with serving(export_artifact(tmp_path / "t5"), Session) as running:
        told = asyncio.run(Storm(running.address, seed=3, methods=(*METHODS, *["Align"] * 8)).run(600))
    assert not told.faults
    assert told.statuses["Align", "OK"] > 20
    assert told.statuses["Align", "INVALID_ARGUMENT"] > 20
