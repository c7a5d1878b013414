"""Batching: which waiting sequences run together, and how they are padded and cut apart again.

Pure: no clock, no I/O, no tasks; `now` is an argument. One rule decides everything: the oldest waiting
sequence is in the next batch, so nothing starves, and it takes along those nearest to it in length, so
that padding stays small. May import: tokenization, numpy.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.tokenization import Sequence

Graph = Literal["encode", "inspect"]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a batch may be and how long it may be waited for.

    Attributes:
        max_batch_tokens: Rows times padded length. A longer sequence still runs, alone.
        max_batch_size: Rows.
        max_queue_delay_ms: How long the oldest sequence waits for company while a runner is free.
        max_padding: Largest share of pad tokens that a batch of at least `dense_batch_tokens` takes on to
            grow further; smaller batches grow regardless, since an idle core costs more than a pad token.
        dense_batch_tokens: Tokens that keep the device busy.
        pad_to_multiple_of: Padded lengths are multiples of this, but not above `max_length`.
        max_length: Longest sequence that the model has positions for.
    """

    max_batch_tokens: int
    max_batch_size: int = 256
    max_queue_delay_ms: float = 0.0
    max_padding: float = 0.1
    dense_batch_tokens: int = 512
    pad_to_multiple_of: int = 1
    max_length: int = 2**31

    def padded(self, length: int) -> int:
        """Give the padded length of a longest sequence."""
        step = self.pad_to_multiple_of
        return max(length, min(-(-length // step) * step, self.max_length))


@dataclass(frozen=True, slots=True)
class Waiting:
    """One sequence in the queue.

    Attributes:
        number: Order of arrival, unique.
        length: Tokens.
        graph: Which graph it needs.
        arrived_s: When it came, on the clock that `now` is read from.
    """

    number: int
    length: int
    graph: Graph
    arrived_s: float


class WaitingList:
    """What waits, by arrival and by length; adding and removing cost O(log n) comparisons."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_arrival: dict[int, Waiting] = {}
        self._by_length: dict[Graph, list[tuple[int, int]]] = {"encode": [], "inspect": []}
        self.tokens = 0

    def __len__(self) -> int:
        """Count the sequences."""
        return len(self._by_arrival)

    def add(self, item: Waiting) -> None:
        """Add a sequence, younger than all there are."""
        self._by_arrival[item.number] = item
        insort(self._by_length[item.graph], (item.length, item.number))
        self.tokens += item.length

    def remove(self, number: int) -> None:
        """Remove a sequence if it still waits."""
        item = self._by_arrival.pop(number, None)
        if item is not None:
            lane = self._by_length[item.graph]
            del lane[bisect_left(lane, (item.length, number))]
            self.tokens -= item.length

    def oldest(self) -> Waiting | None:
        """Give the sequence that has waited longest."""
        return next(iter(self._by_arrival.values()), None)

    def lane(self, graph: Graph) -> list[tuple[int, int]]:
        """Give (length, number) of all that wait for a graph, in ascending order."""
        return self._by_length[graph]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The next batch: one graph, and the rows by arrival number."""

    graph: Graph
    numbers: tuple[int, ...]


def plan(waiting: WaitingList, limits: BatchLimits, now: float) -> BatchPlan | float | None:
    """Choose the next batch for a free runner.

    Args:
        waiting: The queue; it is not changed.
        limits: The policy.
        now: The present, in seconds, on the clock of `Waiting.arrived_s`.

    Returns:
        The batch; or how many seconds to wait for company first; or None when nothing waits.
    """
    oldest = waiting.oldest()
    if oldest is None:
        return None
    lane = waiting.lane(oldest.graph)
    low, high = _window(lane, bisect_left(lane, (oldest.length, oldest.number)), limits)
    full = (high - low) * limits.padded(lane[high - 1][0]) >= limits.max_batch_tokens / 2
    rest_s = oldest.arrived_s + limits.max_queue_delay_ms / 1000 - now
    if rest_s > 0 and not full:
        return rest_s
    return BatchPlan(oldest.graph, tuple(number for _, number in lane[low:high]))


def _window(lane: list[tuple[int, int]], anchor: int, limits: BatchLimits) -> tuple[int, int]:
    """Grow [low, high) around the anchor, each time towards the side that adds fewer pad tokens."""
    low, high = anchor, anchor + 1
    tokens = lane[anchor][0]  # real tokens of the rows so far
    while high - low < limits.max_batch_size:
        longest = lane[high - 1][0]
        rows = high - low + 1
        shorter = longest - lane[low - 1][0] if low > 0 else None
        longer = (lane[high][0] - longest) * (rows - 1) if high < len(lane) else None
        if shorter is None and longer is None:
            break
        down = longer is None or (shorter is not None and shorter <= longer)
        added = lane[low - 1][0] if down else lane[high][0]
        total = rows * limits.padded(longest if down else added)
        padding = 1 - (tokens + added) / total
        if total > limits.max_batch_tokens:
            break
        if padding > limits.max_padding and (rows - 1) * limits.padded(longest) >= limits.dense_batch_tokens:
            break
        low, high = (low - 1, high) if down else (low, high + 1)
        tokens += added
    return low, high


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded arrays for one run of a graph, all (batch, seq) int64, padding on the right.

    Attributes:
        graph: Which graph runs.
        outputs: Names of the graph's outputs that are wanted.
        lengths: Tokens of each row.
        pooling_mask: Tokens that poolings take; the attention mask but for prompts that are left out.
    """

    graph: Graph
    outputs: tuple[str, ...]
    lengths: tuple[int, ...]
    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    pooling_mask: NDArray[np.int64]

    def row(self, number: int) -> "Batch":
        """Give one row as a batch of its own, with the same padding."""
        one = slice(number, number + 1)
        return replace(
            self,
            lengths=self.lengths[one],
            input_ids=self.input_ids[one],
            attention_mask=self.attention_mask[one],
            token_type_ids=self.token_type_ids[one],
            pooling_mask=self.pooling_mask[one],
        )


def pad(
    sequences: SequenceOf[Sequence], graph: Graph, outputs: tuple[str, ...], pad_token_id: int, limits: BatchLimits
) -> Batch:
    """Lay sequences into one rectangle."""
    lengths = tuple(sequence.length for sequence in sequences)
    shape = (len(sequences), limits.padded(max(lengths)))
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    token_type_ids = np.zeros(shape, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        input_ids[row, : lengths[row]] = sequence.input_ids
        attention_mask[row, : lengths[row]] = 1
        if sequence.token_type_ids is not None:
            token_type_ids[row, : lengths[row]] = sequence.token_type_ids
    pooling_mask = attention_mask
    if any(sequence.unpooled for sequence in sequences):
        pooling_mask = attention_mask.copy()
        for row, sequence in enumerate(sequences):
            pooling_mask[row, : sequence.unpooled] = 0
    return Batch(graph, outputs, lengths, input_ids, attention_mask, token_type_ids, pooling_mask)


def unpad(name: str, array: NDArray[np.float32], row: int, length: int) -> NDArray[np.float32]:
    """Cut one row's part out of a batch's output, without its padding.

    Shape:
        pooled_*: (batch, dim) -> (dim,)
        attentions_*: (batch, heads, query, key) -> (heads, tokens, tokens)
        others: (batch, seq, hidden) -> (tokens, hidden)
    """
    kept: tuple[int | slice, ...] = (row, slice(length))
    if name.startswith("pooled_"):
        kept = (row,)
    elif name.startswith("attentions_"):
        kept = (row, slice(None), slice(length), slice(length))
    part: NDArray[np.float32] = array[kept]
    return part
