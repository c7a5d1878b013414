"""Align's borders: what is refused and how it is told, limits of both sides, faults, and who leaves."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from attencode import AsyncClient, Client, InternalFault, InvalidRequest, align_request
from service.artifact import open_artifact
from service.backend import LocalBackend
from service.batching import Batch
from service.codec_align import encode_align_request
from service.config import ServiceConfig
from service.errors import DeadlineExceeded
from service.pb import encoder_pb2 as pb
from service.server import Server
from service.session import Session
from tests.service.faulty import Faults, serving
from tests.service.translators import Translator


@pytest.mark.parametrize(
    ("pair", "options", "message"),
    [
        (("abc", "abc"), {"layers": [3]}, "decoder layer 3 does not exist; it must be from -3 to 2"),
        (("abc", "abc"), {"heads": [-5]}, "decoder head -5 does not exist; it must be from -4 to 3"),
        (("abc", "abc"), {"rollout": True}, "align has no option rollout"),
        (("abc", "abc"), {"query_key_vectors": True}, "align has no option query_key_vectors"),
        (("abc", "ab"), {"queries": [3]}, "pair 0: queries name token 3; it must be from -3 to 2"),
        (("ab", "abc"), {"keys": [3]}, "pair 0: keys name token 3; it must be from -3 to 2"),
        (("ab", "abcd"), {"keys": [(3, 4)]}, "keys name characters 3 to 4 of text 0, which has 2 characters"),
        (("abc", "abc"), {"keys": [-1], "special_tokens": "drop"}, "keys name token 3 ('</s>'), which special_tokens"),
        (("abc", "abc"), {"queries": [(2, 1)]}, "which is reversed"),
        (("", "abc"), {}, "source: input 0 is empty"),
        (("abc", ""), {}, "target: input 0 is empty"),
        (("abc", " "), {}, "target: input 0 has no token"),
        (("abc", ("a", "b")), {}, "target: input 0 is two texts, and the decoder is given one"),
        (("abc", [5, 6]), {}, "target: input 0: token ids must begin with any token and end with 1"),
        (("abc", [5, 99, 1]), {}, "target: input 0: token id 99 is outside the vocabulary of 56"),
        (("a " * 600, "abc"), {"truncation": "off"}, "source: input 0: sequence of 601 tokens exceeds"),
        (("abc", "a " * 600), {"truncation": "off"}, "target: input 0: sequence of 601 tokens exceeds"),
        (("abc", "abc"), {"prompt_name": "query"}, "source: prompt_name 'query' is unknown"),
        (("abc", "abc"), {"model": "other"}, "model 'other' is not served here"),
        (("abc", ["a", "b"]), {}, "the target of pair 0: input 0 must be a text"),
        (("abc", 5), {}, "the target of pair 0 must be a text, or a list of token ids, got 5"),
        (("abc", "abc"), {"layers": False}, "layers and heads must be True"),
    ],
)
def test_what_is_refused(t5: Translator, pair: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    """What the caller can change is told: where it stands, what was expected, what came."""
    with pytest.raises(InvalidRequest) as caught:
        t5.client.align(*pair, **options)
    assert message in str(caught.value)


def test_a_rollout_is_refused_by_the_server(t5: Translator) -> None:
    """Other clients can ask for a rollout, which has no meaning between two sequences."""
    pair = pb.SourceTarget(source=pb.Input(text="a"), target=pb.Input(text="b"))
    asked = pb.AlignRequest(pairs=[pair], attention=pb.AttentionOptions(rollout=True))
    with pytest.raises(grpc.RpcError) as caught:
        _call(t5.running.address, asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "leave rollout out, or reduce the layers" in caught.value.details()
    with pytest.raises(grpc.RpcError, match="the target of pair 0 has no content; set text, pair or token_ids"):
        _call(t5.running.address, pb.AlignRequest(pairs=[pb.SourceTarget(source=pb.Input(text="a"))]))
    with pytest.raises(grpc.RpcError, match="the request has no pairs; send at least one source with its target"):
        _call(t5.running.address, pb.AlignRequest())


def _call(address: str, request: pb.AlignRequest) -> pb.AlignResponse:
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_unary(
            "/attencode.v1.Encoder/Align", pb.AlignRequest.SerializeToString, pb.AlignResponse.FromString
        )
        return method(request, timeout=10)


def test_an_encoder_alone_says_what_aligns(t5: Translator, tiny_artifact: Path) -> None:
    """A model without a decoder refuses, names those that have one, and says that no text is generated."""
    assert t5.client.get_model().decoder is not None
    with serving(tiny_artifact, Session) as running:
        assert running.client.get_model().decoder is None
        with pytest.raises(InvalidRequest) as caught:
            running.client.align("abc", "abc")
    assert "'tiny' is an encoder alone, and Align needs an encoder-decoder (T5, BART, Marian)" in str(caught.value)
    assert "none is served here" in str(caught.value)
    assert "this server generates no text" in str(caught.value)


def test_of_several_models_one_that_aligns_is_named(t5: Translator, tiny_artifact: Path) -> None:
    """Where another model of the server has a decoder, the refusal names it, and it answers."""

    async def test() -> None:
        settings = {"model": "m", "port": 0, "metrics_port": "none", "provider": "cpu", "precision": "float32"}
        config = ServiceConfig.model_validate(settings)
        models = {"alone": open_artifact(tiny_artifact), "pairs": open_artifact(t5.artifact)}
        server = Server(config, LocalBackend(config, models))
        await server.start()
        try:
            async with AsyncClient(f"127.0.0.1:{server.port}") as client:
                with pytest.raises(InvalidRequest, match=r"'alone' is an encoder alone.*; name one of: pairs\. Align"):
                    await client.align("a", "b")
                assert (await client.align("a", "b", model="pairs")).attention.shape == (3, 4, 2, 2)
        finally:
            await server.stop()

    asyncio.run(test())


# ---------------------------------------------------------------- limits, faults and leaving


def test_limits_count_both_sides(t5: Translator) -> None:
    """Too many pairs, too many tokens of both sides together, and answers that are too large are refused."""
    with pytest.raises(InvalidRequest, match="the request has 65 pairs, more than this server's 64; send several"):
        t5.client.align_pairs([("a", "b")] * 65)
    with pytest.raises(InvalidRequest) as caught:
        t5.client.align_pairs([("a " * 300, "b " * 300)] * 2)
    assert "for one message; ask for fewer pairs or fewer attention layers or heads or reduce_heads" in str(
        caught.value
    )
    assert t5.client.align("a " * 300, "b " * 300, reduce_heads="mean", layers=[0]).attention.shape == (1, 301, 301)
    with pytest.raises(InvalidRequest, match="name 40,000 tokens and spans of each of 2 pairs, and may name 65,536"):
        t5.client.align_pairs([("a", "b")] * 2, queries=[0] * 40_000)
    with serving(t5.artifact, Session, max_request_tokens=20) as running:
        running.client.align("a " * 9, "b " * 9)
        with pytest.raises(InvalidRequest, match="the request has 21 tokens, more than this server's 20"):
            running.client.align("a " * 9, "b " * 10)


def test_a_target_is_cut_and_the_answer_says_so(t5: Translator) -> None:
    """Both sides are truncated each for itself."""
    item = t5.client.align("abc", "a " * 600, layers=[0], heads=[0])
    assert (item.target.truncated, item.target.original_num_tokens, item.source.truncated) == (True, 601, False)
    assert item.attention.shape == (1, 1, 512, 4)
    assert item.target.tokens.special[-1]


def test_a_cancelled_pair_leaves_the_queue(t5: Translator) -> None:
    """Who leaves while the pair waits is computed for no more, and a deadline that passes there is told."""
    gate, begun = threading.Event(), threading.Event()

    def wait(_batch: Batch) -> None:
        begun.set()
        gate.wait(20)

    faults = Faults()
    with serving(t5.artifact, faults.session, threads=1, streams=1) as running:
        faults.before = wait
        asked = encode_align_request(align_request([("the cat", "die katze")]))
        with ThreadPoolExecutor(1) as pool, grpc.insecure_channel(running.address) as channel:
            first = pool.submit(running.client.align, "a", "b")
            assert begun.wait(20)
            method = channel.unary_unary("/attencode.v1.Encoder/Align", pb.AlignRequest.SerializeToString)
            call = method.future(asked)
            engine = running.server._models.find("").engine
            _until(lambda: engine.waiting_tokens == 7 + 9)  # of both sides
            call.cancel()
            _until(lambda: engine.waiting_tokens == 0)
            with Client(running.address, timeout_s=0.2) as hasty, pytest.raises(DeadlineExceeded):
                hasty.align("x", "y")
            gate.set()
            assert first.result().attention.shape == (3, 4, 2, 2)
        assert all(7 not in batch.lengths for batch in faults.batches)


def _until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to be")


def test_the_decoder_runs_beside_the_event_loop(t5: Translator) -> None:
    """A short pair that is alone does not run where plain texts do then: the decoder may yet have to be loaded."""
    faults, threads = Faults(), list[str]()
    with serving(t5.artifact, faults.session) as running:
        faults.before = lambda _batch: threads.append(threading.current_thread().name)
        for _ in range(12):
            running.client.align("a", "b")
    assert len(threads) == 12
    assert all(name.startswith("attencode-run") for name in threads)


def test_what_is_not_finite_fails_alone(t5: Translator) -> None:
    """A pair whose source gives NaN is INTERNAL; those beside it, of the same batch, are answered."""
    faults = Faults()
    with serving(t5.artifact, faults.session, max_queue_delay_ms=100) as running:

        def poison(batch: Batch, arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
            rows = [row for row, length in enumerate(batch.lengths) if length == 7]
            arrays["last_hidden_state"][rows] = np.nan
            return arrays

        faults.after = poison
        with ThreadPoolExecutor(2) as pool:
            good, bad = pool.submit(running.client.align, "abc", "b"), pool.submit(running.client.align, "abcdef", "b")
            assert good.result().attention.shape == (3, 4, 2, 4)
            with pytest.raises(InternalFault):
                bad.result()
