"""EncoderConfig: everything that decides what the encoder computes, and nothing else.

`EncoderConfig.from_hf` reads a Hugging Face `config.json` and refuses, by the field's name,
whatever would make the encoder compute something other than the checkpoint was trained for.
May import: errors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_new", "relu")
FAMILIES = ("bert",)

# Config fields that ask for another computation than the encoder's, with the values that do not.
_REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes and choices of one encoder, in Hugging Face's names.

    Attributes:
        family: Key of the checkpoint's rename table, for instance `bert`.
        vocab_size: Rows of the token embedding.
        hidden_size: Width of every hidden state (`hidden` in shapes).
        num_hidden_layers: Encoder layers.
        num_attention_heads: Heads of each layer (`heads` in shapes).
        intermediate_size: Inner width of the feed-forward block.
        hidden_act: Activation of the feed-forward block, one of `ACTIVATIONS`.
        max_position_embeddings: Rows of the position embedding, so the longest sequence in tokens.
        type_vocab_size: Rows of the segment embedding.
        layer_norm_eps: Epsilon inside every LayerNorm.
        pad_token_id: Token id that fills padded places.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    pad_token_id: int

    def __post_init__(self) -> None:
        """Check what must hold between the fields.

        Raises:
            CheckpointError: A size is below 1, `hidden_size` does not divide into the heads, or a number
                is outside its range.
        """
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise CheckpointError(f"config field {name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.layer_norm_eps < math.inf:
            raise CheckpointError(
                f"config field layer_norm_eps must be finite and not below 0, got {self.layer_norm_eps}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(
                f"config field hidden_size={self.hidden_size} is not divisible by "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if not 0 <= self.pad_token_id < self.vocab_size:
            raise CheckpointError(
                f"config field pad_token_id={self.pad_token_id} is outside the vocabulary of {self.vocab_size}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head's query, key and value vectors."""
        return self.hidden_size // self.num_attention_heads

    @property
    def max_tokens(self) -> int:
        """Longest sequence in tokens, special tokens included."""
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "EncoderConfig":
        """Read a parsed Hugging Face `config.json`.

        Args:
            raw: The parsed JSON object.

        Returns:
            The encoder's configuration.

        Raises:
            CheckpointError: The family is not supported, a field is missing or of the wrong type,
                or a field asks for a computation that the encoder does not do.
        """
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise CheckpointError(f"config field model_type is {family!r}; supported families: {', '.join(FAMILIES)}")
        for name, accepted in _REFUSED_UNLESS.items():
            if raw.get(name) not in accepted:
                raise CheckpointError(f"config field {name}={raw[name]!r} is not supported by the encoder")
        activation = raw.get("hidden_act")
        if activation not in ACTIVATIONS:
            raise CheckpointError(
                f"config field hidden_act is {activation!r}; supported activations: {', '.join(ACTIVATIONS)}"
            )
        sizes = {name: _integer(raw, name) for name in _SIZES}
        return cls(
            family=family,
            hidden_act=activation,
            layer_norm_eps=_number(raw, "layer_norm_eps", default=1e-12),
            pad_token_id=_integer(raw, "pad_token_id", default=0),
            **sizes,
        )


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config field {name} must be a whole number, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config field {name} must be a number, got {value!r}")
    return float(value)
