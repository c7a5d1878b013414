"""EncoderConfig: everything that decides what the encoder computes, and nothing else.

One `Encoder` serves every family; what a family is follows from these fields alone. They are filled from
a Hugging Face `config.json` by `model.families`. May import: errors.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from model.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
_MOST_LAYERS = 1000  # far above any published encoder's; a broken number must not build modules for hours


class Rotary(NamedTuple):
    """How fast rotary positions turn.

    Attributes:
        base: The slowest pair turns by about 1 / base a place.
        divisor: What every angle is divided by.
    """

    base: float
    divisor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes and choices of one encoder, in Hugging Face's names where it has one.

    Attributes:
        family: Key of the checkpoint's rename table, for instance `bert`.
        vocab_size: Rows of the token embedding.
        embedding_size: Width of the embeddings; one that differs from `hidden_size` is projected to it.
        hidden_size: Width of every hidden state (`hidden` in shapes).
        num_hidden_layers: Encoder layers that a text runs through.
        num_hidden_groups: Groups of layers that share their weights: each stands for the same number of neighbours
            (ALBERT). 0 where every layer has its own.
        inner_group_num: Layers of one group, which run one after the other.
        num_attention_heads: Heads of each layer (`heads` in shapes).
        head_dim: Width of one head's query, key and value vectors.
        intermediate_size: Inner width of the feed-forward block.
        hidden_act: Activation of the feed-forward block, one of `ACTIVATIONS`.
        gated: Whether the feed-forward block multiplies its activation by a second projection.
        max_position_embeddings: Rows of the position embedding; 0 where there is none.
        position_offset: Place of the first token in the position embedding. Above 0 positions count tokens
            only, so that padding takes none (RoBERTa: padding index + 1).
        padding_takes_places: Whether padding is counted all the same (BART).
        sinusoidal: Whether the position embedding is the fixed one of sines, which a checkpoint may leave out.
        type_vocab_size: Rows of the segment embedding; 0 where there is none.
        embedding_projection: Whether embeddings are projected even where the widths are equal.
        embedding_scale: Factor of the token embeddings.
        embedding_norm: Whether the embeddings are normalized.
        norm: `layer` (Ba et al. 2016) or `rms` (Zhang and Sennrich 2019).
        norm_eps: Epsilon inside every norm.
        pre_norm: Whether norms stand before the sublayers, with one more behind the last layer.
        first_norm: Whether a norm stands before the first layer's attention too, where norms stand before.
        norm_bias: Whether norms have one.
        bias: Whether linear maps have one, unless the next two say otherwise.
        intermediate_bias: Whether the first maps of the feed-forward block have one.
        output_bias: Whether its last map has one.
        scaled: Whether attention scores are divided by sqrt(head_dim).
        relative_attention_num_buckets: Buckets of the position bias shared by all layers; 0 for none.
        relative_attention_max_distance: Distance from which on its last bucket holds.
        rotary: Rotary positions of queries and keys; None for none.
        local_rotary: Those of layers with local attention.
        max_rotary_positions: Places that rotary positions are meant for; 0 without them.
        local_layers: Numbers of the layers whose tokens look at their neighbours alone.
        local_reach: How many places away those look at most, to either side.
        pad_token_id: Token id that fills padded places.
    """

    family: str
    vocab_size: int
    embedding_size: int
    hidden_size: int
    num_hidden_layers: int
    num_hidden_groups: int = 0
    inner_group_num: int = 1
    num_attention_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    gated: bool = False
    max_position_embeddings: int
    position_offset: int = 0
    padding_takes_places: bool = False
    sinusoidal: bool = False
    type_vocab_size: int
    embedding_projection: bool = False
    embedding_scale: float = 1.0
    embedding_norm: bool = True
    norm: str = "layer"
    norm_eps: float
    pre_norm: bool = False
    first_norm: bool = True
    norm_bias: bool = True
    bias: bool = True
    intermediate_bias: bool | None = None
    output_bias: bool | None = None
    scaled: bool = True
    relative_attention_num_buckets: int = 0
    relative_attention_max_distance: int = 128
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None
    max_rotary_positions: int = 0
    local_layers: frozenset[int] = frozenset()
    local_reach: int = 0
    pad_token_id: int

    def __post_init__(self) -> None:
        """Check what must hold between the fields.

        Raises:
            CheckpointError: A number is outside its range.
        """
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise CheckpointError(f"config field {name} must be at least 1, got {getattr(self, name)}")
        if self.num_hidden_layers > _MOST_LAYERS:
            raise CheckpointError(
                f"config field num_hidden_layers must be at most {_MOST_LAYERS}, got {self.num_hidden_layers}"
            )
        if not 0 <= self.norm_eps < math.inf:
            raise CheckpointError(f"config field layer_norm_eps must be finite and not below 0, got {self.norm_eps}")
        if self.hidden_act not in ACTIVATIONS:
            raise CheckpointError(
                f"the activation {self.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        if not 0 <= self.pad_token_id < self.vocab_size:
            raise CheckpointError(
                f"config field pad_token_id={self.pad_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        if self.max_position_embeddings and self.max_position_embeddings <= self.position_offset:
            raise CheckpointError(
                f"config field max_position_embeddings={self.max_position_embeddings} leaves no place for a token"
            )
        if self.rotary and self.head_dim % 2:
            raise CheckpointError(f"rotary positions turn pairs of numbers: head_dim={self.head_dim} must be even")
        exact = self.relative_attention_num_buckets // 4  # distances with a bucket of their own, on each side
        if self.relative_attention_num_buckets and not 1 <= exact < self.relative_attention_max_distance:
            raise CheckpointError(
                f"config field relative_attention_num_buckets={self.relative_attention_num_buckets} must be at least 4 "
                f"and below 4 * relative_attention_max_distance={self.relative_attention_max_distance}"
            )

    @property
    def max_tokens(self) -> int | None:
        """Longest sequence in tokens, special tokens included; None where positions set no limit."""
        if self.max_position_embeddings:
            return self.max_position_embeddings - self.position_offset
        return self.max_rotary_positions or None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of the decoder of an encoder-decoder.

    Attributes:
        stack: What decides its embeddings and layers, by the same names as an encoder's.
        start_token_id: Stands before a target's tokens.
        eos_token_id: Ends a target.
    """

    stack: EncoderConfig
    start_token_id: int
    eos_token_id: int

    def __post_init__(self) -> None:
        """Check what must hold between the fields.

        Raises:
            CheckpointError: A number is outside its range.
        """
        stack = self.stack
        for name, value in (("decoder_start_token_id", self.start_token_id), ("eos_token_id", self.eos_token_id)):
            if not 0 <= value < stack.vocab_size:
                raise CheckpointError(
                    f"config field {name}={value} is outside the decoder's vocabulary of {stack.vocab_size}"
                )
        # A decoder looks back alone, so its distances have twice as many buckets of their own as an encoder's.
        if stack.relative_attention_num_buckets // 2 >= stack.relative_attention_max_distance:
            raise CheckpointError(
                f"config field relative_attention_num_buckets={stack.relative_attention_num_buckets} must be below "
                f"2 * relative_attention_max_distance={stack.relative_attention_max_distance} for the decoder"
            )


_SIZES = (
    "vocab_size",
    "embedding_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
)
