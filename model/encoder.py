"""The encoder: embeddings, then layers of self-attention and feed-forward.

Post-norm residual layers are LayerNorm(x + Sublayer(x)) (Vaswani et al. 2017, section 3.1), pre-norm ones
x + Sublayer(Norm(x)) with one more norm at the end (Xiong et al. 2020, figure 1).
May import: config, disentangled, embeddings, attention, long, masks, norms, rotary, torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention import Attend, MultiHeadAttention, attention_weights
from model.config import EncoderConfig
from model.disentangled import Convolution, DisentangledAttention, RelativeEmbeddings, RelativePositions
from model.embeddings import Embeddings
from model.long import Neighbours, Parts
from model.masks import RelativePositionBias, additive, padding_mask, window_mask
from model.norms import make_norm
from model.rotary import Rotation, inverse_frequencies, rotation

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # x Phi(x), Hendrycks and Gimpel 2016
    "gelu_new": partial(functional.gelu, approximate="tanh"),  # its tanh approximation, same paper
    "relu": functional.relu,
    "silu": functional.silu,  # x sigmoid(x), Elfwing et al. 2017
    "tanh": torch.tanh,
}

PositionBias = Tensor | RelativePositions
"""What every layer is told of distance: numbers (1, heads, query, key), or what it makes its own of."""


class EncoderOutput(NamedTuple):
    """What one forward pass yields.

    Attributes:
        last_hidden_state: (batch, seq, hidden) float32.
        hidden_states: layers + 1 tensors (batch, seq, hidden), the embeddings' output first and the last
            hidden state last; empty unless asked for.
        attentions: A tensor (batch, heads, query, key) for each layer; empty unless asked for.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...]
    attentions: tuple[Tensor, ...]


class Terms(NamedTuple):
    """What every layer of one kind takes beside the hidden state.

    Attributes:
        mask: Additive, broadcasts to (batch, heads, query, key).
        position_bias: Likewise, or what a layer makes it of; None where there is none.
        rotation: Turns queries and keys; None for positions of other kinds.
        attend: Computes attention in place of the whole matrix, for long texts.
    """

    mask: Tensor
    position_bias: PositionBias | None = None
    rotation: Rotation | None = None
    attend: Attend | None = None


class FeedForward(nn.Module):
    """The same two-layer map at every position (Vaswani et al. 2017, section 3.3, equation 2).

    Plain: act(x W_1 + b_1) W_2 + b_2. Gated: (act(x W_1) * x V) W_2 (Shazeer 2020, equation 6).
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Create the projections."""
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        first, last = (config.bias if bias is None else bias for bias in (config.intermediate_bias, config.output_bias))
        self.intermediate = nn.Linear(width, inner, first)
        self.gate = nn.Linear(width, inner, first) if config.gated else None
        self.output = nn.Linear(inner, width, last)
        self.activation = _ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        inner = self.activation(self.intermediate(hidden))  # (batch, seq, intermediate)
        if self.gate is not None:
            inner = inner * self.gate(hidden)
        output: Tensor = self.output(inner)
        return output


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each added to its input, normalized before or after."""

    def __init__(self, config: EncoderConfig, number: int) -> None:
        """Create the two sublayers and their norms, and what the layer of that number, from 0, has besides."""
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = make_attention(config)
        plain = number == 0 and not config.first_norm
        self.attention_norm = nn.Identity() if plain else make_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = make_norm(config, config.hidden_size)
        convolved = config.conv_kernel_size and number == 0
        self.convolution = Convolution(config, _ACTIVATIONS[config.conv_act]) if convolved else None

    def forward(self, hidden: Tensor, terms: Terms, *, output_attentions: bool) -> tuple[Tensor, Tensor | None]:
        """Transform one hidden state into the next.

        Shape:
            hidden: (batch, seq, hidden)
            returns: (batch, seq, hidden), weights (batch, heads, query, key) if asked for
        """
        source = self.attention_norm(hidden) if self.pre_norm else hidden
        attended, weights, _ = self.attention(
            source,
            terms.mask,
            position_bias=terms.position_bias,
            rotation=terms.rotation,
            attend=terms.attend,
            output_attentions=output_attentions,
        )
        inner = hidden + attended
        if self.pre_norm:
            return inner + self.feed_forward(self.feed_forward_norm(inner)), weights
        inner = self.attention_norm(inner)
        output = self.feed_forward_norm(inner + self.feed_forward(inner))
        return output if self.convolution is None else self.convolution(hidden, output, terms.mask), weights

    def inspect(self, hidden: Tensor, terms: Terms, normed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what this layer's heads look at, given its input, and nothing beyond it.

        Args:
            hidden: (batch, seq, hidden).
            terms: As in `forward`.
            normed: (1,) float32, above 0 if the norm before the attention is used; it is when None.

        Shape:
            returns: weights (batch, heads, query, key); queries and keys (batch, heads, seq, head_dim), as multiplied
        """
        source = self.attention_norm(hidden) if self.pre_norm else hidden
        if normed is not None:
            source = torch.where(normed > 0, source, hidden)
        queries, keys = self.attention.queries_and_keys(source, source, terms.rotation)
        scale = self.attention.scale
        position_bias = terms.position_bias
        if isinstance(position_bias, RelativePositions):
            assert isinstance(self.attention, DisentangledAttention)
            position_bias = self.attention.position_bias(queries, keys, position_bias)
        return attention_weights(queries, keys, terms.mask, scale=scale, position_bias=position_bias), queries, keys


