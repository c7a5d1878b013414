"""The encoder: embeddings, then layers of self-attention and feed-forward.

Post-norm residual layers are LayerNorm(x + Sublayer(x)) (Vaswani et al. 2017, section 3.1), pre-norm ones
x + Sublayer(Norm(x)) with one more norm at the end (Xiong et al. 2020, figure 1).
May import: config, disentangled, embeddings, attention, masks, norms, torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention import MultiHeadAttention, attention_weights
from model.config import EncoderConfig
from model.disentangled import Convolution, DisentangledAttention, RelativeEmbeddings, RelativePositions
from model.embeddings import Embeddings
from model.masks import RelativePositionBias, additive, padding_mask
from model.norms import make_norm

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


class FeedForward(nn.Module):
    """The same two-layer map at every position (Vaswani et al. 2017, section 3.3, equation 2).

    Plain: act(x W_1 + b_1) W_2 + b_2. Gated: (act(x W_1) * x V) W_2 (Shazeer 2020, equation 6).
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Create the projections."""
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size, config.bias)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, config.bias) if config.gated else None
        self.output = nn.Linear(config.intermediate_size, config.hidden_size, config.bias)
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
        self.attention_norm = make_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = make_norm(config, config.hidden_size)
        convolved = config.conv_kernel_size and number == 0
        self.convolution = Convolution(config, _ACTIVATIONS[config.conv_act]) if convolved else None

    def forward(
        self, hidden: Tensor, mask: Tensor, position_bias: PositionBias | None, *, output_attentions: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Transform one hidden state into the next.

        Shape:
            hidden: (batch, seq, hidden); mask, position_bias: as `Encoder.terms` gives them
            returns: (batch, seq, hidden), weights (batch, heads, query, key) if asked for
        """
        source = self.attention_norm(hidden) if self.pre_norm else hidden
        attended, weights, _ = self.attention(
            source, mask, position_bias=position_bias, output_attentions=output_attentions
        )
        inner = hidden + attended
        if self.pre_norm:
            return inner + self.feed_forward(self.feed_forward_norm(inner)), weights
        inner = self.attention_norm(inner)
        output = self.feed_forward_norm(inner + self.feed_forward(inner))
        return output if self.convolution is None else self.convolution(hidden, output, mask), weights

    def inspect(
        self, hidden: Tensor, mask: Tensor, position_bias: PositionBias | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what this layer's heads look at, given its input, and nothing beyond it.

        Shape:
            hidden, mask, position_bias: as in `forward`
            returns: weights (batch, heads, query, key); queries and keys (batch, heads, seq, head_dim)
        """
        source = self.attention_norm(hidden) if self.pre_norm else hidden
        queries, keys = self.attention.queries_and_keys(source, source)
        scale = self.attention.scale
        if isinstance(position_bias, RelativePositions):
            assert isinstance(self.attention, DisentangledAttention)
            position_bias = self.attention.position_bias(queries, keys, position_bias)
        return attention_weights(queries, keys, mask, scale=scale, position_bias=position_bias), queries, keys


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
        self.layers = nn.ModuleList(EncoderLayer(config, number) for number in range(config.num_hidden_layers))
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
    ) -> EncoderOutput:
        """Encode a padded batch.

        Shape:
            input_ids, attention_mask (1 = token, 0 = padding), token_type_ids: (batch, seq) int64
        """
        hidden = self.embeddings(input_ids, token_type_ids)  # (batch, seq, hidden)
        mask, position_bias = self.terms(attention_mask, hidden.dtype)
        hidden_states = []
        attentions = []
        for layer in self.layers:
            hidden_states.append(hidden)
            hidden, weights = layer(hidden, mask, position_bias, output_attentions=output_attentions)
            attentions.append(weights)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        hidden_states.append(hidden)
        return EncoderOutput(
            hidden,
            tuple(hidden_states) if output_hidden_states else (),
            tuple(attentions) if output_attentions else (),
        )

    def terms(self, attention_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, PositionBias | None]:
        """Give what every layer adds to its scores: the mask (batch, 1, 1, key), and the position bias if there is."""
        seq = attention_mask.shape[1]
        position_bias = None if self.position_bias is None else self.position_bias(seq, seq)
        if self.relative is not None:
            position_bias = self.relative(seq)
        return additive(padding_mask(attention_mask), dtype), position_bias
