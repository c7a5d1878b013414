"""Artifact: the folder that `attencode export` writes, opened and verified.

Every file is held against the digest in `artifact.json` before anything is loaded from it.
May import: errors.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from service.errors import ArtifactError

FORMAT_VERSION = 4
ARTIFACT_FILE = "artifact.json"
WEIGHTS_FILE = "weights.bin"
_FILES = {"encode.onnx", "attention.onnx", "tokenizer.json", WEIGHTS_FILE}
CUDA_GRAPH = "encode.cuda.onnx"
CUDA_POOLED_GRAPH = "pooled.cuda.onnx"
CUDA_WEIGHTS = "weights.cuda.bin"
_CUDA_FILES = {CUDA_GRAPH, CUDA_POOLED_GRAPH, CUDA_WEIGHTS}  # all or none
_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "pooling_mask", "state_rows"}
_NOT_DESCRIBED = ("folder", "digest", "optional_files", "marks", "digests")
_MAY_BE_ZERO = ("type_vocab_size", "pad_token_id")


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
        head_dim: Width of a query or key vector.
        vocab_size: Token ids are below this.
        type_vocab_size: Segment ids are below this; 0 for a model without segments.
        pad_token_id: Fills padded places.
        num_parameters: Weights, as numbers.
        max_tokens: Longest sequence in tokens, special tokens included.
        inputs: Names of the tensors that `encode.onnx` takes.
        attention_weights: For each layer, what `attention.onnx` takes of it: name -> `offset` in weights.bin in bytes,
            and `shape`; float32.
        pooling: Pooling of a request that names none; `sentence` for modules of the model's own.
        normalize: Whether pooled vectors get length 1 when a request does not say.
        prompts: Prompt name to the text put before an input.
        default_prompt_name: Prompt of a request that names none; None for no prompt.
        poolings: Poolings that the graphs offer.
        sentence_size: Width of the model's own pooled vectors.
        pool_prompt: Whether a prompt's tokens are pooled with the text's.
        optional_files: Names of the files beyond those that every artifact has.
        marks: Of each verified file what tells that it is still the same.
        digests: Of each of them its sha256.
    """

    folder: Path
    digest: str
    model_id: str
    revision: str | None
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    vocab_size: int
    type_vocab_size: int
    pad_token_id: int
    num_parameters: int
    max_tokens: int
    inputs: tuple[str, ...]
    attention_weights: tuple[Mapping[str, Mapping[str, Any]], ...]
    pooling: str
    normalize: bool
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    poolings: tuple[str, ...]
    sentence_size: int
    pool_prompt: bool
    optional_files: frozenset[str] = frozenset()
    marks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def pooled_size(self, pooling: str) -> int:
        """Give the width of one pooling's vectors."""
        return self.sentence_size if pooling == "sentence" else self.hidden_size

    def check_unchanged(self, *names: str) -> None:
        """Do nothing while some files are those that were verified; to be asked once they are opened.

        Raises:
            ArtifactError: One was changed, replaced or removed since.
        """
        for name in self.marks.keys() & set(names):
            try:
                now = mark_of((self.folder / name).stat())
            except OSError as error:
                raise ArtifactError(
                    f"{self.folder / name} was removed under the running server: {error.strerror}; "
                    "put the artifact back and start the server anew"
                ) from error
            if now != self.marks[name]:
                raise ArtifactError(
                    f"{self.folder / name} was changed or replaced under the running server; start it anew"
                )


def is_artifact(folder: Path) -> bool:
    """Tell whether a path is a folder with an artifact's description in it."""
    return (folder / ARTIFACT_FILE).is_file()


def open_artifact(folder: Path) -> Artifact:
    """Read an artifact and verify the digest of each of its files.

    Raises:
        ArtifactError: The folder is no artifact, of another format, or not as it was written.
    """
    artifact, files = _read_description(folder)
    marks = _verify_files(folder, files)
    return replace(artifact, marks=marks, digests={name: files[name]["sha256"] for name in marks})


def open_description(folder: Path) -> Artifact:
    """Read what an artifact says of its model, for one who does not run it: the graphs need not be there.

    Raises:
        ArtifactError: The description is not what an export writes.
    """
    return _read_description(folder)[0]


