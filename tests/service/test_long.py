"""Long texts, served: the same numbers as transformers', and short texts are not held up by them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import families
from attencode import Client
from service.artifact import LONG_TOKENS, open_artifact
from service.batching import Batch
from service.placement import choose_placement
from service.session import Session
from tests.service.gate import OUTPUT, GateRunner, run, sequence, started

CASE = "modernbert, long texts"
TEXTS = [
    " ".join(
        ["the", "old", "man", "sat", "by", "river", "and", "watched", "boats"][number % 9] for number in range(count)
    )
    for count in (LONG_TOKENS - 2, LONG_TOKENS - 1, 1500, 20)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    """Give transformers' model, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("long")
    return families.save(CASE, folder), folder


def test_served_long_texts_equal_transformers(
    saved: tuple[object, Path], export_artifact: Callable[[Path], Path], spawn_local: Callable[..., object]
) -> None:
    """Texts on both sides of where the graph for long ones begins, and one layer's attention reduced over heads."""
    model, folder = saved
    server = spawn_local(export_artifact(folder), "--provider", "cpu")
    with Client(server.address) as client:  # type: ignore[attr-defined]
        result = client.encode(TEXTS, token_embeddings=True)
        looked = client.encode([TEXTS[2]], attention=1, reduce_heads="mean").results[0]
    for item in result.results:
        assert item.tokens is not None
        ids = torch.tensor([item.tokens.ids])
        expected = families.oracle(model, ids, torch.ones_like(ids))
        np.testing.assert_allclose(item.token_embeddings, expected.last_hidden_state[0], rtol=0, atol=1e-4)
        if item is result.results[2]:
            weights = expected.attentions[1][0].mean(0)
            np.testing.assert_allclose(np.squeeze(looked.attention), weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_long_texts_leave_a_stream(capacity: int) -> None:
    """Of several streams one is left to short texts; what waits runs once a long text is done."""

    async def test() -> None:
        runner = GateRunner(capacity)
        engine = await started(runner)
        long = [asyncio.create_task(engine.submit([sequence(1, 300)], OUTPUT, None)) for _ in range(4)]
        await asyncio.sleep(0.05)
        running = max(1, capacity - 1)
        assert [batch.lengths for batch in runner.batches] == [(300,)] * running
        short = asyncio.create_task(engine.submit([sequence(2, 4)], OUTPUT, None))
        await asyncio.sleep(0.05)
        assert [batch.lengths for batch in runner.batches[running:]] == [(4,)]
        runner.gate.set()
        await asyncio.gather(*long, short)
        assert sorted(batch.lengths for batch in runner.batches) == [(4,), *[(300,)] * 4]

    run(test)


def test_graphs_for_long_texts(saved: tuple[object, Path], export_artifact: Callable[[Path], Path]) -> None:
    """The graph for long texts is loaded when the first comes, and there leaves a stream to others."""
    artifact = open_artifact(export_artifact(saved[1]))
    session = Session(artifact, choose_placement("cpu", "float32"), threads=2, streams=2)
    session.load()
    for length, graphs in ((LONG_TOKENS, {"encode"}), (LONG_TOKENS + 1, {"encode", "long"})):
        ids = np.full((1, length), 5)
        ones = np.ones_like(ids)
        session.run(Batch(("pooled_mean",), (length,), ids, ones, ones * 0, ones), alone=True)
        assert {graph for graph, _ in session._sessions} == graphs
    assert ("long", 2) in session._sessions
    assert ("long", 1) not in session._sessions
