"""The load tests' own machinery: what they send, when, what they count, and what they refuse. No speed is asserted."""

from argparse import ArgumentTypeError
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def loadtests_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `loadtests/` be imported as its scripts import one another."""
    monkeypatch.syspath_prepend(str(ROOT / "loadtests"))


def test_texts_are_the_same_at_each_run() -> None:
    """A seed gives the same texts, another seed others, and bulk texts have 8 to 120 words."""
    import texts

    assert texts.bulk_texts(50) == texts.bulk_texts(50) != texts.bulk_texts(50, seed=1)
    assert texts.mixed_texts(50) == texts.mixed_texts(50)
    lengths = [len(text.split()) for text in texts.bulk_texts(2000)]
    assert (min(lengths), max(lengths)) == (8, 120)


def test_words_are_ordinary_wordpieces(minilm: Path) -> None:
    """A word is 1.0 to 1.3 tokens, so words stand for tokens, and TEXT has the tokens that it is said to have."""
    import texts
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    assert len(tokenizer.encode(texts.TEXT).ids) == texts.TOKENS
    trace = texts.bulk_texts(100) + texts.mixed_texts(100)
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in trace if len(text.split()) < 100)
    words = sum(len(text.split()) for text in trace if len(text.split()) < 100)
    assert 1.0 <= tokens / words <= 1.3


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps average to the rate, vary as much as they average, and are those of the seed."""
    import open_loop

    moments = open_loop.arrivals(100.0, 100.0, seed=0)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    average = mean(gaps)
    spread = mean((gap - average) ** 2 for gap in gaps) ** 0.5
    assert average == pytest.approx(0.01, rel=0.05)
    assert spread == pytest.approx(average, rel=0.1)
    again, others = open_loop.arrivals(100.0, 100.0, seed=0), open_loop.arrivals(100.0, 100.0, seed=1)
    assert moments == again
    assert moments[0] != others[0]


def test_numbers_that_measure_nothing_are_refused() -> None:
    """Nought requests or seconds are refused by the command line, and so is what is no number."""
    import arguments

    assert (arguments.above_zero("0.1"), arguments.one_or_more("1")) == (0.1, 1)
    for read, text in ((arguments.above_zero, "0"), (arguments.above_zero, "nan"), (arguments.one_or_more, "0")):
        with pytest.raises(ArgumentTypeError, match=f"got {text}"):
            read(text)


def test_errors_end_a_program_by_their_message() -> None:
    """An error that says what to change ends a script by its message, not by a traceback."""
    import arguments

    with pytest.raises(SystemExit, match="no server answers at nowhere"), arguments.errors_as_messages():
        raise ConnectionError("no server answers at nowhere")


