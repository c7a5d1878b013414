"""The encoder: embeddings, then layers of self-attention and feed-forward.

Post-norm residual layers as in Vaswani et al. 2017, section 3.1: LayerNorm(x + Sublayer(x)).
May import: config, embeddings, attention, torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from model.attention import MultiHeadAttention, padding_mask
from model.config import EncoderConfig
from model.embeddings import Embeddings

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # x Phi(x), Hendrycks and Gimpel 2016
    "gelu_new": partial(functional.gelu, approximate="tanh"),  # its tanh approximation, same paper
    "relu": functional.relu,
}


class EncoderOutput(NamedTuple):
    """What one forward pass yields.

    Attributes:
        last_hidden_state: (batch, seq, hidden) float32.
        hidden_states: layers + 1 tensors (batch, seq, hidden), the embeddings' output first; empty
            unless asked for.
        attentions: A tensor (batch, heads, query, key) for each layer; empty unless asked for.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...]
    attentions: tuple[Tensor, ...]


class FeedForward(nn.Module):
    """FFN(x) = act(x W_1 + b_1) W_2 + b_2, the same at every position (section 3.3, equation 2)."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create the two projections."""
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = _ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        output: Tensor = self.output(self.activation(self.intermediate(hidden)))
        return output


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each added to its input and then normalized."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create the two sublayers and their norms."""
        super().__init__()
        self.attention = MultiHeadAttention(config.hidden_size, config.num_attention_heads)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor, mask: Tensor | None, *, output_attentions: bool) -> tuple[Tensor, Tensor | None]:
        """Transform one hidden state into the next.

        Shape:
            hidden: (batch, seq, hidden); mask: additive, broadcasts to (batch, heads, query, key)
            returns: (batch, seq, hidden), weights (batch, heads, query, key) if asked for
        """
        attended, weights = self.attention(hidden, mask, output_attentions=output_attentions)
        hidden = self.attention_norm(hidden + attended)
        hidden = self.feed_forward_norm(hidden + self.feed_forward(hidden))
        return hidden, weights


class Encoder(nn.Module):
    """A whole encoder, its behaviour decided by its config alone."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create embeddings and layers, in evaluation mode."""
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        """Encode a padded batch.

        Shape:
            input_ids, attention_mask (1 = token, 0 = padding), token_type_ids: (batch, seq) int64
        """
        hidden = self.embeddings(input_ids, token_type_ids)  # (batch, seq, hidden)
        mask = padding_mask(attention_mask, hidden.dtype)  # (batch, 1, 1, key)
        hidden_states = [hidden]
        attentions = []
        for layer in self.layers:
            hidden, weights = layer(hidden, mask, output_attentions=output_attentions)
            hidden_states.append(hidden)
            attentions.append(weights)
        return EncoderOutput(
            hidden,
            tuple(hidden_states) if output_hidden_states else (),
            tuple(attentions) if output_attentions else (),
        )
