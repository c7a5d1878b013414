"""The decoder of an encoder-decoder, for what it looks at in the source: nothing is generated.

A target's tokens are given (teacher forcing), all at once: at each place the decoder sees the tokens before it and the
whole source (Vaswani et al. 2017, section 3.1 and figure 1). Built of the encoder's own parts.
May import: config, embeddings, attention, encoder, masks, norms, torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import DecoderConfig, EncoderConfig
from model.embeddings import Embeddings
from model.encoder import FeedForward, make_attention
from model.masks import RelativePositionBias, additive, causal_mask, padding_mask
from model.norms import make_norm


class DecoderOutput(NamedTuple):
    """What one forward pass yields.

    Attributes:
        last_hidden_state: (batch, target, hidden) float32.
        cross_attentions: For each layer (batch, heads, target, seq) float32; rows sum to 1 over the source's tokens.
    """

    last_hidden_state: Tensor
    cross_attentions: tuple[Tensor, ...]


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward, each added to its input, normalized before or after."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create the three sublayers and their norms."""
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = make_attention(config)
        self.attention_norm = make_norm(config, config.hidden_size)
        self.cross_attention = make_attention(config)
        self.cross_attention_norm = make_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = make_norm(config, config.hidden_size)

    def forward(
        self, hidden: Tensor, encoder_hidden_states: Tensor, causal: Tensor, position_bias: Tensor | None, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Transform one hidden state of the target into the next.

        Shape:
            hidden: (batch, target, hidden); encoder_hidden_states: (batch, seq, hidden)
            causal, position_bias: broadcast to (batch, heads, target, target); mask: to (batch, heads, target, seq)
            returns: (batch, target, hidden), cross-attention weights (batch, heads, target, seq)
        """
        attended = self.attention(self._before(self.attention_norm, hidden), causal, position_bias=position_bias)
        hidden = self._behind(self.attention_norm, hidden + attended.output)
        looked = self.cross_attention(
            self._before(self.cross_attention_norm, hidden),
            mask,
            key_value_states=encoder_hidden_states,
            output_attentions=True,
        )
        hidden = self._behind(self.cross_attention_norm, hidden + looked.output)
        inner = self.feed_forward(self._before(self.feed_forward_norm, hidden))
        return self._behind(self.feed_forward_norm, hidden + inner), looked.weights

    def _before(self, norm: nn.Module, hidden: Tensor) -> Tensor:
        """Normalize a sublayer's input where norms stand before."""
        return norm(hidden) if self.pre_norm else hidden

    def _behind(self, norm: nn.Module, hidden: Tensor) -> Tensor:
        """Normalize the sum of a sublayer's input and output where norms stand behind."""
        return hidden if self.pre_norm else norm(hidden)


class Decoder(nn.Module):
    """A whole decoder, its behaviour decided by its config alone."""

    def __init__(self, config: DecoderConfig) -> None:
        """Create embeddings and layers, in evaluation mode."""
        super().__init__()
        self.config = config
        stack = config.stack
        self.embeddings = Embeddings(stack)
        buckets, distance = stack.relative_attention_num_buckets, stack.relative_attention_max_distance
        self.position_bias = (
            RelativePositionBias(buckets, distance, stack.num_attention_heads, bidirectional=False) if buckets else None
        )
        self.layers = nn.ModuleList(DecoderLayer(stack) for _ in range(stack.num_hidden_layers))
        self.final_norm = make_norm(stack, stack.hidden_size) if stack.pre_norm else None
        self.eval()

    def forward(
        self, decoder_input_ids: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor
    ) -> DecoderOutput:
        """Read a batch of targets beside their sources.

        Padding of the targets must be on the right: no place before it looks there.

        Shape:
            decoder_input_ids: (batch, target) int64, the start token and then each token but the last
            encoder_hidden_states: (batch, seq, hidden) float32, the encoder's last
            attention_mask: (batch, seq) int64 of the sources, 1 = token, 0 = padding
        """
        hidden = self.embeddings(decoder_input_ids, None)  # (batch, target, hidden)
        target = decoder_input_ids.shape[1]
        causal = additive(causal_mask(target, target), hidden.dtype)  # (target, target)
        position_bias = None if self.position_bias is None else self.position_bias(target, target)
        mask = additive(padding_mask(attention_mask), hidden.dtype)  # (batch, 1, 1, seq)
        cross_attentions = []
        for layer in self.layers:
            hidden, weights = layer(hidden, encoder_hidden_states, causal, position_bias, mask)
            cross_attentions.append(weights)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return DecoderOutput(hidden, tuple(cross_attentions))


def shift_right(labels: Tensor, start_token_id: int) -> Tensor:
    """Give what the decoder reads to predict some tokens: the start token, then each but the last.

    Shape:
        labels: (batch, target) int64, padded on the right
        returns: the same
    """
    return torch.cat([torch.full_like(labels[:, :1], start_token_id), labels[:, :-1]], dim=1)