def _read_description(folder: Path) -> tuple[Artifact, Any]:
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
        raise ArtifactError(
            f"{path} has format {found!r}, this version reads {FORMAT_VERSION!r}; export the model again"
        )
    names = [field.name for field in fields(Artifact) if field.name not in _NOT_DESCRIBED]
    missing = [name for name in (*names, "files") if name not in raw]
    if missing:
        raise ArtifactError(f"{path} lacks {', '.join(missing)}; export the model again")
    values: dict[str, Any] = {name: tuple(raw[name]) if isinstance(raw[name], list) else raw[name] for name in names}
    files = raw["files"]
    optional = frozenset(files) - _FILES if isinstance(files, dict) else frozenset()
    digest = hashlib.sha256(text).hexdigest()
    artifact = Artifact(folder=folder, digest=digest, optional_files=optional, **values)
    _check_values(path, artifact)
    return artifact, files


def _check_values(path: Path, artifact: Artifact) -> None:
    """Refuse a description whose values cannot be what an export writes."""
    texts = ("model_id", "family", "pooling")
    counts = [field.name for field in fields(Artifact) if field.type in (int, "int") and field.name not in _MAY_BE_ZERO]
    checks = {
        **{name: isinstance(getattr(artifact, name), str) for name in texts},
        **{name: _is_count(getattr(artifact, name), 1) for name in counts},
        **{name: _is_count(getattr(artifact, name), 0) for name in _MAY_BE_ZERO},
        **{name: isinstance(getattr(artifact, name), bool) for name in ("normalize", "pool_prompt")},
        "revision": isinstance(artifact.revision, str | None),
        "inputs": isinstance(artifact.inputs, tuple) and set(artifact.inputs) <= _INPUTS,
        "attention_weights": _are_places(artifact.attention_weights, artifact.num_hidden_layers),
        "prompts": isinstance(artifact.prompts, dict)
        and all(isinstance(text, str) for text in artifact.prompts.values()),
        "poolings": isinstance(artifact.poolings, tuple) and artifact.pooling in artifact.poolings,
    }
    wrong = [name for name, right in checks.items() if not right]
    if not wrong:  # GetModel tells all but one of them in 32 bits
        wrong = [name for name in counts if name != "num_parameters" and getattr(artifact, name) >= 2**32]
    if not wrong and artifact.pad_token_id >= artifact.vocab_size:
        wrong = ["pad_token_id"]
    if not wrong and artifact.default_prompt_name not in (None, *artifact.prompts):
        wrong = ["default_prompt_name"]
    if wrong:
        raise ArtifactError(f"{path} has values that no export writes for {', '.join(wrong)}; export the model again")


def _are_places(places: object, layers: object) -> bool:
    """Tell whether each layer has weights with an offset and a shape."""
    if not isinstance(places, tuple) or len(places) != layers or not all(isinstance(layer, dict) for layer in places):
        return False
    weights = [weight for layer in places for weight in layer.values()]
    return all(
        isinstance(weight, dict)
        and isinstance(weight.get("shape"), list)
        and all(_is_count(number, 1) for number in weight["shape"])
        and _is_count(weight.get("offset"), 0)
        for weight in weights
    )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def mark_of(stat: os.stat_result) -> tuple[int, ...]:
    """Give what tells a file from another one, and from itself after it was written: device, inode, size, time."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _verify_files(folder: Path, files: Any) -> dict[str, tuple[int, ...]]:
    """Hold each file against its recorded digest; gives their marks."""
    marks: dict[str, tuple[int, ...]] = {}
    if not isinstance(files, dict) or not files.keys() >= _FILES:
        raise ArtifactError(f"{folder / ARTIFACT_FILE} must name {', '.join(sorted(_FILES))}; export the model again")
    if missing := _CUDA_FILES - files.keys() if _CUDA_FILES & files.keys() else None:
        raise ArtifactError(
            f"{folder / ARTIFACT_FILE} must name {', '.join(sorted(missing))} too; export the model again"
        )
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name:
            raise ArtifactError(f"{folder / ARTIFACT_FILE} names {name!r}, which is not a file of this folder")
        try:
            with path.open("rb") as file:
                marks[name] = mark_of(os.fstat(file.fileno()))
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}; export the model again") from error
        if not isinstance(expected, dict) or digest != expected.get("sha256"):
            raise ArtifactError(f"{path} was changed or damaged after the export; export the model again")
    return marks
