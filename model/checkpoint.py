"""Checkpoints: a published folder of weights to an `Encoder`, and a `Decoder` beside it, of exactly those numbers.

What differs between families is one table of names each (data, not code). Loading is strict: every
missing, unexpected or misshapen tensor is named in one error. Nothing from a checkpoint is executed:
safetensors come first, and pickled weights are read with `weights_only`. Nothing is set aside because a file
declares it: what a config or a tensor asks for is held to the files' sizes first.
May import: config, confined, decoder, embeddings, encoder, families, errors, torch, safetensors.
"""

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model.config import EncoderConfig
from model.confined import MOST_JSON_BYTES, plain_file, refuse_code
from model.decoder import Decoder
from model.embeddings import sinusoids
from model.encoder import Encoder
from model.errors import CheckpointError, first_line
from model.families import FAMILIES, Family, read_config, read_decoder_config

Stack = TypeVar("Stack", Encoder, Decoder)

# TensorFlow's names for a LayerNorm's weight and bias, in the oldest checkpoints.
_OLD_NORM = {"gamma": "weight", "beta": "bias"}
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_HARMLESS_NUMBERS = 1 << 24  # that a config may ask for: what is missing of so few is named one by one


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file whose top level is of one kind, an object unless told.

    Raises:
        CheckpointError: The file is absent, is not JSON, or is of another kind.
    """
    try:
        parsed = json.loads(plain_file(path, MOST_JSON_BYTES).read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except CheckpointError:
        raise
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(parsed, kind):
        raise CheckpointError(f"{path} must hold a JSON {kind.__name__}, got {type(parsed).__name__}")
    return parsed


def load_encoder(folder: Path) -> Encoder:
    """Load the encoder of a Hugging Face folder in float32.

    Args:
        folder: Holds `config.json` and weights: safetensors or `.bin`, one file or sharded.

    Returns:
        The encoder, in evaluation mode, with the checkpoint's weights.

    Raises:
        CheckpointError: The config is not supported, or a file or tensor is not what it must be.
    """
    raw = read_json(folder / "config.json")
    family = FAMILIES.get(str(raw.get("model_type")))
    refuse_code(folder / "config.json", raw, family.code if family else ())
    config = read_config(raw)
    encoder = _hollow(folder, lambda: Encoder(config))
    encoder.load_state_dict(_read_state(folder, config, FAMILIES[config.family], encoder.state_dict()), assign=True)
    return encoder.requires_grad_(requires_grad=False)


def load_decoder(folder: Path, encoder: Encoder) -> Decoder | None:
    """Load the decoder that lies beside an encoder.

    Args:
        folder: What `load_encoder` took.
        encoder: What it gave; a token table that is the same on both sides is held once.

    Returns:
        The decoder, in evaluation mode; None where the folder's weights have none.

    Raises:
        CheckpointError: As `load_encoder`.
    """
    family = FAMILIES[encoder.config.family].decoder
    if family is None:
        return None
    files = _weight_files(folder)
    inner = _prefix(files, family) + "decoder."
    if not any(name.startswith(inner) for path in files for name in _names(path)):
        return None
    config = read_decoder_config(read_json(folder / "config.json"))
    decoder = _hollow(folder, lambda: Decoder(config))
    state = _read_state(folder, config.stack, family, decoder.state_dict())
    table = encoder.embeddings.token.weight
    if torch.equal(table, state["embeddings.token.weight"]):
        state["embeddings.token.weight"] = table
    decoder.load_state_dict(state, assign=True)
    return decoder.requires_grad_(requires_grad=False)


def _hollow(folder: Path, make: Callable[[], Stack]) -> Stack:
    """Make a module of shapes without memory; the checkpoint's tensors take their places."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{folder}/config.json has sizes that no tensor can have: {first_line(error)}") from error


