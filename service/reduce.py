"""Reduce: attention weights, layer after layer, to what one caller asked of them.

Queries and keys may be tokens of one sequence, or of two, as in cross-attention.

The order and the formulas are those of the contract (proto/attencode/v1/encoder.proto, AttentionOptions). Only one
layer's weights are held beside the answer. Pure numpy. May import: attention, request, spans, errors.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.attention import Attention, Axis, Places, QueryKeyVectors, Span
from service.errors import InvalidRequest
from service.request import DataType, Tokens
from service.spans import Uncovered

_SPANS_AT_ONCE = 256
_KEY_BYTES = 4  # of a key's number beside a weight of the largest
ITEM_BYTES: Mapping[DataType, int] = {"float32": 4, "float16": 2}


@dataclass(frozen=True, slots=True)
class Side:
    """Queries or keys: a sequence's tokens, as places on an axis.

    Attributes:
        length: Tokens.
        kept: Numbers of the tokens that stay; None for all.
        starts: Where each word begins among those that stay; None where words are not merged.
        chosen: Which of the places there are once special tokens are dropped and words merged; None for all.
        axis: What each chosen place stands for.
    """

    length: int
    kept: NDArray[np.intp] | None
    starts: NDArray[np.intp] | None
    chosen: NDArray[np.intp] | None
    axis: Axis


@dataclass(frozen=True, slots=True)
class Look:
    """What is wanted of one sequence's attention, or of one sequence's to another, every number resolved.

    Attributes:
        attention: Options whose layers and heads are numbers from 0; None for no weights.
        vectors: The same for query and key vectors.
        queries: Rows.
        keys: Columns.
        head_dim: Width of a query or key vector.
        data_type: Element type of the answer.
    """

    attention: Attention | None
    vectors: QueryKeyVectors | None
    queries: Side
    keys: Side
    head_dim: int
    data_type: DataType

    @property
    def length(self) -> int:
        """Tokens of the sequence whose attention to itself it is."""
        return self.queries.length

    @property
    def layers(self) -> list[int]:
        """Layers that must be looked at, ascending."""
        asked = (self.attention, self.vectors)
        return sorted({layer for options in asked if options is not None for layer in options.layers})

    def outputs(self, layer: int) -> list[str]:
        """Name the outputs of a layer's graph that it takes."""
        weights = ["attention"] if self.attention is not None and layer in self.attention.layers else []
        vectors = ["query_vectors", "key_vectors"] if self.vectors is not None and layer in self.vectors.layers else []
        return weights + vectors

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights that are answered."""
        asked = self.attention
        if asked is None:
            return (0,)
        layers = () if asked.rollout or asked.reduce_layers else (len(asked.layers),)
        heads = () if asked.rollout or asked.reduce_heads else (len(asked.heads),)
        keys = len(self.keys.axis)
        return (*layers, *heads, len(self.queries.axis), min(asked.top_k, keys) if asked.top_k else keys)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that are answered."""
        weights = int(np.prod(self.shape, dtype=np.int64))
        size = weights * (ITEM_BYTES[self.data_type] + (_KEY_BYTES if self.attention and self.attention.top_k else 0))
        if self.vectors is not None:
            maps = len(self.vectors.layers) * len(self.vectors.heads)
            size += 2 * maps * self.length * self.head_dim * ITEM_BYTES[self.data_type]
        return size

    def axis(self, side: Side) -> Axis | None:
        """Give what an axis of the answer stands for; None where place i is token i."""
        return None if side.axis == [(token, token + 1) for token in range(side.length)] else side.axis


def look_at(
    attention: Attention | None,
    vectors: QueryKeyVectors | None,
    tokens: Tokens,
    *,
    head_dim: int,
    data_type: DataType,
) -> Look:
    """Resolve what is wanted against one sequence's tokens.

    Args:
        attention: Options whose layers and heads are numbers from 0.
        vectors: Likewise.
        tokens: The sequence.
        head_dim: Width of a query or key vector.
        data_type: Element type of the answer.

    Raises:
        InvalidRequest: A token or a span that the sequence does not have.
    """
    asked = attention or Attention()
    every = _every_place(asked, tokens)
    queries, keys = _side("queries", asked.queries, tokens, every), _side("keys", asked.keys, tokens, every)
    return Look(attention, vectors, queries, keys, head_dim, data_type)


