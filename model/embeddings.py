"""Embeddings: token ids to the first hidden state.

BERT sums a token, a position and a segment vector and normalizes the sum
(Devlin et al. 2018, section 3 and figure 2). May import: config, torch.
"""

import torch
from torch import Tensor, nn

from model.config import EncoderConfig


class Embeddings(nn.Module):
    """Token + position + segment embeddings, then LayerNorm."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create the three tables and the norm."""
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Embed a batch.

        Shape:
            input_ids, token_type_ids: (batch, seq) int64; returns (batch, seq, hidden) float32
        """
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)  # (seq,)
        summed = self.token(input_ids) + self.segment(token_type_ids) + self.position(position_ids)
        normed: Tensor = self.norm(summed)  # (batch, seq, hidden)
        return normed
