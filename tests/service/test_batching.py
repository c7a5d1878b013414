"""Batching: the oldest first, its nearest in length along with it, and nothing lost in padding."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.batching import BatchLimits, BatchPlan, Waiting, WaitingList, pad, plan, unpad
from service.tokenization import Sequence

LIMITS = BatchLimits(max_batch_tokens=64, max_batch_size=8, dense_batch_tokens=16)


def waiting_list(lengths: list[int], graphs: list[str] | None = None) -> WaitingList:
    waiting = WaitingList()
    for number, length in enumerate(lengths):
        graph = graphs[number] if graphs else "encode"
        waiting.add(Waiting(number, length, graph, arrived_s=float(number)))  # type: ignore[arg-type]
    return waiting


def sequence(ids: list[int], types: list[int] | None = None) -> Sequence:
    return Sequence(np.array(ids), None if types is None else np.array(types), len(ids), None)


def test_nothing_waits() -> None:
    """An empty queue has no next batch."""
    assert plan(WaitingList(), LIMITS, now=0.0) is None


def test_nearest_lengths_run_together() -> None:
    """The oldest takes along those of its own length and leaves the others."""
    waiting = waiting_list([4, 32, 4, 30, 4, 5, 4])
    chosen = plan(waiting, LIMITS, now=9.0)
    assert isinstance(chosen, BatchPlan)
    assert set(chosen.numbers) == {0, 2, 4, 6}


def test_a_small_batch_grows_in_spite_of_padding() -> None:
    """While the device would idle, unequal lengths share a batch."""
    chosen = plan(waiting_list([2, 7]), LIMITS, now=9.0)
    assert isinstance(chosen, BatchPlan)
    assert set(chosen.numbers) == {0, 1}


def test_a_sequence_above_the_budget_runs_alone() -> None:
    """A sequence longer than the token budget does not block the queue."""
    chosen = plan(waiting_list([100, 3, 3]), LIMITS, now=9.0)
    assert isinstance(chosen, BatchPlan)
    assert chosen.numbers == (0,)


def test_graphs_do_not_mix() -> None:
    """Plain sequences never go through the graph with attention outputs."""
    waiting = waiting_list([4, 4, 4], ["encode", "inspect", "encode"])
    chosen = plan(waiting, LIMITS, now=9.0)
    assert isinstance(chosen, BatchPlan)
    assert (chosen.graph, set(chosen.numbers)) == ("encode", {0, 2})


def test_queue_delay_waits_for_company() -> None:
    """With a delay set, a small batch waits out the rest of it, and a large one does not wait."""
    limits = BatchLimits(max_batch_tokens=64, max_queue_delay_ms=500.0)
    assert plan(waiting_list([4]), limits, now=0.2) == 0.3
    assert isinstance(plan(waiting_list([4]), limits, now=0.5), BatchPlan)
    assert isinstance(plan(waiting_list([32]), limits, now=0.0), BatchPlan)


def test_padded_lengths_are_multiples() -> None:
    """Padded lengths come from a ladder when one is set."""
    limits = BatchLimits(max_batch_tokens=64, pad_to_multiple_of=8)
    batch = pad([sequence([5, 6, 7]), sequence([8])], "encode", ("pooled_mean",), 0, limits)
    assert batch.input_ids.shape == (2, 8)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=80), st.integers(1, 300), st.integers(1, 20))
def test_batches_keep_every_promise(lengths: list[int], max_tokens: int, max_size: int) -> None:
    """Whatever waits: the oldest is in the next batch, limits hold, and each sequence runs once."""
    limits = BatchLimits(max_batch_tokens=max_tokens, max_batch_size=max_size, dense_batch_tokens=max_tokens // 4)
    waiting = waiting_list(lengths)
    seen: list[int] = []
    while (oldest := waiting.oldest()) is not None:
        chosen = plan(waiting, limits, now=1000.0)
        assert isinstance(chosen, BatchPlan)
        assert oldest.number in chosen.numbers
        rows = [lengths[number] for number in chosen.numbers]
        assert len(rows) == 1 or (len(rows) <= max_size and len(rows) * max(rows) <= max_tokens)
        for number in chosen.numbers:
            waiting.remove(number)
        seen += chosen.numbers
    assert sorted(seen) == list(range(len(lengths)))
    assert waiting.tokens == 0


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=6))
def test_unpad_undoes_pad(rows: list[list[int]]) -> None:
    """Padding adds only pad tokens under a zero mask, and is cut off again."""
    batch = pad([sequence(ids, ids) for ids in rows], "encode", (), 0, LIMITS)
    assert batch.attention_mask.sum() == sum(map(len, rows))
    for row, ids in enumerate(rows):
        state = batch.input_ids[:, :, None].astype(np.float32)
        assert unpad("last_hidden_state", state, row, len(ids))[:, 0].tolist() == ids
        square = np.broadcast_to(state[:, None], (len(rows), 3, state.shape[1], state.shape[1]))
        assert unpad("attentions_0", square, row, len(ids)).shape == (3, len(ids), len(ids))
        assert (batch.input_ids[row, len(ids) :] == 0).all()
        assert batch.token_type_ids[row, : len(ids)].tolist() == ids


def test_removing_twice_is_harmless() -> None:
    """A sequence that left the queue can be removed again."""
    waiting = waiting_list([3, 4])
    waiting.remove(0)
    waiting.remove(0)
    assert (len(waiting), waiting.tokens) == (1, 4)
