"""Batching: callers take turns, the nearest in length along with them, and little is lost in padding."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.simulate import Device, Sender, Simulation, bulk, closed, offline_s, small, texts
from service.batching import BatchLimits, BatchPlan, Waiting, WaitingList, pad, plan, unpad
from service.callers import Caller
from service.tokenization import Sequence

LIMITS = BatchLimits(max_batch_tokens=64, max_batch_size=8)


def waiting_list(lengths: list[int]) -> WaitingList:
    waiting = WaitingList()
    for number, length in enumerate(lengths):
        waiting.add(Waiting(number, length, arrived_s=float(number)))
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


def test_padding_is_worth_a_batch() -> None:
    """Unequal lengths share a batch as long as their padding costs no more than another batch would."""
    limits = BatchLimits(max_batch_tokens=64, max_padding=1 / 8)
    together = plan(waiting_list([2, 10]), limits, now=9.0)
    apart = plan(waiting_list([2, 11]), limits, now=9.0)
    assert isinstance(together, BatchPlan)
    assert isinstance(apart, BatchPlan)
    assert (together.numbers, apart.numbers) == ((0, 1), (0,))


def test_a_sequence_above_the_budget_runs_alone() -> None:
    """A sequence longer than the token budget does not block the queue."""
    chosen = plan(waiting_list([100, 3, 3]), LIMITS, now=9.0)
    assert isinstance(chosen, BatchPlan)
    assert chosen.numbers == (0,)


def test_queue_delay_waits_for_company() -> None:
    """With a delay set, a small batch waits out the rest of it, and a large one does not wait."""
    limits = BatchLimits(max_batch_tokens=64, max_queue_delay_ms=500.0)
    assert plan(waiting_list([4]), limits, now=0.2) == 0.3
    assert isinstance(plan(waiting_list([4]), limits, now=0.5), BatchPlan)
    assert isinstance(plan(waiting_list([32]), limits, now=0.0), BatchPlan)


def test_padded_lengths_are_multiples() -> None:
    """Padded lengths come from a ladder when one is set."""
    limits = BatchLimits(max_batch_tokens=64, pad_to_multiple_of=8)
    batch = pad([sequence([5, 6, 7]), sequence([8])], ("pooled_mean",), 0, limits)
    assert batch.input_ids.shape == (2, 8)


def test_few_shapes() -> None:
    """A ladder of lengths grows with them: at most a sixteenth is added, and short ones stay as they are."""
    limits = BatchLimits(max_batch_tokens=64, few_shapes=True, max_length=500)
    lengths = range(1, 501)
    assert all(length <= limits.padded(length) <= min(length * 17 / 16, 500) for length in lengths)
    assert [limits.padded(length) for length in range(1, 32)] == list(range(1, 32))
    assert len({limits.padded(length) for length in lengths}) < 100


arrivals_of = st.tuples(st.integers(1, 100), st.sampled_from("abcde"))


@given(
    st.lists(st.tuples(st.lists(arrivals_of, max_size=12), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(1, 300),
    st.integers(1, 20),
    st.sampled_from([1 / 32, 1 / 8, 1.0]),
    st.sampled_from([1, 8]),
)
def test_batches_keep_every_promise(
    steps: list[tuple[list[tuple[int, str]], int]], max_tokens: int, max_size: int, max_padding: float, step: int
) -> None:
    """Whatever comes, leaves and runs: limits hold, everything is served once, and nobody waits for long."""
    limits = BatchLimits(max_tokens, max_size, max_padding=max_padding, pad_to_multiple_of=step)
    waiting, items, ended = WaitingList(), list[Waiting](), list[int]()
    since: dict[str, int] = {}  # caller -> batches since it had a row, or came
    most_batches = 5 * (2 + 100 / max_tokens + 1 / max_padding)
    steps = [*steps, ([], 10**6)]
    for arrivals, batches in steps:
        for length, origin in arrivals:
            items.append(Waiting(len(items), length, 0.0, Caller(origin)))
            waiting.add(items[-1])
            since.setdefault(origin, 0)
        if arrivals and len(arrivals) % 5 == 0 and waiting.remove(len(items) - 1):
            ended.append(len(items) - 1)
        for _ in range(batches):
            chosen = plan(waiting, limits, now=1.0)
            if chosen is None:
                break
            assert isinstance(chosen, BatchPlan)
            rows = [items[number] for number in chosen.numbers]
            longest = limits.padded(max(row.length for row in rows))
            assert len(rows) == 1 or (len(rows) <= max_size and len(rows) * longest <= max_tokens)
            assert sum(longest - limits.padded(row.length) for row in rows) <= max_padding * max_tokens
            assert waiting.take(chosen, limits) == rows
            ended += chosen.numbers
            left = {item.caller.name for item in items if item.number not in ended}
            since = {origin: since.get(origin, 0) + 1 for origin in left} | {row.caller.name: 0 for row in rows}
            assert max(since.values()) <= most_batches
    assert sorted(ended) == list(range(len(items)))
    assert (len(waiting), waiting.tokens) == (0, 0)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(4, 60))
def test_a_newcomer_waits_for_no_queue(callers: int, backlog: int, length: int) -> None:
    """Before callers with long queues go on, whoever comes anew has its turn: within as many batches as callers."""
    waiting, number = WaitingList(), 0
    for caller in range(callers):
        for _ in range(backlog):
            waiting.add(Waiting(number, 30, 0.0, Caller(f"{caller}")))
            number += 1
    for _ in range(3):
        if isinstance(chosen := plan(waiting, LIMITS, now=1.0), BatchPlan):
            waiting.take(chosen, LIMITS)
    waiting.add(Waiting(number, length, 0.0, Caller("new")))
    for _ in range(callers + 1):
        chosen = plan(waiting, LIMITS, now=1.0)
        assert isinstance(chosen, BatchPlan)
        if number in chosen.numbers:
            return
        waiting.take(chosen, LIMITS)
    raise AssertionError


def test_callers_that_are_always_new_starve_nobody() -> None:
    """Who never comes twice under one name is no better off for it: a queue goes on beside such callers."""
    waiting = WaitingList()
    for number in range(2000):
        waiting.add(Waiting(number, 20, 0.0, Caller("bulk")))
    served = 0
    for number in range(2000, 3000):
        waiting.add(Waiting(number, 50, 0.0, Caller(f"new {number}")))  # all that the device can do
        chosen = plan(waiting, LIMITS, now=1.0)
        assert isinstance(chosen, BatchPlan)
        served += sum(item.caller.name == "bulk" for item in waiting.take(chosen, LIMITS))
        assert len(waiting._gone) < 9 * LIMITS.max_batch_size
    assert served >= 10


def test_callers_who_left_are_forgotten() -> None:
    """Neither those who were served nor those who gave up leave anything behind for good."""
    waiting = WaitingList()
    for number in range(1000):
        waiting.add(Waiting(number, 20, 0.0, Caller(f"{number}")))
        if number % 2:
            waiting.remove(number)
        elif isinstance(chosen := plan(waiting, LIMITS, now=1.0), BatchPlan):
            waiting.take(chosen, LIMITS)
    kept = (waiting._by_arrival, waiting._by_caller, waiting._turns, waiting._turn)
    assert [len(part) for part in kept] == [0, 0, 0, 0]
    assert len(waiting._gone) <= 8


def test_a_bulk_client_leaves_small_ones_their_speed() -> None:
    """In simulated time: beside 8 clients that ask for one short text at a time it has its share, and they theirs."""
    alone = Simulation(small(200), Device()).run().latency_ms(99)
    for size, in_flight in ((32, 8), (32, 16), (1000, 1)):
        outcome = Simulation(small() + bulk(1, size, in_flight, 1000), Device()).run()
        assert outcome.latency_ms(99, probe=True) < 2 * alone
        assert outcome.tokens_of["b0"] > sum(outcome.lengths) / 9


@given(st.integers(2, 4), st.integers(1, 4), st.integers(8, 40), st.integers(8, 40))
@settings(deadline=None, max_examples=40)
def test_who_weighs_more_gets_more(heavy: int, light: int, long: int, short: int) -> None:
    """Callers who always wait get tokens as their weights are to each other, whatever their texts' lengths."""
    limits = BatchLimits(max_batch_tokens=512)
    weights, lengths = {"heavy": heavy / light, "light": 1.0}, {"heavy": long, "light": short}
    waiting, number, had = WaitingList(), 0, dict.fromkeys(weights, 0)
    for _ in range(100):
        for name, weight in weights.items():
            while waiting._tokens_of.get(name, 0) < 1024:
                waiting.add(Waiting(number, lengths[name], 0.0, Caller(name, weight)))
                number += 1
        chosen = plan(waiting, limits, now=1.0)
        assert isinstance(chosen, BatchPlan)
        for item in waiting.take(chosen, limits):
            had[item.caller.name] += item.length
    assert 0.75 < had["heavy"] / had["light"] / weights["heavy"] < 1.33