@pytest.mark.slow
def test_loops_count_every_outcome(tiny_artifact: Path) -> None:
    """Answers, refusals and errors are told apart, and together they are what was offered."""
    import closed_loop
    import open_loop
    from harness import running_server
    from wire import request_bytes

    # The queue is held for a while, so that it fills at any machine's speed.
    flags = ("--provider", "cpu", "--precision", "float32", "--max-queue-size", "8", "--max-queue-delay-ms", "300")
    good, damaged = request_bytes(["abc"]), b"\xff"
    with running_server(str(tiny_artifact), *flags) as (port, _):
        address = f"127.0.0.1:{port}"
        outcome = closed_loop.run(open_loop.offer(address, [good, damaged], 200.0, seconds=1.0, channels=2))
        streamed = closed_loop.run(closed_loop.stream(address, [good], in_flight=4, requests=8))
    assert outcome.statuses.keys() == {"OK", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"}
    assert outcome.statuses.total() == len(outcome.late_s) == round(outcome.offered)
    assert len(outcome.answered_s) == outcome.statuses["OK"]
    assert len(outcome.refused_s) == outcome.statuses["RESOURCE_EXHAUSTED"]
    assert len(outcome.row().split("|")) == len(open_loop.HEADER.split("|"))
    assert f"{outcome.statuses['INVALID_ARGUMENT']} INVALID_ARGUMENT" in outcome.row()
    assert streamed > 0


def test_gate_names_what_fell() -> None:
    """A ratio below its floor fails, one at it holds, one that was not measured is noted, NaN fails."""
    import gate

    floors = gate.Gate("a/model", {"cpu float32": {"single to infinity": 1.5, "bulk to infinity": 1.0, "x to y": 1.0}})
    measured = {"single to infinity": 1.49, "bulk to infinity": 1.0, "latency to infinity": 0.1}
    verdict = gate.judge(floors, "a/model", "cpu float32", measured)
    assert verdict.fallen == ["single to infinity is 1.49, below the 1.50 that gate.json asks for on cpu float32"]
    assert verdict.notes[0].endswith(": x to y")
    assert gate.judge(floors, "a/model", "cpu float32", {"x to y": float("nan")}).fallen
    assert not gate.judge(floors, "a/model", "cuda float32", measured).fallen
    assert not gate.judge(floors, "another", "cpu float32", measured).fallen


def test_gate_names_ratios_that_the_bench_measures() -> None:
    """Every name in gate.json is one that a run with all peers gives, so none is passed over for ever."""
    import bench
    import gate
    from peers import PEERS

    others = ["bare session", *PEERS]
    figures = {(measure, name): [1.0] for measure in bench.MEASURES for name in (bench.OurServer.name, *others)}
    known = bench.ratios(figures, others).keys() | {"overload"}
    for floors in gate.read().floors.values():
        assert floors.keys() <= known


def test_peers_that_are_not_installed_have_no_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer without an environment is None, and its cells in the table say so."""
    import bench
    import peers

    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    for start in peers.PEERS.values():
        with start() as peer:
            assert peer is None
    figures = {(measure, name): [1.0] for measure in bench.MEASURES for name in ("attencode", "bare session")}
    written = bench.table(figures, ["bare session"], ["infinity"], bench.ratios(figures, ["bare session"]))
    assert written.count("not installed") == len(bench.MEASURES)
    assert len({line.count("|") for line in written.splitlines()}) == 1


def test_ledgers_tell_what_must_not_be(tmp_path: Path) -> None:
    """Calls that end twice, wrongly, or, in a client that lived on, never are told of; a killed client's are open."""
    import ledger

    path = tmp_path / "ledger"
    book = ledger.Ledger(path)
    numbers = [book.begin("Encode", "plain") for _ in range(5)]
    for place, outcome in ((0, "OK"), (1, "OK"), (1, "OK"), (2, f"{ledger.WRONG}hung"), (3, f"{ledger.GONE}CANCELLED")):
        book.end(numbers[place], outcome)
    entries = ledger.read(path)
    assert [len(entry.outcomes) for entry in entries] == [1, 2, 1, 1, 0]
    twice, wrong, never = "plain: ended 2 times: OK, OK", "plain: WRONG: hung ()", "plain: never ended"
    assert sorted(ledger.faults(entries, killed=False)) == [f"1 times {fault}" for fault in (wrong, twice, never)]
    assert sorted(ledger.faults(entries, killed=True)) == [f"1 times {fault}" for fault in (wrong, twice)]


def test_counters_are_held_against_ledgers() -> None:
    """The server must have counted what clients saw, and at most as many more as clients did not wait for."""
    import ledger

    entries = [ledger.Entry("Encode", "plain", ("OK",))] * 3 + [ledger.Entry("Encode", "plain", (f"{ledger.GONE}X",))]
    for counted, faults in (
        ({"OK": 3}, 0),
        ({"OK": 4}, 0),
        ({"OK": 3, "CANCELLED": 1}, 0),
        ({"OK": 2}, 2),  # too few of OK, and of all
        ({"OK": 3, "INTERNAL": 1, "CANCELLED": 1}, 1),  # each may be, but not both
        ({"OK": 5}, 2),
    ):
        said = ledger.reconcile(entries, {("Encode", code): number for code, number in counted.items()})
        assert len(said) == faults, (counted, said)


def test_recovery_is_when_latency_is_normal() -> None:
    """It counts from the load's end to the first of some calls whose median is near what it was."""
    import overload

    began = [0.1 * place for place in range(100)]
    assert overload.recovery(began, [0.01] * 100, 0.0, 0.01) == 0.0
    assert overload.recovery(began, [0.1] * 30 + [0.01] * 70, 0.0, 0.01) == pytest.approx(2.3)
    assert overload.recovery(began, [0.1] * 100, 0.0, 0.01) == float("inf")
    assert overload.recovery([], [], 0.0, 0.01) == float("inf")


@pytest.mark.slow
def test_frames_see_each_status_and_keep_deadlines(tiny_artifact: Path, tmp_path: Path) -> None:
    """Calls made of frames are answered, refused, found invalid and given up as those of gRPC's own clients are."""
    import frames
    from watched import served
    from wire import request_bytes

    flags = ("--provider", "cpu", "--precision", "float32", "--max-queue-size", "8", "--max-queue-delay-ms", "300")
    with served([str(tiny_artifact), *flags], log=tmp_path / "log") as server:
        for message, timeout_s, statuses in (
            (request_bytes(["abc"]), 10.0, {"OK", frames.REFUSED}),
            (b"\xff", 10.0, {"INVALID_ARGUMENT"}),
            (request_bytes(["abc"]), 0.05, {frames.LATE}),
        ):
            crowd = frames.Crowd(server.port, 10, message, timeout_s)
            crowd.closed_loop(40 if timeout_s > 1 else 4, 0.5)
            crowd.close()
            assert crowd.ended.seconds.keys() == statuses
            assert crowd.ended.calls == len(crowd.ended.late_s)
            for status in statuses - {frames.LATE}:
                assert server.total("attencode_requests_total", code=status) == len(crowd.ended.seconds[status])
    assert "Traceback" not in (tmp_path / "log").read_text()  # a deadline that passes is no fault
