"""Disentangled attention: what a token says and where it stands are looked at apart (DeBERTa, He et al. 2021).

    A_ij = Qc_i Kc_j^T + Qc_i Kr_d(i,j)^T + Kc_j Qr_d(i,j)^T      (section 3.1, equation 4)
    H    = softmax(A / sqrt((1 + terms) d)) V

c is a token's content, r a relative position's vector, one for each d(i,j): the distance i - j from key to query,
cut to a span on either side (equation 3), in later versions counted in buckets that grow (DeBERTa-v2's code). The
second term, content to position, is called c2p, the third, position to content, p2c; published weights take the same
d(i,j) in both. The two are a position bias that depends on queries and keys, made without a vector for each pair:
d depends on i - j alone, so a product with the 2 seq distances there are (query, 2 seq) holds all pairs, row by row
one place further to the left. May import: attention, config, norms, torch.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention import AttentionOutput, MultiHeadAttention, merge_heads, scaled_dot_product_attention, split_heads
from model.config import EncoderConfig
from model.norms import make_norm

_LONGEST_TABLE = 1 << 16  # distances; no sequence is longer, whose scores alone would have 16 GiB a head


class RelativePositions(NamedTuple):
    """The vectors of relative positions, and which of them belongs to which distance.

    Attributes:
        vectors: (positions, hidden), what Kr and Qr are projected from.
        key_rows: (2 seq,) int64, for c2p: the row of a query's distance to the key `place - seq` places behind it.
        query_rows: (2 seq,) int64, for p2c: the row of a key's distance to the query `place - seq` places behind it.
    """

    vectors: Tensor
    key_rows: Tensor
    query_rows: Tensor

    def narrowed(self) -> "RelativePositions":
        """Give the same without vectors of distances that do not occur: cheaper where they are projected each time."""
        first, last = (
            self.query_rows[0],
            self.key_rows[0],
        )  # of the two longest distances, which have the outermost rows
        used = torch.arange(first, last + 1, device=first.device)  # type: ignore[call-overload] # numbers as tensors
        kept = self.vectors[used]
        return RelativePositions(kept, self.key_rows - first, self.query_rows - first)


def log_buckets(num_buckets: int, max_distance: int) -> Tensor:
    """Number distances from 0: near ones are their own number, far ones share buckets that grow with them.

    The formula is that of DeBERTa-v2's code in its float32, so that a distance at the border of two buckets is
    numbered as the weights were trained. Graphs look the numbers up and so agree, whichever logarithm they have.

    Returns:
        (distances,) int64, up to the distance from which on all have the last number.
    """
    exact = num_buckets // 2
    distance = torch.arange(_LONGEST_TABLE)
    ratio = torch.log(distance.clamp(min=1) / exact) / torch.log(torch.tensor((max_distance - 1) / exact))
    far = torch.ceil(ratio * (exact - 1)) + exact
    bucket = torch.where(distance <= exact, distance, far.long()).clamp(max=num_buckets)
    return bucket[: int((bucket == bucket[-1]).nonzero()[0]) + 1]


class RelativeEmbeddings(nn.Module):
    """The table of relative positions, shared by all layers, normalized where the config says so."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create the table (2 span, hidden): a span of positions on either side."""
        super().__init__()
        self.num_buckets = config.position_buckets
        self.max_distance = config.max_relative_positions
        self.span = config.position_buckets or config.max_relative_positions
        self.table = nn.Embedding(2 * self.span, config.hidden_size)
        self.norm = make_norm(config, config.hidden_size) if config.norm_rel_ebd else None

    def forward(self, seq: int) -> RelativePositions:
        """Give what every layer needs for sequences of a length."""
        vectors: Tensor = self.table.weight if self.norm is None else self.norm(self.table.weight)
        place = torch.arange(2 * seq, device=vectors.device) - seq
        signed = self._signed_bucket(place)
        last = 2 * self.span - 1
        return RelativePositions(vectors, (self.span - signed).clamp(0, last), (self.span + signed).clamp(0, last))

    def _signed_bucket(self, distance: Tensor) -> Tensor:
        """Number distances of either sign; without buckets each is its own number."""
        if not self.num_buckets:
            return distance
        buckets = torch.tensor(self._buckets, device=distance.device)
        return distance.sign() * buckets[distance.abs().clamp(max=len(self._buckets) - 1)]

    @cached_property
    def _buckets(self) -> list[int]:
        numbers: list[int] = log_buckets(self.num_buckets, self.max_distance).tolist()
        return numbers