def rename(name: str, family: Family) -> tuple[str, ...]:
    """Give our names of a checkpoint's tensor, one for each equal part; none when no row of the family's table has it.

    A tensor is one of ours, as a rule.
    """
    stem, _, last = name.rpartition(".")
    name = f"{stem}.{_OLD_NORM.get(last, last)}"
    for source, target in family.names.items():
        if match := re.fullmatch(_pattern(source), name):
            targets = (target,) if isinstance(target, str) else target
            return tuple(part.format(**match.groupdict()) for part in targets)
    return ()


def _pattern(name: str) -> str:
    """Give a regular expression for a name of a rename table."""
    pattern = re.escape(name).replace(r"\{p\}", "(?P<p>weight|bias)")
    return re.sub(r"\\\{([nm])\\\}", r"(?P<\1>\\d+)", pattern)


def _read_state(
    folder: Path, config: EncoderConfig, family: Family, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Read every tensor of `expected` from the folder, or name all that is wrong in one error."""
    files = _weight_files(folder)
    prefix = _prefix(files, family)
    held = sum(path.stat().st_size for path in files)
    asked = sum(tensor.numel() for tensor in expected.values())
    if asked > max(held, _HARMLESS_NUMBERS):  # the narrowest have a byte
        listed = ", ".join(path.name for path in files)
        raise CheckpointError(f"{folder}/config.json asks for {asked} numbers, but {listed} has {held} bytes")
    state: dict[str, Tensor] = {}
    faults: list[str] = []
    for path in files:
        for name, tensor in _tensors(path):
            ours = rename(name.removeprefix(prefix), family)
            if not name.startswith(prefix) or _left(name.removeprefix(prefix), ours, family, expected):
                continue
            if not ours or not expected.keys() >= set(ours):
                faults.append(f"unexpected tensor {name} {tuple(tensor.shape)}")
            elif fault := _tensor_fault(name, tensor, _whole(expected, ours)):
                faults.append(fault)
            else:
                parts = dict(zip(ours, tensor.to(torch.float32).chunk(len(ours)), strict=True))
                if any(part in state and not torch.equal(state[part], parts[part]) for part in ours):
                    faults.append(f"duplicate tensor {name} {tuple(tensor.shape)}")
                state |= {part: numbers.contiguous() for part, numbers in parts.items()}
    if config.sinusoidal:
        state.setdefault("embeddings.position.weight", sinusoids(config.max_position_embeddings, config.embedding_size))
    named = {fault.split()[2] for fault in faults}
    faults += [
        f"missing tensor {' or '.join(theirs)} {tuple(tensor.shape)}"
        for ours, tensor in expected.items()
        if ours not in state and named.isdisjoint(theirs := _their_names(ours, family, prefix))
    ]
    if faults:
        raise CheckpointError(f"{folder} does not fit its config.json: {_listing(faults)}")
    return state


def _left(name: str, ours: tuple[str, ...], family: Family, expected: Mapping[str, Tensor]) -> bool:
    """Tell whether a tensor changes nothing that is computed: one of a head, or one the config has no use for."""
    if not ours:
        return name.startswith(family.ignored)
    return not expected.keys() >= set(ours) and name.startswith(family.spare)


def _whole(expected: Mapping[str, Tensor], ours: tuple[str, ...]) -> Tensor:
    """Give the shape, as a tensor without numbers, of one that holds some of ours."""
    first = expected[ours[0]]
    return first if len(ours) == 1 else first.new_empty((first.shape[0] * len(ours), *first.shape[1:]), device="meta")


def _tensor_fault(name: str, tensor: Tensor, expected: Tensor) -> str | None:
    """Say what is wrong with a tensor, None when it is as it must be."""
    if kind := _unusual_kind(tensor):
        return f"mistyped tensor {name} {kind}"
    if tensor.shape != expected.shape:
        return f"misshapen tensor {name} {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # one number may pose as any number of them
        return f"hollow tensor {name} {tuple(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes"
    if not bool(torch.isfinite(tensor.to(torch.float32)).all()):
        return f"broken tensor {name} with NaN or infinity"
    return None


def _unusual_kind(tensor: Tensor) -> str | None:
    """Say of what kind a tensor is that holds no plain floating point numbers, None when it does."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested or tensor.device.type != "cpu":
        return f"{type(tensor).__name__} on {tensor.device.type}, expected plain numbers"
    if tensor.layout != torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')}, expected dense"
    if not tensor.is_floating_point():
        return f"{str(tensor.dtype).removeprefix('torch.')}, expected floating point"
    return None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder's weights in float32.

    Raises:
        CheckpointError: There are none, or a file or tensor is broken.
    """
    files = _weight_files(folder)
    found = {name: tensor for path in files for name, tensor in _tensors(path)}
    if sum(tensor.nbytes for tensor in found.values()) > sum(path.stat().st_size for path in files):
        raise CheckpointError(f"{folder} has tensors of more bytes than its files")
    for name, tensor in found.items():
        if fault := _tensor_fault(name, tensor, tensor):
            raise CheckpointError(f"{folder}: {fault}")
    return {name: tensor.to(torch.float32).contiguous() for name, tensor in found.items()}


def _weight_files(folder: Path) -> list[Path]:
    """List the weight files: safetensors before pickles, one file before shards."""
    for single, index in zip(_WEIGHT_FILES, _INDEX_FILES, strict=True):
        if (folder / single).is_file():
            return [plain_file(folder / single)]
        if (folder / index).is_file():
            return _shards(folder, index)
    expected = ", ".join(_WEIGHT_FILES + _INDEX_FILES)
    raise CheckpointError(f"{folder} holds no weights; expected one of {expected}")


def _shards(folder: Path, index: str) -> list[Path]:
    """List the shards that an index names, each a file beside it."""
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / index} has no weight_map from tensor to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder / index} names the shard {name!r}, which is not in the folder")
    return [plain_file(folder / name) for name in names]


def _prefix(files: list[Path], family: Family) -> str:
    """Give the prefix of the encoder's tensors: the family's own where any tensor carries it."""
    found = any(name.startswith(family.prefix) for path in files for name in _names(path))
    return family.prefix if found else ""


def _names(path: Path) -> list[str]:
    """List a weight file's tensors without reading them where the format allows."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError, RuntimeError) as error:  # the last from where it cannot be mapped
            raise CheckpointError(f"{path} is not a readable weights file: {first_line(error)}") from error
    return list(_load_pickle(path))


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight file's tensors by name, one in memory at a time where the format allows."""
    if path.suffix == ".safetensors":
        for name in _names(path):
            with safe_open(path, framework="pt") as file:
                yield name, file.get_tensor(name)
    else:
        yield from _load_pickle(path).items()


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """Read a `.bin` file, refusing any code in it."""
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            _refuse_packed(path)
        with warnings.catch_warnings(action="ignore"):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # whose words advise to run it
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise CheckpointError(
            f"{path} is not a readable weights file: it holds more than plain tensors{what}, which may be code and is "
            "never run; take the checkpoint's safetensors"
        ) from error
    except Exception as error:  # pickle, zipfile and torch raise many kinds for damaged or refused bytes
        raise CheckpointError(f"{path} is not a readable weights file: {first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} must hold named tensors, got {type(loaded).__name__}")
    return {name: tensor for name, tensor in loaded.items() if isinstance(name, str) and isinstance(tensor, Tensor)}


def _refuse_packed(path: Path) -> None:
    """Refuse an archive that holds less than it says: torch packs nothing, and unpacks whatever it is given."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise CheckpointError(f"{path} is packed, or holds less than it says; weights are saved as they are")


def _their_names(ours: str, family: Family, prefix: str) -> list[str]:
    """Give the names that one of our tensors may have in a checkpoint."""
    names = [
        prefix + source.format(**match.groupdict())
        for source, target in family.names.items()
        for part in ((target,) if isinstance(target, str) else target)
        if (match := re.fullmatch(_pattern(part), ours))
    ]
    assert names, f"no row of the family's rename table makes {ours}"
    return names


def _listing(faults: list[str], most: int = 12) -> str:
    rest = len(faults) - most
    return "; ".join(faults[:most]) + (f"; and {rest} more" if rest > 0 else "")
