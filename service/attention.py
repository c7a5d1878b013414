"""Attention: what a caller may ask of attention weights, and what an answer's axes stand for.

Plain frozen data, the same on both sides of the wire; the contract (proto/attencode/v1/encoder.proto,
AttentionOptions) says what each choice computes and in which order. Imports nothing of the service.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Reduction = Literal["mean", "max"]
SpecialTokens = Literal["keep", "drop", "renormalize"]

ALL: tuple[int, ...] = ()
"""A choice of layers or heads that takes all of them."""


class Span(NamedTuple):
    """A part of an input's text: half-open, in characters; `sequence` says which text of a pair."""

    start: int
    end: int
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Places:
    """Rows or columns: tokens by number, negative ones from the end, and those that cover spans; all if empty."""

    tokens: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether anything is chosen."""
        return bool(self.tokens or self.spans)


MOST_PLACES = 65_536
"""Tokens and spans that one request may name, over all its inputs: to find them takes some 0.1 s at the most."""

EVERYWHERE = Places()


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention weights and what is made of them; the fields are those of the contract's AttentionOptions.

    Attributes:
        layers: `ALL` or numbers, negative ones from the end.
        heads: Likewise.
        reduce_heads: Over the chosen heads; None to keep them apart.
        reduce_layers: Over the chosen layers; None to keep them apart.
        rollout: Attention rollout through the chosen layers instead.
        queries: Rows.
        keys: Columns.
        top_k: Largest weights of each row; 0 for all in their places.
        special_tokens: Whether their rows and columns stay.
        words: Merge the tokens of each word.
    """

    layers: tuple[int, ...] = ALL
    heads: tuple[int, ...] = ALL
    reduce_heads: Reduction | None = None
    reduce_layers: Reduction | None = None
    rollout: bool = False
    queries: Places = EVERYWHERE
    keys: Places = EVERYWHERE
    top_k: int = 0
    special_tokens: SpecialTokens = "keep"
    words: bool = False

    @property
    def places(self) -> int:
        """How many tokens and spans are named."""
        return sum(len(places.tokens) + len(places.spans) for places in (self.queries, self.keys))


EVERYTHING = Attention()


@dataclass(frozen=True, slots=True)
class QueryKeyVectors:
    """Query and key vectors of layers and heads, each `ALL` or numbers, negative ones from the end."""

    layers: tuple[int, ...] = ALL
    heads: tuple[int, ...] = ALL


Axis = list[tuple[int, int]]
"""What the places of an axis stand for: the tokens from start to end - 1 of each."""