class DisentangledAttention(MultiHeadAttention):
    """Multi-head self-attention that also scores content against position, and position against content."""

    def __init__(self, config: EncoderConfig) -> None:
        """Create the projections; positions have their own, or share those of the content."""
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.scale = (self.head_dim * (1 + len(config.pos_att_type))) ** -0.5
        terms = config.pos_att_type if config.max_relative_positions else ()
        self.to_position, self.from_position = "c2p" in terms, "p2c" in terms
        own = not config.share_att_key
        hidden = config.hidden_size
        self.position_key = nn.Linear(hidden, hidden) if own and self.to_position else None  # W^{K,r}
        self.position_query = nn.Linear(hidden, hidden) if own and self.from_position else None  # W^{Q,r}

    def forward(  # type: ignore[override] # self-attention alone: no cache, no other sequence
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        *,
        position_bias: RelativePositions | None = None,
        rotation: None = None,
        attend: None = None,
        output_attentions: bool = False,
    ) -> AttentionOutput:
        """Let every position of `hidden` (batch, seq, hidden) look at every other."""
        assert rotation is None, "places are told apart by terms of their own"
        assert attend is None, "the terms of position need the whole matrix"
        query, key = self.queries_and_keys(hidden, hidden)
        value = split_heads(self.value(hidden), self.num_heads)
        bias = self.position_bias(query, key, position_bias)
        context, weights = scaled_dot_product_attention(query, key, value, mask, scale=self.scale, position_bias=bias)
        return AttentionOutput(self.output(merge_heads(context)), weights if output_attentions else None, None)

    def position_bias(self, query: Tensor, key: Tensor, positions: RelativePositions | None) -> Tensor | None:
        """Compute the second and third term of equation 4, scaled.

        Shape:
            query, key: (batch, heads, seq, head_dim)
            returns: (batch, heads, query, key), None where there is neither term
        """
        bias = None
        if positions is not None and self.to_position:
            keys = (self.position_key or self.key)(positions.vectors) * self.scale  # (positions, hidden)
            bias = by_pair(query @ self._by_head(keys[positions.key_rows]))  # (batch, heads, query, key)
        if positions is not None and self.from_position:
            queries = (self.position_query or self.query)(positions.vectors) * self.scale
            found = by_pair(key @ self._by_head(queries[positions.query_rows])).transpose(-2, -1)
            bias = found if bias is None else bias + found
        return bias

    def _by_head(self, vectors: Tensor) -> Tensor:
        """Turn (2 seq, hidden) into (heads, head_dim, 2 seq)."""
        return vectors.view(-1, self.num_heads, self.head_dim).permute(1, 2, 0)


def by_pair(by_distance: Tensor) -> Tensor:
    """Give each pair the number of its distance: (batch, heads, row, 2 seq) -> (batch, heads, row, column).

    Row i's number for column j is at place j - i + seq. In one line of memory that is seq + i * (2 seq - 1) + j:
    rows that are one place shorter, without the first seq places.
    """
    batch, heads, seq, width = by_distance.shape
    return by_distance.flatten(2)[..., seq:].view(batch, heads, seq, width - 1)[..., :seq]


class Convolution(nn.Module):
    """What DeBERTa-v2 puts beside its first layer: Norm(layer(x) + act(conv(x))), over a few neighbouring tokens."""

    def __init__(self, config: EncoderConfig, activation: Callable[[Tensor], Tensor]) -> None:
        """Create the convolution and its norm."""
        super().__init__()
        size, hidden = config.conv_kernel_size, config.hidden_size
        self.conv = nn.Conv1d(hidden, hidden, size, padding=size // 2, groups=config.conv_groups)
        self.norm = make_norm(config, hidden)
        self.activation = activation

    def forward(self, source: Tensor, transformed: Tensor, mask: Tensor) -> Tensor:
        """Add what the first layer's input gives to its output; padding counts as nothing.

        Shape:
            source, transformed: (batch, seq, hidden); mask: (batch, 1, 1, key) additive; returns: (batch, seq, hidden)
        """
        tokens = (mask >= 0)[:, 0, 0, :, None].to(source.dtype)  # (batch, seq, 1)
        found = self.conv((source * tokens).transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.norm(transformed + self.activation(found))
        return output
