"""Names, links and JSON of checkpoints of somebody who means ill: nothing outside of the folder is read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint import read_json
from model.errors import CheckpointError
from tests.model.hostile import change, load, write_modules

EMBEDDING = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_links_that_lead_out(folder: Path, tmp_path: Path, name: str) -> None:
    """A link to a file elsewhere is refused by both names, whatever lies there."""
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*elsewhere, outside of its folder"):
        load(folder)


def test_links_of_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    """Files that are links to a model's blobs, as huggingface_hub keeps them, are read; other links there are not."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/c", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    load(snapshot)
    (blobs / "config.json").rename(tmp_path / "models--a--b/config.json")
    (blobs / "config.json").symlink_to("../config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to"):
        load(snapshot)


def test_pipes_and_loops(folder: Path) -> None:
    """Nothing waits for a pipe, and a link to itself is refused."""
    path = folder / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"config\.json is not a plain file"):
        load(folder)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load(folder)


def _module_at(path: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        write_modules(folder, {"path": path, "type": "sentence_transformers.models.Dense"})

    return spoil


def _module_by_a_link(folder: Path) -> None:
    write_modules(folder, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "2_Dense").rename(folder.parent / "elsewhere")
    (folder / "2_Dense").symlink_to(folder.parent / "elsewhere")


def _shard_at(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        change(folder / "model.safetensors.index.json", weight_map={EMBEDDING: name})

    return spoil


def _shard_by_a_link(folder: Path) -> None:
    _shard_at("shard.safetensors")(folder)
    (folder / "shard.safetensors").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_module_at("../x"), r"names the folder '\.\./x', which is not right below it"),
        (_module_at("/etc"), "names the folder '/etc'"),
        (_module_at(".."), r"names the folder '\.\.'"),
        (_module_at("a\0b"), "names the folder"),
        (_module_by_a_link, "2_Dense is a link that leads out of its folder"),
        (_shard_at("../../etc/passwd"), r"names the shard '\.\./\.\./etc/passwd', which is not in the folder"),
        (_shard_at("/etc/passwd"), "names the shard '/etc/passwd', which is not in the folder"),
        (_shard_by_a_link, r"shard\.safetensors is a link to /etc/passwd, outside of its folder"),
    ],
)
def test_names_that_lead_out(folder: Path, spoil: Callable[[Path], None], message: str) -> None:
    """Modules and shards are looked for in the folder alone, whatever a file calls them."""
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000])
def test_json_that_costs(folder: Path, text: str) -> None:
    """JSON that is nested without end, or a number of thousands of digits, is one error."""
    (folder / "config.json").write_text(text, "utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        read_json(folder / "config.json")


def test_a_template_that_names_nothing(folder: Path) -> None:
    """What makes the tokenizers' library panic is one error too."""
    raw = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    raw["post_processor"]["special_tokens"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        load(folder)