def look_across(attention: Attention, queries: Tokens, keys: Tokens, *, data_type: DataType) -> Look:
    """Resolve what is wanted of one sequence's attention to another one.

    Args:
        attention: Options whose layers and heads are numbers from 0.
        queries: The sequence that looks.
        keys: The sequence that is looked at.
        data_type: Element type of the answer.

    Raises:
        InvalidRequest: A token or a span that its sequence does not have.
    """
    rows = _side("queries", attention.queries, queries, _every_place(attention, queries))
    columns = _side("keys", attention.keys, keys, _every_place(attention, keys))
    return Look(attention, None, rows, columns, 0, data_type)


def _every_place(asked: Attention, tokens: Tokens) -> Side:
    """Lay a sequence's tokens out on an axis: without special tokens, and by words, where that is asked."""
    kept = np.arange(len(tokens))
    if asked.special_tokens != "keep":
        kept = np.flatnonzero(~np.asarray(tokens.special))
    starts = _word_starts(tokens, kept) if asked.words else None
    ends = np.arange(1, len(kept) + 1) if starts is None else np.append(starts[1:], len(kept))
    firsts = np.arange(len(kept)) if starts is None else starts
    axis = [(int(kept[first]), int(kept[end - 1]) + 1) for first, end in zip(firsts, ends, strict=True)]
    return Side(len(tokens), None if len(kept) == len(tokens) else kept, starts, None, axis)


def _word_starts(tokens: Tokens, kept: NDArray[np.intp]) -> NDArray[np.intp]:
    """Say where words begin: at each kept token but those that go on with the word of the one before."""
    words = [(tokens.sequences[token], tokens.words[token]) for token in kept]
    begins = [place for place, word in enumerate(words) if word[1] < 0 or not place or word != words[place - 1]]
    return np.asarray(begins, dtype=np.intp)


def _side(name: str, places: Places, tokens: Tokens, every: Side) -> Side:
    """Choose the places that are named of all there are."""
    if not places:
        return every
    named, axis = _named(name, places, tokens), every.axis
    there = {token for start, end in axis for token in range(start, end)}
    if missing := named - there:
        raise InvalidRequest(
            f"{name} name token {min(missing)} ({tokens.texts[min(missing)]!r}), which special_tokens drops; "
            "keep special tokens or name others"
        )
    chosen = [place for place, (start, end) in enumerate(axis) if any(token in named for token in range(start, end))]
    return replace(every, chosen=np.asarray(chosen, dtype=np.intp), axis=[axis[place] for place in chosen])


def _named(name: str, places: Places, tokens: Tokens) -> set[int]:
    """Give the numbers of the tokens that are named."""
    length = len(tokens)
    for token in places.tokens:
        if not -length <= token < length:
            raise InvalidRequest(f"{name} name token {token}; it must be from {-length} to {length - 1} of this input")
    named = {token % length for token in places.tokens}
    spans = sorted(set(places.spans))
    for some in (spans[begin : begin + _SPANS_AT_ONCE] for begin in range(0, len(spans), _SPANS_AT_ONCE)):
        covered = _covered(some, tokens)
        if not covered.any(axis=1).all():
            raise Uncovered(name, Span(*some[int(covered.any(axis=1).argmin())]))
        named |= set(np.flatnonzero(covered.any(axis=0)).tolist())
    return named


def _covered(spans: SequenceOf[Span], tokens: Tokens) -> NDArray[np.bool_]:
    """Tell which tokens have a character of which span: (spans, tokens)."""
    starts, ends, sequences = np.asarray(spans, dtype=np.int64).T[:, :, None]
    firsts, lasts = np.asarray(tokens.char_spans, dtype=np.int64).T
    real = ~np.asarray(tokens.special)
    covered: NDArray[np.bool_] = (firsts < ends) & (lasts > starts) & (np.asarray(tokens.sequences) == sequences) & real
    return covered


