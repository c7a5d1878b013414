"""Batching: which waiting sequences run together, and how they are padded and cut apart again.

Pure: no clock, no I/O, no tasks; `now` is an argument. Callers take turns by what their turns cost, so nobody
starves and nobody is held up by another's ten thousand texts: the oldest sequence of the caller whose turn it is
anchors the next batch. It takes along those nearest to it in length, whoever sent them, until padding would cost as
much as a batch of their own. May import: callers, cross, tokenization, numpy.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from service.callers import NOBODY, Caller
from service.cross import Wanted
from service.tokenization import Sequence

HIDDEN_STATES = "hidden_states_"
"""What names of hidden states begin with; the layer's number follows."""

# A caller's turns are remembered, and room is left for it, while it waits and for so many batches after its last row:
# whoever asks for one text after another is back within a few.
_MEMORY_BATCHES = 8
# Rows of callers who have had their share of a batch that are passed over for it; bounds the time that a plan takes.
_PASSED_ROWS = 32


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a batch may be and how long it may be waited for.

    The defaults come from `loadtests/simulate.py`, whose table is in `loadtests/README.md`.

    Attributes:
        max_batch_tokens: Rows times padded length. A longer sequence still runs, alone.
        max_batch_size: Rows.
        max_queue_delay_ms: How long the oldest sequence waits for company while a runner is free. In none of the
            traces tried did 2 ms make anything faster: company gathers while a batch runs.
        max_padding: Pad tokens that rows of unequal length may cost a batch, as a share of `max_batch_tokens`. The
            default is what starting a batch costs: 16 of 512 tokens, as 0.44 ms are to 28 us a token on two cores.
            Half of it costs mixed texts 1 to 2 % of their speed, and twice as much wastes 5.7 % of 32 in flight.
        pad_to_multiple_of: Padded lengths are multiples of this, but not above `max_length`.
        few_shapes: Round padded lengths from 32 up to one of 16 for each doubling; for devices that compile each
            shape. Where a first run takes 24 % longer, mixed texts gain 6 to 9 % for 1.5 % more padding.
        max_length: Longest sequence that the model has positions for.
    """

    max_batch_tokens: int
    max_batch_size: int = 256
    max_queue_delay_ms: float = 0.0
    max_padding: float = 1 / 32
    pad_to_multiple_of: int = 1
    few_shapes: bool = False
    max_length: int = 2**31

    @property
    def batch_cost_tokens(self) -> float:
        """What any batch costs beside its tokens."""
        return self.max_padding * self.max_batch_tokens

    def padded(self, length: int) -> int:
        """Give the padded length of a longest sequence."""
        step = self.pad_to_multiple_of
        if self.few_shapes:
            step = max(step, 1 << max(length.bit_length() - 5, 0))
        return max(length, min(-(-length // step) * step, self.max_length))


@dataclass(frozen=True, slots=True)
class Waiting:
    """One sequence in the queue.

    Attributes:
        number: Order of arrival, unique.
        length: Tokens; of a pair those of both.
        arrived_s: When it came, on the clock that `now` is read from.
        caller: Who sent it; those of one name share one turn.
    """

    number: int
    length: int
    arrived_s: float
    caller: Caller = NOBODY


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The next batch: the rows by arrival number in ascending length, and the one whose turn it is."""

    numbers: tuple[int, ...]
    anchor: int