def test_a_caller_of_twice_the_weight_gets_twice_the_tokens() -> None:
    """In simulated time: of bulk clients who always wait the one of weight 2 gets twice the tokens of each other."""
    senders = [Sender("double", texts("mixed", 100, 32, 1), 8, probe=True, weight=2.0)]
    senders += [Sender(f"single {number}", texts("mixed", 20, 32, number), 8) for number in range(2, 4)]
    had = Simulation(senders, Device()).run().tokens_of
    assert 1.8 < 2 * had["double"] / (had["single 2"] + had["single 3"]) < 2.2


def test_packing_is_near_the_best() -> None:
    """In simulated time: a bulk client gets 95 % of the best packing, and 32 mixed texts in flight waste 5 %."""
    outcome = Simulation(bulk(1, 32, 8, 3000), Device()).run()
    assert offline_s(outcome.lengths, Device()) > 0.95 * outcome.busy_s
    outcome = Simulation(closed("mixed", 32), Device()).run()
    assert 1 - sum(outcome.lengths) / outcome.padded < 0.05


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=6))
def test_unpad_undoes_pad(rows: list[list[int]]) -> None:
    """Padding adds only pad tokens under a zero mask, and is cut off again."""
    batch = pad([sequence(ids, ids) for ids in rows], (), 0, LIMITS)
    assert batch.attention_mask.sum() == sum(map(len, rows))
    for row, ids in enumerate(rows):
        state = batch.input_ids[:, :, None].astype(np.float32)
        assert unpad(batch, "last_hidden_state", state, row)[:, 0].tolist() == ids
        assert unpad(batch, "pooled_mean", state[:, 0], row).tolist() == [ids[0]]
        assert (batch.input_ids[row, len(ids) :] == 0).all()
        assert batch.token_type_ids[row, : len(ids)].tolist() == ids


def test_removing_twice_is_harmless() -> None:
    """A sequence that left the queue can be removed again."""
    waiting = waiting_list([3, 4])
    waiting.remove(0)
    waiting.remove(0)
    assert (len(waiting), waiting.tokens) == (1, 4)


def test_states_are_cut_apart_by_their_rows() -> None:
    """Hidden states come of the rows that want them alone, and each of these gets its own."""
    batch = pad([sequence([5] * length) for length in (2, 3, 4)], (), 0, LIMITS, state_rows=[0, 2])
    states = np.arange(2 * 4 * 1, dtype=np.float32).reshape(2, 4, 1)
    np.testing.assert_array_equal(unpad(batch, "hidden_states_1", states, 0), states[0, :2])
    np.testing.assert_array_equal(unpad(batch, "hidden_states_1", states, 2), states[1])
    assert [list(batch.part([row]).state_rows) for row in range(3)] == [[0], [], [0]]