class Reducer:
    """Takes one sequence's layers in ascending order and has its answer when all were there."""

    def __init__(self, look: Look) -> None:
        """Make room for the answer."""
        self._look = look
        dtype = np.dtype(look.data_type)
        self._arrays: dict[str, NDArray[Any]] = {}
        if look.attention is not None:
            self._arrays["attention"] = np.empty(look.shape, dtype)
            if look.attention.top_k:
                self._arrays["attention_keys"] = np.empty(look.shape, np.int32)
        if look.vectors is not None:
            shape = (len(look.vectors.layers), len(look.vectors.heads), look.length, look.head_dim)
            for name in ("query_vectors", "key_vectors"):
                self._arrays[name] = np.empty(shape, np.float32)
        self._sum: NDArray[np.float32] | None = None  # over the layers so far
        self._rows = _rows(look)

    def add(self, layer: int, outputs: Mapping[str, NDArray[np.float32]]) -> None:
        """Take what one layer's graph yielded, each for one sequence without padding.

        Shape:
            attention: (heads, query, key); query_vectors, key_vectors: (heads, tokens, head_dim)
        """
        look = self._look
        if look.vectors is not None and layer in look.vectors.layers:
            place, heads = look.vectors.layers.index(layer), list(look.vectors.heads)
            for name in ("query_vectors", "key_vectors"):
                self._arrays[name][place] = outputs[name][heads]
        asked = look.attention
        if asked is None or layer not in asked.layers:
            return
        weights = outputs["attention"]
        if self._rows is not None:
            weights = weights[:, self._rows]
        if asked.heads != tuple(range(len(weights))):
            weights = weights[list(asked.heads)]  # (heads, query, key)
        if asked.rollout or asked.reduce_heads:
            weights = weights.max(axis=0) if asked.reduce_heads == "max" else weights.mean(axis=0)  # (query, key)
        if asked.rollout:
            mixed = (weights / weights.sum(axis=-1, keepdims=True) + np.eye(look.length, dtype=np.float32)) / 2
            self._sum = mixed if self._sum is None else mixed @ self._sum
        elif asked.reduce_layers:
            both = np.maximum if asked.reduce_layers == "max" else np.add
            self._sum = weights.copy() if self._sum is None else both(self._sum, weights, out=self._sum)
        else:
            self._store(weights, asked.layers.index(layer))

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Give the answer's arrays by the names of `InputResult`; to be called once, in the end."""
        asked = self._look.attention
        if asked is not None and self._sum is not None:
            if asked.reduce_layers == "mean":
                self._sum /= len(asked.layers)
            self._store(self._sum, ...)
        return self._arrays

    def _store(self, weights: NDArray[np.float32], place: Any) -> None:
        """Finish weights (..., query, key) of one layer, or of all reduced ones, and put them into the answer."""
        weights = _cut(weights, self._look, rows_cut=self._rows is not None)
        if "attention_keys" in self._arrays:
            keys, weights = _largest(weights, self._look.shape[-1])
            self._arrays["attention_keys"][place] = keys
        self._arrays["attention"][place] = weights


def _rows(look: Look) -> NDArray[np.intp] | None:
    """Give the only rows that matter, where nothing but a choice of rows is asked, so that no other is touched."""
    asked = look.attention
    alone = asked is not None and not asked.rollout and look.queries.starts is None and look.queries.chosen is not None
    return np.asarray([start for start, _ in look.queries.axis], dtype=np.intp) if alone else None


def _cut(weights: NDArray[np.float32], look: Look, *, rows_cut: bool) -> NDArray[np.float32]:
    """Drop special tokens, merge words and choose rows and columns of weights (..., query, key)."""
    queries, keys = look.queries, look.keys
    if keys.kept is not None:
        weights = weights[..., keys.kept]
    if queries.kept is not None and not rows_cut:
        weights = weights[..., queries.kept, :]
    if keys.kept is not None and look.attention is not None and look.attention.special_tokens == "renormalize":
        sums = weights.sum(axis=-1, keepdims=True)
        weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
    if keys.starts is not None:
        weights = np.add.reduceat(weights, keys.starts, axis=-1)
    if queries.starts is not None:
        sizes = np.diff(np.append(queries.starts, weights.shape[-2]))
        weights = np.add.reduceat(weights, queries.starts, axis=-2)
        weights /= sizes[:, None]
    if queries.chosen is not None and not rows_cut:
        weights = weights[..., queries.chosen, :]
    return weights if keys.chosen is None else weights[..., keys.chosen]


def _largest(weights: NDArray[np.float32], count: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Give places and values of the `count` largest of each row, descending, of equal ones the first."""
    if count < weights.shape[-1]:
        least = np.partition(weights, -count, axis=-1)[..., -count, None]  # the smallest that is wanted
        # All above it are wanted, and of those that equal it the first ones: rank them apart, then sort only these.
        above, equal = weights > least, weights == least
        missing = count - above.sum(axis=-1, keepdims=True)
        wanted = above | (equal & (np.cumsum(equal, axis=-1, dtype=np.int32) <= missing))
        places = np.nonzero(wanted)[-1].reshape(*weights.shape[:-1], count)
    else:
        places = np.broadcast_to(np.arange(count), weights.shape)
    values = np.take_along_axis(weights, places, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(places, order, axis=-1), np.take_along_axis(values, order, axis=-1)
