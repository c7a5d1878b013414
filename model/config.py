"""EncoderConfig: everything that decides what the encoder computes, and nothing else.

One `Encoder` serves every family; what a family is follows from these fields alone. They are filled from
a Hugging Face `config.json` by `model.families`. May import: errors.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from model.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "tanh")
_MOST_DISTANCE = 1 << 24  # no sequence is as long
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
        projection_first: Whether embeddings are projected, without a bias, before they are normalized.
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
        pos_att_type: Position terms of disentangled attention, of `c2p` and `p2c`; it counts them in its scale.
        max_relative_positions: Distance from which on they see no difference; 0 where attention is not disentangled.
        position_buckets: Buckets of distance on either side; 0 where each distance has a vector of its own.
        share_att_key: Whether relative positions are projected as the content is; else by maps of their own.
        norm_rel_ebd: Whether the vectors of relative positions are normalized.
        conv_kernel_size: Tokens that the convolution beside the first layer spans; 0 for none.
        conv_groups: Groups of its channels.
        conv_act: Its activation, one of `ACTIVATIONS`.
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
    projection_first: bool = False
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
    pos_att_type: tuple[str, ...] = ()
    max_relative_positions: int = 0
    position_buckets: int = 0
    share_att_key: bool = False
    norm_rel_ebd: bool = False
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"
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

        self._check_disentangled()

    def _check_disentangled(self) -> None:
        """Check what distances are counted in, and what the convolution spans."""
        longest, exact = self.max_relative_positions, self.position_buckets // 2
        if longest > _MOST_DISTANCE:
            raise CheckpointError(
                f"config field max_relative_positions must be at most {_MOST_DISTANCE}, got {longest}"
            )
        if self.position_buckets and not 1 <= exact < longest - 1:
            raise CheckpointError(
                f"config field position_buckets={self.position_buckets} must be at least 2 and below "
                f"2 * (max_relative_positions={longest} - 1)"
            )
        if self.conv_kernel_size and self.conv_kernel_size % 2 == 0:
            raise CheckpointError(f"config field conv_kernel_size must be odd, got {self.conv_kernel_size}")
        if self.hidden_size % self.conv_groups:
            raise CheckpointError(
                f"config field conv_groups={self.conv_groups} does not divide hidden_size={self.hidden_size}"
            )

    @property
    def disentangled(self) -> bool:
        """Whether scores hold terms of content against position (He et al. 2021)."""
        return bool(self.pos_att_type or self.max_relative_positions)

    @property
    def fusible(self) -> bool:
        """Whether the operators of `model.fused` can express what it computes."""
        return not (self.disentangled or self.conv_kernel_size or self.rotary)

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