def make_attention(config: EncoderConfig) -> MultiHeadAttention:
    """Make the config's kind of self-attention."""
    if config.disentangled:
        return DisentangledAttention(config)
    return MultiHeadAttention(
        config.hidden_size,
        config.num_attention_heads,
        head_dim=config.head_dim,
        bias=config.bias,
        scaled=config.scaled,
    )


class Encoder(nn.Module):
    """A whole encoder, its behaviour decided by its config alone."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create embeddings and layers, in evaluation mode."""
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        buckets = config.relative_attention_num_buckets
        self.position_bias = (
            RelativePositionBias(buckets, config.relative_attention_max_distance, config.num_attention_heads)
            if buckets
            else None
        )
        self.relative = RelativeEmbeddings(config) if config.max_relative_positions else None
        self.layers = nn.ModuleList(
            nn.ModuleList(EncoderLayer(config, number) for _ in range(config.inner_group_num))
            if config.num_hidden_groups
            else EncoderLayer(config, number)
            for number in range(config.num_hidden_groups or config.num_hidden_layers)
        )
        self.final_norm = make_norm(config, config.hidden_size) if config.pre_norm else None
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        long: bool = False,
    ) -> EncoderOutput:
        """Encode a padded batch.

        Args:
            input_ids: (batch, seq) int64.
            attention_mask: 1 = token, 0 = padding, (batch, seq) int64.
            token_type_ids: (batch, seq) int64.
            output_hidden_states: Whether all of them are wanted.
            output_attentions: Whether the weights are wanted; not of long texts.
            long: Whether attention is computed without whole matrices (`model.long`); the values are the same.
        """
        hidden = self.embeddings(input_ids, token_type_ids)  # (batch, seq, hidden)
        terms = self.terms(attention_mask, hidden.dtype, long=long)
        hidden_states = []
        attentions = []
        for number in range(self.config.num_hidden_layers):
            hidden_states.append(hidden)
            kind = terms[number in self.config.local_layers]
            hidden, weights = self.layer(number)(hidden, kind, output_attentions=output_attentions)
            attentions.append(weights)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        hidden_states.append(hidden)
        return EncoderOutput(
            hidden,
            tuple(hidden_states) if output_hidden_states else (),
            tuple(attentions) if output_attentions else (),
        )

    def layer(self, number: int) -> EncoderLayer:
        """Give the layer at a depth, from 0; shared ones stand at several."""
        layer = self.get_submodule(self.layer_name(number))
        assert isinstance(layer, EncoderLayer)
        return layer

    def layer_name(self, number: int) -> str:
        """Name that layer among the encoder's modules."""
        groups, inner = self.config.num_hidden_groups, self.config.inner_group_num
        if not groups:
            return f"layers.{number}"
        repeats = self.config.num_hidden_layers // inner
        return f"layers.{int(number // inner / (repeats / groups))}.{number % inner}"  # as transformers divides

    def frequencies(self, *, local: bool) -> Tensor | None:
        """Give how far a place turns queries and keys of layers of one kind, (head_dim / 2,); None where it does not.

        Local layers are those of `local_layers`.
        """
        rotary = self.config.local_rotary if local else self.config.rotary
        return None if rotary is None else inverse_frequencies(rotary, self.config.head_dim)

    def terms(self, attention_mask: Tensor, dtype: torch.dtype, *, long: bool = False) -> dict[bool, Terms]:
        """Give what layers take beside the hidden state: for global ones by False, for local ones by True."""
        seq = attention_mask.shape[1]
        bias: PositionBias | None = None if self.position_bias is None else self.position_bias(seq, seq)
        if self.relative is not None:
            bias = self.relative(seq)
        kept = padding_mask(attention_mask)
        kinds = {False: Terms(additive(kept, dtype), bias)}
        if self.config.local_layers:
            near = kept & window_mask(seq, seq, self.config.local_reach)
            kinds[True] = Terms(kinds[False].mask if long else additive(near, dtype), bias)
        if long:
            attends: dict[bool, Attend] = {
                False: Parts(kinds[False].mask),
                True: Neighbours(attention_mask, self.config.local_reach),
            }
            kinds = {local: kind._replace(attend=attends[local]) for local, kind in kinds.items()}
        for local, kind in kinds.items():
            if (frequencies := self.frequencies(local=local)) is not None:
                kinds[local] = kind._replace(rotation=rotation(frequencies.to(attention_mask.device), seq))
        return kinds
