"""Artifact: the folder that `attencode export` writes, opened and verified.

Every file is held against the digest in `artifact.json` before anything is loaded from it. Digests show that it is as
it was written, not that whoever wrote it meant well: so names, links, sizes, and what graphs refer to are checked too,
and nothing is set aside because a number says so.
May import: confined, decoder, graph_file, errors.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from service.confined import open_file, read_file
from service.decoder import DECODER_GRAPH, Decoder, decoder_ports, read_decoder
from service.errors import ArtifactError
from service.graph_file import FLOAT, INT64, MOST_BYTES, Expected, Port, check_graph

FORMAT_VERSION = 5
ARTIFACT_FILE = "artifact.json"
WEIGHTS_FILE = "weights.bin"
_FILES = {"encode.onnx", "attention.onnx", "tokenizer.json", WEIGHTS_FILE}
LONG_GRAPH = "long.onnx"
LONG_TOKENS = 1024
"""Padded length above which a batch goes to the graph for long texts, where there is one."""
CUDA_GRAPH = "encode.cuda.onnx"
CUDA_POOLED_GRAPH = "pooled.cuda.onnx"
CUDA_WEIGHTS = "weights.cuda.bin"
_CUDA_FILES = {CUDA_GRAPH, CUDA_POOLED_GRAPH, CUDA_WEIGHTS}  # all or none
_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "pooling_mask", "state_rows"}
_NOT_DESCRIBED = ("folder", "digest", "optional_files", "marks", "digests")
_MAY_BE_ZERO = ("type_vocab_size", "pad_token_id")
_POOLINGS = {"cls", "mean", "max", "last", "sentence"}
_MOST_DESCRIPTION_BYTES = 4 << 20  # a layer takes some 500 bytes, the rest is prompts
_MOST_TOKENS = 1 << 20  # of one sequence; an export of a model without a limit writes less than a million
_MOST_CHARS = 1000  # of a name, which logs and metrics repeat
_NUMBER_BYTES = 4
_SIZE = 2  # its place in a file's mark


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
        attention_weights: For each layer, what `attention.onnx` takes of it, its weights and the numbers that say of
            what kind it is: name -> `offset` in weights.bin in bytes, and `shape`; float32.
        pooling: Pooling of a request that names none; `sentence` for modules of the model's own.
        normalize: Whether pooled vectors get length 1 when a request does not say.
        prompts: Prompt name to the text put before an input.
        default_prompt_name: Prompt of a request that names none; None for no prompt.
        poolings: Poolings that the graphs offer.
        sentence_size: Width of the model's own pooled vectors.
        pool_prompt: Whether a prompt's tokens are pooled with the text's.
        decoder: The decoder beside the encoder; None without one.
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
    decoder: Decoder | None
    optional_files: frozenset[str] = frozenset()
    marks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def pooled_size(self, pooling: str) -> int:
        """Give the width of one pooling's vectors."""
        return self.sentence_size if pooling == "sentence" else self.hidden_size

    def graph_for(self, length: int) -> Literal["encode", "long"]:
        """Name the graph that a batch of a padded length goes to."""
        return "long" if length > LONG_TOKENS and LONG_GRAPH in self.optional_files else "encode"

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
    """Read an artifact and verify each of its files, whoever made it.

    Raises:
        ArtifactError: The folder is no artifact, of another format, not as it was written, or not as any export writes.
    """
    artifact, files = _read_description(folder)
    marks = {name: _mark(folder, name) for name in _checked_names(artifact, files)}  # before anything is read
    sizes = {name: mark[_SIZE] for name, mark in marks.items()}
    _check_sizes(artifact, sizes[WEIGHTS_FILE])
    _verify_files(artifact, files, sizes)
    return replace(artifact, marks=marks, digests={name: files[name]["sha256"] for name in marks})


def open_description(folder: Path) -> Artifact:
    """Read what an artifact says of its model, for one who does not run it: the graphs need not be there.

    Raises:
        ArtifactError: The description is not what an export writes.
    """
    return _read_description(folder)[0]


