"""Artifact: the folder that `attencode export` writes, opened and verified.

Every file is held against the digest in `artifact.json` before anything is loaded from it.
May import: errors.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from service.errors import ArtifactError

FORMAT_VERSION = 1
ARTIFACT_FILE = "artifact.json"


@dataclass(frozen=True, slots=True)
class Artifact:
    """What an artifact says of its model.

    Attributes:
        folder: Where the files lie.
        digest: sha256 of `artifact.json`, which holds every file's digest; hexadecimal.
        model_id: Hub id or folder name of the checkpoint.
        revision: The hub's commit; None when unknown.
        family: For instance `bert`.
        hidden_size: Width of every hidden state.
        num_hidden_layers: Encoder layers.
        num_attention_heads: Heads of each layer.
        vocab_size: Token ids are below this.
        type_vocab_size: Segment ids are below this.
        pad_token_id: Fills padded places.
        num_parameters: Weights, as numbers.
        max_tokens: Longest sequence in tokens, special tokens included.
        pooling: Pooling of a request that names none.
        normalize: Whether pooled vectors get length 1 when a request does not say.
        prompts: Prompt name to the text put before an input.
        default_prompt_name: Prompt of a request that names none; None for no prompt.
        poolings: Poolings that the graphs offer.
    """

    folder: Path
    digest: str
    model_id: str
    revision: str | None
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    type_vocab_size: int
    pad_token_id: int
    num_parameters: int
    max_tokens: int
    pooling: str
    normalize: bool
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    poolings: tuple[str, ...]


def is_artifact(folder: Path) -> bool:
    """Tell whether a path is a folder with an artifact's description in it."""
    return (folder / ARTIFACT_FILE).is_file()


def open_artifact(folder: Path) -> Artifact:
    """Read an artifact and verify the digest of each of its files.

    Raises:
        ArtifactError: The folder is no artifact, of another format, or not as it was written.
    """
    path = folder / ARTIFACT_FILE
    try:
        text = path.read_bytes()
        raw = json.loads(text)
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} is no artifact: it has no {ARTIFACT_FILE}; make one with `attencode export`"
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
        found = raw.get("format_version") if isinstance(raw, dict) else None
        raise ArtifactError(f"{path} has format {found!r}, this version reads {FORMAT_VERSION}; export the model again")
    names = [field.name for field in fields(Artifact) if field.name not in ("folder", "digest")]
    missing = [name for name in (*names, "files") if name not in raw]
    if missing:
        raise ArtifactError(f"{path} lacks {', '.join(missing)}; export the model again")
    _verify_files(folder, raw["files"])
    values = {name: raw[name] for name in names} | {"poolings": tuple(raw["poolings"])}
    return Artifact(folder=folder, digest=hashlib.sha256(text).hexdigest(), **values)


def _verify_files(folder: Path, files: Any) -> None:
    """Hold each file against its recorded size and digest."""
    if not isinstance(files, dict) or not files:
        raise ArtifactError(f"{folder / ARTIFACT_FILE} names no files; export the model again")
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name:
            raise ArtifactError(f"{folder / ARTIFACT_FILE} names {name!r}, which is not a file of this folder")
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}; export the model again") from error
        if digest != expected.get("sha256"):
            raise ArtifactError(f"{path} was changed or damaged after the export; export the model again")
