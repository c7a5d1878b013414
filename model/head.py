"""Head: what a sentence-transformers folder puts behind the encoder to make one vector.

Poolings side by side, then dense layers (Reimers and Gurevych 2019, section 3, and the library's modules).
A plain folder has mean pooling alone. May import: checkpoint, pooling, errors, torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from model.checkpoint import read_json, read_tensors
from model.errors import CheckpointError
from model.pooling import POOLINGS

# sentence-transformers' pooling flags, and its newer one-word names, to ours, in its order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES = {"cls": "cls", "max": "max", "mean": "mean", "lasttoken": "last"}
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "GELU": nn.GELU,
    "Identity": nn.Identity,
    "ReLU": nn.ReLU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
}
_DENSE_FIELDS = {
    "in_features",
    "out_features",
    "bias",
    "activation_function",
    "module_input_name",
    "module_output_name",
}


class Normalize(nn.Module):
    """Scale vectors to length 1, between other modules."""

    def forward(self, vector: Tensor) -> Tensor:
        """Normalize (batch, dim)."""
        return nn.functional.normalize(vector, dim=-1)


class SentenceHead(nn.Module):
    """Poolings side by side, then modules from vector to vector."""

    def __init__(self, poolings: Sequence[str], modules: Sequence[nn.Module] = ()) -> None:
        """Take the names of the poolings, in order, and the modules behind them."""
        super().__init__()
        self.poolings = tuple(poolings)
        self.modules_behind = nn.ModuleList(modules)
        self.eval().requires_grad_(requires_grad=False)

    @property
    def pooling(self) -> str:
        """Name the pooling if it is all there is, else `sentence`."""
        return self.poolings[0] if len(self.poolings) == 1 and not len(self.modules_behind) else "sentence"

    def size(self, hidden_size: int) -> int:
        """Give the width of the vectors."""
        widths = [module.out_features for module in self.modules() if isinstance(module, nn.Linear)]
        return widths[-1] if widths else hidden_size * len(self.poolings)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Make vectors: (batch, seq, hidden), (batch, seq) -> (batch, dim)."""
        vector = torch.cat([POOLINGS[name](hidden, mask) for name in self.poolings], dim=-1)
        for module in self.modules_behind:
            vector = module(vector)
        return vector


def read_poolings(path: Path) -> tuple[list[str], bool]:
    """Read a pooling module's config: its modes in order, and whether a prompt's tokens are pooled too.

    Raises:
        CheckpointError: A mode that is not supported, or none.
    """
    raw = read_json(path)
    named = raw.get("pooling_mode")
    if named is not None:
        modes = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    else:
        on = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
        modes = sorted(on, key=lambda name: list(_POOLING_FLAGS).index(name) if name in _POOLING_FLAGS else -1)
    ours = [_POOLING_NAMES.get(mode) or _POOLING_FLAGS.get(mode) for mode in modes]
    known = [name for name in ours if name]
    if not modes or len(known) < len(ours):
        supported = ", ".join(_POOLING_NAMES)
        raise CheckpointError(f"{path} asks for pooling {' + '.join(modes) or 'none'}; supported: {supported}")
    return known, raw.get("include_prompt") is not False


def read_dense(folder: Path, width: int) -> nn.Module:
    """Read a dense module's folder: linear map and activation.

    Args:
        folder: Holds its config.json and weights.
        width: Width of the vectors that come in.

    Raises:
        CheckpointError: It is of another width, or asks for what is not supported.
    """
    raw = read_json(folder / "config.json")
    unknown = {name for name, value in raw.items() if name not in _DENSE_FIELDS and value not in (None, False)}
    path = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = path.rsplit(".", 1)[-1]  # sentence-transformers trusts torch's own alone
    inputs = [raw.get(key) for key in ("module_input_name", "module_output_name")]
    others = [value for value in inputs if value not in (None, "sentence_embedding")]
    if unknown or others or not path.startswith("torch.") or name not in _ACTIVATIONS:
        what = sorted(unknown) or others or f"activation_function {path}"
        raise CheckpointError(f"{folder}/config.json asks for {what}, which is not supported")
    if raw.get("in_features") != width:
        raise CheckpointError(
            f"{folder}/config.json takes vectors of {raw.get('in_features')}, the module before it gives {width}"
        )
    out, bias = raw.get("out_features"), raw.get("bias", True)
    found = read_tensors(folder)
    shapes = {key: tuple(tensor.shape) for key, tensor in found.items()}
    if shapes != {"linear.weight": (out, width), **({"linear.bias": (out,)} if bias else {})}:
        raise CheckpointError(f"{folder} holds the tensors {shapes}, which do not fit its config.json")
    linear = nn.Linear(width, found["linear.weight"].shape[0], bias=bool(bias))
    linear.load_state_dict({key.removeprefix("linear."): tensor for key, tensor in found.items()})
    return nn.Sequential(linear, _ACTIVATIONS[name]())
