"""Where a checkpoint comes from: a folder on disk, or the Hugging Face hub.

Only data files are fetched, never code. May import: errors, huggingface_hub.
"""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from model.errors import CheckpointError

_DATA_FILES = ["*.json", "*.txt", "*.model"]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's place.

    Attributes:
        folder: Local folder that holds its files.
        model_id: The hub id, or the folder's name for a local folder.
        revision: The hub's commit, None for a local folder.
    """

    folder: Path
    model_id: str
    revision: str | None


def locate(model: str, revision: str | None = None) -> Source:
    """Find a checkpoint on disk, or download it with huggingface_hub's progress bars.

    Args:
        model: A folder, or a hub id such as `sentence-transformers/all-MiniLM-L6-v2`.
        revision: Branch, tag or commit on the hub; its default branch when None.

    Returns:
        The local place of the files.

    Raises:
        CheckpointError: There is no such folder and no such model, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{model} is a local folder; a revision is for hub ids, leave it out")
        return Source(path, path.resolve().name, None)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{model} is not a folder; give a checkpoint's folder or a hub id")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Source:
    """Fetch config, tokenizer and weights; pickled weights only where there are no safetensors."""
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=[*_DATA_FILES, "model*.safetensors"])
        if not any(Path(folder).glob("model*.safetensors")):
            folder = snapshot_download(model, revision=revision, allow_patterns=[*_DATA_FILES, "pytorch_model*.bin"])
    except (OSError, ValueError) as error:
        asked = model if revision is None else f"{model} at revision {revision}"
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{asked} is neither a local folder nor could it be fetched from the Hugging Face hub: {reason}"
        ) from error
    return Source(Path(folder), model, Path(folder).name)