class WaitingList:
    """What waits, by arrival, by caller and by length; adding and removing cost O(log n) comparisons.

    The turns are start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): callers pay with their tokens in each
    batch, the one whose turn it is with a batch's own cost too, each divided by its weight, and who has paid least is
    next. Who comes anew has paid as much as all had to on average: never to come twice under one name is no advantage.
    Nobody's payment is ever more than a full batch ahead, so that who was taken along by many others need not wait long
    for it. Of a caller without waiting sequences a number is kept, for a few batches, if it is ahead.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._by_arrival: dict[int, Waiting] = {}
        self._by_caller: dict[str, dict[int, Waiting]] = {}
        self._tokens_of: dict[str, int] = {}  # by caller
        self._weight_of: dict[str, float] = {}  # of those that wait, and of those in `_gone`
        self._by_length: list[tuple[int, int]] = []  # (length, number), ascending
        self._turns: list[tuple[float, int, str]] = []  # (paid, number of the first waiting then, caller), ascending
        self._turn: dict[str, tuple[float, int, str]] = {}  # the same by caller
        self._gone: dict[str, tuple[int, float]] = {}  # caller of whom nothing waits -> batch it left with, paid
        self._paid = 0.0  # by who comes anew
        self._batches = 0
        self.tokens = 0

    def __len__(self) -> int:
        """Count the sequences."""
        return len(self._by_arrival)

    def __getitem__(self, number: int) -> Waiting:
        """Give a sequence that waits."""
        return self._by_arrival[number]

    def add(self, item: Waiting) -> None:
        """Add a sequence, younger than all there are."""
        self._by_arrival[item.number] = item
        name = item.caller.name
        self._weight_of[name] = item.caller.weight
        own = self._by_caller.get(name)
        if own is None:
            own = self._by_caller[name] = {}
            self._tokens_of[name] = 0
            _, paid = self._gone.pop(name, (0, 0.0))
            self._queue(name, max(paid, self._paid), item.number)
        own[item.number] = item
        self._tokens_of[name] += item.length
        insort(self._by_length, (item.length, item.number))
        self.tokens += item.length

    def remove(self, number: int) -> Waiting | None:
        """Remove a sequence if it still waits, and give it."""
        item = self._by_arrival.pop(number, None)
        if item is not None:
            name = item.caller.name
            del self._by_length[bisect_left(self._by_length, (item.length, number))]
            self.tokens -= item.length
            own = self._by_caller[name]
            del own[number]
            self._tokens_of[name] -= item.length
            if not own:
                del self._by_caller[name], self._tokens_of[name]
                paid = self._unqueue(name)
                if paid > self._paid:
                    self._gone[name] = self._batches, paid
                else:
                    del self._weight_of[name]
        return item

    def take(self, planned: BatchPlan, limits: BatchLimits) -> list[Waiting]:
        """Remove a batch that begins to run; its callers pay."""
        items = [self._by_arrival[number] for number in planned.numbers]
        tokens: dict[str, float] = {}
        for item in items:
            tokens[item.caller.name] = tokens.get(item.caller.name, 0) + item.length
        anchor = self._by_arrival[planned.anchor].caller.name
        base = self._turn[anchor][0]
        self._paid = max(self._paid, base + sum(tokens.values()) / self.weight)
        tokens[anchor] += limits.batch_cost_tokens
        for name, price in tokens.items():
            paid, weight = self._unqueue(name), self._weight_of[name]
            most = base + limits.max_batch_tokens / weight
            self._queue(name, max(paid, min(paid + price / weight, most)), planned.anchor)
        self._batches += 1
        for number in planned.numbers:
            self.remove(number)
        self._forget()
        return items

    def _queue(self, name: str, paid: float, number: int) -> None:
        self._turn[name] = turn = (paid, number, name)
        insort(self._turns, turn)

    def _unqueue(self, name: str) -> float:
        """Take a caller out of the turns; gives what it has paid."""
        turn = self._turn.pop(name)
        del self._turns[bisect_left(self._turns, turn)]
        return turn[0]

    def _forget(self) -> None:
        """Forget callers that left many batches ago; `_gone` is in the order in which they did."""
        while self._gone:
            name, (batch, _) = next(iter(self._gone.items()))
            if self._batches - batch < _MEMORY_BATCHES:
                break
            del self._gone[name], self._weight_of[name]

    def oldest(self) -> Waiting | None:
        """Give the sequence that has waited longest."""
        return next(iter(self._by_arrival.values()), None)

    def anchor(self, most: float = inf) -> Waiting | None:
        """Give the oldest sequence of the caller whose turn it is, of those of at most so many tokens."""
        callers = (self._by_caller[name] for _, _, name in self._turns)
        return next((item for own in callers for item in own.values() if item.length <= most), None)

    @property
    def callers(self) -> int:
        """Count the callers that wait, and those that left a few batches ago and are ahead."""
        return len(self._weight_of)

    @property
    def weight(self) -> float:
        """Add up their weights."""
        return sum(self._weight_of.values())

    def before(self, caller: Caller, tokens: int, ahead: int) -> float:
        """Give the most tokens of those that wait which run before a caller's next so many are done.

        That is its own, and of each other's as many as it will have had then, and `ahead`, which is what one may be
        ahead of another. Takes time by the number of callers.
        """
        rounds = (self._tokens_of.get(caller.name, 0) + tokens) / caller.weight
        return sum(
            waiting if name == caller.name else min(waiting, rounds * self._weight_of[name] + ahead)
            for name, waiting in self._tokens_of.items()
        )

    def owed(self, caller: Caller) -> float:
        """Give the tokens that run before a caller's next ones if others come anew as fast as they are served.

        It waits until all have had what it has had and has waiting.
        """
        turn = self._turn.get(caller.name)
        paid = turn[0] if turn else self._gone.get(caller.name, (0, 0.0))[1]
        own = self._tokens_of.get(caller.name, 0) / caller.weight
        return (max(paid - self._paid, 0.0) + own) * self.weight

    def near(self, anchor: Waiting, reach: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Give (length, number) of those nearest to one: shorter ones, and longer ones; the nearest last."""
        place = bisect_left(self._by_length, (anchor.length, anchor.number))
        return self._by_length[max(place - reach, 0) : place], self._by_length[place + 1 : place + 1 + reach][::-1]