def _read_description(folder: Path) -> tuple[Artifact, Any]:
    path = folder / ARTIFACT_FILE
    if not path.exists():
        raise ArtifactError(f"{folder} is no artifact: it has no {ARTIFACT_FILE}; make one with `attencode export`")
    text = read_file(folder, ARTIFACT_FILE, _MOST_DESCRIPTION_BYTES)
    try:
        raw = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export the model again") from error
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
    if values["decoder"] is not None:
        values["decoder"] = read_decoder(path, raw["decoder"], _MOST_TOKENS)
    files = raw["files"]
    optional = frozenset(files) - _FILES if isinstance(files, dict) else frozenset()
    digest = hashlib.sha256(text).hexdigest()
    artifact = Artifact(folder=folder, digest=digest, optional_files=optional, **values)
    _check_values(path, artifact)
    return artifact, files


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, of which every reader must see the same."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_values(path: Path, artifact: Artifact) -> None:
    """Refuse a description whose values cannot be what an export writes."""
    texts = ("model_id", "family", "pooling")
    counts = [field.name for field in fields(Artifact) if field.type in (int, "int") and field.name not in _MAY_BE_ZERO]
    checks = {
        **{name: _is_name(getattr(artifact, name)) for name in texts},
        **{name: _is_count(getattr(artifact, name), 1) for name in counts},
        **{name: _is_count(getattr(artifact, name), 0) for name in _MAY_BE_ZERO},
        **{name: isinstance(getattr(artifact, name), bool) for name in ("normalize", "pool_prompt")},
        "max_tokens": _is_count(artifact.max_tokens, 1, _MOST_TOKENS),
        "revision": artifact.revision is None or _is_name(artifact.revision),
        "inputs": _are_among(artifact.inputs, _INPUTS),
        "attention_weights": _are_places(artifact.attention_weights, artifact.num_hidden_layers),
        "prompts": isinstance(artifact.prompts, dict)
        and all(_is_text(text) for pair in artifact.prompts.items() for text in pair),
        "poolings": _are_among(artifact.poolings, _POOLINGS) and artifact.pooling in artifact.poolings,
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


def _are_among(names: object, known: set[str]) -> bool:
    return isinstance(names, tuple) and all(isinstance(name, str) for name in names) and set(names) <= known


def _are_places(places: object, layers: object) -> bool:
    """Tell whether each layer has the same weights, each with an offset and a shape."""
    if not isinstance(places, tuple) or len(places) != layers or not all(isinstance(layer, dict) for layer in places):
        return False
    weights = [weight for layer in places for weight in layer.values()]
    right = all(
        isinstance(weight, dict)
        and isinstance(weight.get("shape"), list)
        and all(_is_count(number, 1) for number in weight["shape"])
        and _is_count(weight.get("offset"), 0)
        and not weight["offset"] % _NUMBER_BYTES
        for weight in weights
    )
    return right and all(_shapes(layer) == _shapes(places[0]) for layer in places)


def _shapes(layer: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: weight["shape"] for name, weight in layer.items()}


def mark_of(stat: os.stat_result) -> tuple[int, ...]:
    """Give what tells a file from another one, and from itself after it was written: device, inode, size, time."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_count(value: object, least: int, most: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: object) -> bool:
    """Tell whether a value is text that can be sent: JSON can write halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_name(value: object) -> bool:
    return _is_text(value) and isinstance(value, str) and len(value) <= _MOST_CHARS


def _checked_names(artifact: Artifact, files: Any) -> Iterable[str]:
    """List the files that a description names, if they are those of an artifact."""
    path = artifact.folder / ARTIFACT_FILE
    if not isinstance(files, dict) or not files.keys() >= _FILES:
        raise ArtifactError(f"{path} must name {', '.join(sorted(_FILES))}; export the model again")
    if missing := _CUDA_FILES - files.keys() if _CUDA_FILES & files.keys() else None:
        raise ArtifactError(f"{path} must name {', '.join(sorted(missing))} too; export the model again")
    of_decoder = {DECODER_GRAPH, artifact.decoder.tokenizer} - _FILES if artifact.decoder is not None else set[str]()
    if missing := of_decoder - files.keys():
        raise ArtifactError(f"{path} must name {', '.join(sorted(missing))} too; export the model again")
    if unknown := files.keys() - _FILES - _CUDA_FILES - {LONG_GRAPH} - of_decoder:
        raise ArtifactError(
            f"{path} names {min(unknown)[:60]!r}, which is no file of an artifact; export the model again"
        )
    return list(files)


def _mark(folder: Path, name: str) -> tuple[int, ...]:
    with open_file(folder, name) as file:
        return mark_of(os.fstat(file.fileno()))


def _check_sizes(artifact: Artifact, weights_bytes: int) -> None:
    """Refuse numbers for which the weights are too small a file: what they would cost is not to be had for a word."""
    widths = (artifact.hidden_size, artifact.num_attention_heads * artifact.head_dim)  # of a projection: in, out
    lengths = (*widths, artifact.head_dim // 2, 1)  # of biases, and of the numbers that say of what kind a layer is
    most = weights_bytes // _NUMBER_BYTES
    places = [place for layer in artifact.attention_weights for place in layer.values()]
    decoder = artifact.decoder
    checks = {
        "decoder": decoder is None or max(decoder.vocab_size, decoder.num_heads) <= most,
        **{name: getattr(artifact, name) <= most for name in ("hidden_size", "vocab_size", "sentence_size")},
        **{name: getattr(artifact, name) <= most for name in ("type_vocab_size", "num_attention_heads", "head_dim")},
        "attention_weights": all(
            (tuple(place["shape"]) == widths or (len(place["shape"]) == 1 and place["shape"][0] in lengths))
            and place["offset"] + math.prod(place["shape"]) * _NUMBER_BYTES <= weights_bytes
            for place in places
        ),
    }
    if wrong := [name for name, right in checks.items() if not right]:
        raise ArtifactError(
            f"{artifact.folder / ARTIFACT_FILE} has values for {', '.join(wrong)} that do not fit the {weights_bytes} "
            f"bytes of {WEIGHTS_FILE}; export the model again"
        )


def _verify_files(artifact: Artifact, files: Any, sizes: Mapping[str, int]) -> None:
    """Hold each file against its recorded size and digest, and each graph against the rest."""
    folder = artifact.folder
    graphs = _graphs(artifact, sizes)
    for name, expected in files.items():
        if not isinstance(expected, dict) or sizes[name] != expected.get("bytes"):
            raise ArtifactError(f"{folder / name} was changed or damaged after the export; export the model again")
        content = read_file(folder, name, MOST_BYTES) if name in graphs else None
        if content is not None:
            digest = hashlib.sha256(content).hexdigest()
        else:
            with open_file(folder, name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type] # a BinaryIO will do
        if digest != expected.get("sha256"):
            raise ArtifactError(f"{folder / name} was changed or damaged after the export; export the model again")
        if content is not None:
            check_graph(folder / name, content, graphs[name])


def _graphs(artifact: Artifact, sizes: Mapping[str, int]) -> dict[str, Expected]:
    """Say what inputs and outputs the artifact's graphs have: `EncoderGraph` and `AttentionGraph` of `model.graphs`."""
    hidden, heads = artifact.hidden_size, artifact.num_attention_heads
    inputs = {name: Port(INT64, (None,) if name == "state_rows" else (None, None)) for name in artifact.inputs}
    pooled = {f"pooled_{name}": Port(FLOAT, (None, artifact.pooled_size(name))) for name in artifact.poolings}
    last = {"last_hidden_state": Port(FLOAT, (None, None, hidden))}
    states = {"hidden_states": Port(FLOAT, (artifact.num_hidden_layers + 1, None, None, hidden))}
    looked = {"hidden_state": last["last_hidden_state"], "attention_mask": Port(INT64, (None, None))}
    weights = {name: Port(FLOAT, tuple(place["shape"])) for name, place in artifact.attention_weights[0].items()}
    vectors = Port(FLOAT, (None, heads, None, artifact.head_dim))
    seen = {"attention": Port(FLOAT, (None, heads, None, None)), "query_vectors": vectors, "key_vectors": vectors}
    plain = (WEIGHTS_FILE, sizes[WEIGHTS_FILE])
    graphs = {
        "encode.onnx": Expected(inputs, {**last, **pooled, **states}, *plain),
        "attention.onnx": Expected({**looked, **weights}, seen, *plain),
    }
    if LONG_GRAPH in sizes:
        graphs[LONG_GRAPH] = graphs["encode.onnx"]
    if artifact.decoder is not None:
        graphs[DECODER_GRAPH] = Expected(*decoder_ports(artifact.decoder, hidden), *plain)
    if CUDA_WEIGHTS in sizes:
        own = f"pooled_{artifact.pooling}"
        without = {name: port for name, port in inputs.items() if name != "state_rows"}
        fused = (CUDA_WEIGHTS, sizes[CUDA_WEIGHTS])
        graphs[CUDA_GRAPH] = Expected(without, {**last, **pooled}, *fused)
        graphs[CUDA_POOLED_GRAPH] = Expected(without, {**last, own: pooled[own]}, *fused)
    return graphs
