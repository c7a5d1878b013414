"""Embeddings: token ids to the first hidden state.

Token, position and segment vectors are summed and normalized (Devlin et al. 2018, section 3 and
figure 2); families leave out what their config leaves out. May import: config, norms, torch.
"""

import torch
from torch import Tensor, nn

from model.config import EncoderConfig
from model.norms import make_norm


class Embeddings(nn.Module):
    """Token + position + segment embeddings, a norm, and a projection where widths differ."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create the tables that the config has."""
        super().__init__()
        width = config.embedding_size
        self.token = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width) if config.max_position_embeddings else None
        self.segment = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.projection_first = config.projection_first
        normed = config.hidden_size if self.projection_first else width
        self.norm = make_norm(config, normed) if config.embedding_norm else None
        projected = config.embedding_projection or width != config.hidden_size
        self.projection = nn.Linear(width, config.hidden_size, not self.projection_first) if projected else None
        self.scale = config.embedding_scale
        self.position_offset = config.position_offset
        self.padding_takes_places = config.padding_takes_places
        self.pad_token_id = config.pad_token_id

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Embed a batch.

        Shape:
            input_ids, token_type_ids: (batch, seq) int64
            returns: (batch, seq, hidden) float32
        """
        hidden: Tensor = self.token(input_ids)  # (batch, seq, embedding)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        if self.segment is not None and token_type_ids is not None:
            hidden = hidden + self.segment(token_type_ids)
        if self.position is not None:
            hidden = hidden + self.position(self._position_ids(input_ids))
        steps = (self.projection, self.norm) if self.projection_first else (self.norm, self.projection)
        for step in steps:
            hidden = hidden if step is None else step(hidden)
        return hidden  # (batch, seq, hidden)

    def _position_ids(self, input_ids: Tensor) -> Tensor:
        """Number the places: all of them, or with an offset only those that do not hold the padding token.

        Those that do, in a text too, get offset - 1, the padding index, as in fairseq's RoBERTa.
        """
        if not self.position_offset or self.padding_takes_places:
            return torch.arange(input_ids.shape[1], device=input_ids.device) + self.position_offset  # (seq,)
        counted = (input_ids != self.pad_token_id).long()  # (batch, seq)
        return counted.cumsum(dim=1) * counted + self.position_offset - 1


def sinusoids(rows: int, width: int) -> Tensor:
    """Compute the fixed position embedding, (rows, width): the sines, and behind them the cosines.

    Vaswani et al. 2017, section 3.5, whose two kinds take turns.
    """
    columns = torch.arange(width, dtype=torch.float64)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] / 10000 ** (
        columns.div(2, rounding_mode="floor") * 2 / width
    )
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=1).float()