def plan(waiting: WaitingList, limits: BatchLimits, now: float, most: float = inf) -> BatchPlan | float | None:
    """Choose the next batch for a free runner.

    Each turn costs at least a batch's own cost, and nobody is more than a full batch ahead of another; so among n
    callers everyone has a row in one of the next n * (2 + 1 / max_padding) batches, most of them far sooner. Only
    beside sequences that are longer than a batch may be it can be more.

    Args:
        waiting: The queue; it is not changed.
        limits: The policy.
        now: The present, in seconds, on the clock of `Waiting.arrived_s`.
        most: Tokens of the longest sequence that may run now.

    Returns:
        The batch; or how many seconds to wait for company first; or None when nothing waits.
    """
    oldest, anchor = waiting.oldest(), waiting.anchor(most)
    if oldest is None or anchor is None:
        return None
    rest_s = oldest.arrived_s + limits.max_queue_delay_ms / 1000 - now
    if rest_s > 0 and waiting.tokens < limits.max_batch_tokens / 2:
        return rest_s
    return BatchPlan(_fill(waiting, anchor, limits), anchor.number)


def _fill(waiting: WaitingList, anchor: Waiting, limits: BatchLimits) -> tuple[int, ...]:
    """Give the anchor and its nearest in length, each time the one that adds fewer pad tokens.

    They are worth taking along until their padding costs as much as a batch of their own: with d tokens between
    neighbours and c the cost of a batch, k rows cost c / k + d * k / 2 each, least where all pad tokens, d * k^2 / 2,
    are c (the economic lot size: Harris, "How many parts to make at once", 1913).
    """
    share = limits.max_batch_tokens / waiting.weight  # of a caller of weight 1, when all that are about share
    shared = waiting.callers > 1
    reach = min(limits.max_batch_size, limits.max_batch_tokens // anchor.length) + _PASSED_ROWS
    shorter, longer = waiting.near(anchor, reach)  # the nearest is the last of both
    least = limits.max_batch_tokens / limits.max_batch_size  # of a batch that is full of rows, what each takes
    rows, had = deque([anchor.number]), {anchor.caller.name: max(anchor.length, least)}
    longest = limits.padded(anchor.length)
    rest = limits.batch_cost_tokens
    while len(rows) < limits.max_batch_size and (len(rows) + 1) * longest <= limits.max_batch_tokens:
        for side in (shorter, longer):
            while side and shared and _has_its_share(waiting[side[-1][1]], had, share, least):
                side.pop()
        below = longest - limits.padded(shorter[-1][0]) if shorter else inf
        above = (limits.padded(longer[-1][0]) - longest) * len(rows) if longer else inf
        side, pads = (shorter, below) if below <= above else (longer, above)
        if not side or pads > rest:
            break
        length, number = side[-1]
        width = max(longest, limits.padded(length))
        if (len(rows) + 1) * width > limits.max_batch_tokens:
            break
        side.pop()
        longest = width
        name = waiting[number].caller.name
        had[name] = had.get(name, 0) + max(length, least)
        rest -= pads
        rows.append(number) if side is longer else rows.appendleft(number)
    return tuple(rows)


def _has_its_share(item: Waiting, had: Mapping[str, float], share: float, least: float) -> bool:
    """Tell whether a sequence would give its caller more of the batch than its share; one row it may have always."""
    before = had.get(item.caller.name, 0)
    return before > 0 and before + max(item.length, least) > share * item.caller.weight


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded arrays for one run of the model, all (batch, seq) int64, padding on the right.

    Attributes:
        outputs: Names of what is wanted: the graph's outputs, and `hidden_states_0` and so on.
        lengths: Tokens of each row.
        pooling_mask: Tokens that poolings take; the attention mask but for prompts that are left out.
        looks: What is wanted of each row's attention, or a target's to it, None for nothing; empty where no row's is.
        state_rows: Rows whose hidden states are wanted or looked at, ascending, (rows,) int64.
    """

    outputs: tuple[str, ...]
    lengths: tuple[int, ...]
    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    pooling_mask: NDArray[np.int64]
    looks: tuple[Wanted | None, ...] = ()
    state_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def rows_of(self, name: str) -> NDArray[np.int64]:
        """Give the rows that an output has values for."""
        return self.state_rows if name.startswith(HIDDEN_STATES) else np.arange(len(self.lengths))

    def part(self, numbers: SequenceOf[int]) -> "Batch":
        """Give some rows, in ascending order, as a batch of their own, with the same padding."""
        rows = np.asarray(numbers, dtype=np.int64)
        return replace(
            self,
            lengths=tuple(self.lengths[row] for row in numbers),
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            token_type_ids=self.token_type_ids[rows],
            pooling_mask=self.pooling_mask[rows],
            looks=tuple(self.looks[row] for row in numbers) if self.looks else (),
            state_rows=np.flatnonzero(np.isin(rows, self.state_rows)),
        )


def pad(
    sequences: SequenceOf[Sequence],
    outputs: tuple[str, ...],
    pad_token_id: int,
    limits: BatchLimits,
    *,
    looks: tuple[Wanted | None, ...] = (),
    state_rows: SequenceOf[int] = (),
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
    rows = np.asarray(state_rows, dtype=np.int64)
    return Batch(outputs, lengths, input_ids, attention_mask, token_type_ids, pooling_mask, looks, rows)


def unpad(batch: Batch, name: str, array: NDArray[np.float32], row: int) -> NDArray[np.float32]:
    """Cut one row's part out of a batch's output, without its padding.

    Shape:
        pooled_*: (batch, dim) -> (dim,)
        hidden_states_*: (state_rows, seq, hidden) -> (tokens, hidden)
        last_hidden_state: (batch, seq, hidden) -> (tokens, hidden)
    """
    place = int(np.searchsorted(batch.state_rows, row)) if name.startswith(HIDDEN_STATES) else row
    part: NDArray[np.float32] = array[place] if name.startswith("pooled_") else array[place, : batch.lengths[row]]
    return part
