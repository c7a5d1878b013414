"""Align: the cross-attention that transformers computes, whatever else is in the batch, and what is made of it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from attencode import Attention, Client, InternalFault, InvalidRequest, Places, Span, align_request
from service.artifact import open_artifact
from service.batching import Batch
from service.codec_align import decode_align_request, encode_align_request
from service.cross import Cross, runs, shifted
from service.errors import DeadlineExceeded
from service.pb import encoder_pb2 as pb
from service.reduce import look_across
from service.request import Tokens
from service.session import Session
from tests.service import translators
from tests.service.faulty import Faults, Running, serving

PAIRS = [
    ("the cat sat on a mat", "die katze sass"),
    ("a", "ein lang er satz mit worten"),
    ("old men watched boats by the river", "x"),
    ("yes no", "ja nein"),
]


@dataclass(frozen=True)
class Translator:
    """A served model, and transformers' own of the same weights."""

    model: Any
    artifact: Path
    faults: Faults
    running: Running

    @property
    def client(self) -> Client:
        return self.running.client

    def whole(self, item: Any) -> NDArray[np.float32]:
        """Give what transformers says of an answer's pair."""
        return translators.cross_attentions(self.model, item.source.tokens.ids, item.target.tokens.ids)


def _translator(family: str, folder: Path, export: Callable[[Path], Path]) -> Iterator[Translator]:
    model, faults = translators.save(family, folder), Faults()
    artifact = export(folder)
    settings = {"max_queue_delay_ms": 50, "max_batch_tokens": 4096, "max_inputs": 64, "max_message_bytes": 2**20}
    with serving(artifact, faults.session, **settings) as running:
        yield Translator(model, artifact, faults, running)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory, export_artifact: Callable[[Path], Path]) -> Iterator[Translator]:
    """Give a served T5."""
    yield from _translator("t5", tmp_path_factory.mktemp("t5"), export_artifact)


@pytest.fixture(scope="module", params=sorted(translators.FAMILIES))
def translator(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, export_artifact: Callable[[Path], Path]
) -> Iterator[Translator]:
    """Give a served model of each family."""
    if request.param == "t5":
        yield request.getfixturevalue("t5")
    else:
        yield from _translator(request.param, tmp_path_factory.mktemp(request.param), export_artifact)


# ---------------------------------------------------------------- the weights


def test_weights_are_those_of_transformers(translator: Translator) -> None:
    """Pairs of mixed lengths in one request get transformers' weights, alone or together; rows sum to 1."""
    together = translator.client.align_pairs(PAIRS)
    assert max(len(batch.looks) for batch in translator.faults.batches) == len(PAIRS)
    for (source, target), item in zip(PAIRS, together, strict=True):
        want = translator.whole(item)
        assert item.attention.shape == want.shape
        np.testing.assert_allclose(item.attention, want, atol=1e-4)
        np.testing.assert_allclose(item.attention.sum(axis=-1), 1, atol=1e-5)
        np.testing.assert_allclose(translator.client.align(source, target).attention, want, atol=1e-4)


def test_token_ids_and_pairs_of_texts(translator: Translator) -> None:
    """Token ids of both sides are as good as their texts, and a source may be two texts."""
    item = translator.client.align("the cat", "die katze")
    again = translator.client.align(item.source.tokens.ids, item.target.tokens.ids)
    np.testing.assert_allclose(again.attention, item.attention, atol=1e-5)
    two = translator.client.align(("the cat", "sat"), "die katze")
    np.testing.assert_allclose(two.attention, translator.whole(two), atol=1e-4)
    assert {0, 1} <= set(two.source.tokens.sequences)


def test_callers_and_kinds_share_a_batch(t5: Translator) -> None:
    """Pairs of several requests and plain texts run in one batch, and each gets what it gets alone."""
    with Client(t5.running.address) as client:
        alone = [client.align(*pair).attention for pair in PAIRS]
        plain = client.encode("the old cat", token_embeddings=True).results[0].token_embeddings
        t5.faults.batches.clear()
        with ThreadPoolExecutor(8) as pool:
            pairs = [pool.submit(client.align, *pair) for pair in PAIRS]
            texts = [pool.submit(client.encode, "the old cat", token_embeddings=True, attention=True) for _ in range(2)]
            for got, want in zip(pairs, alone, strict=True):
                np.testing.assert_allclose(got.result().attention, want, atol=1e-5)
            for text in texts:
                np.testing.assert_allclose(text.result().results[0].token_embeddings, plain, atol=1e-5)
    mixed = [batch for batch in t5.faults.batches if any(isinstance(look, Cross) for look in batch.looks)]
    assert any(len({type(look) for look in batch.looks}) > 1 for batch in mixed)


def test_targets_with_a_tokenizer_of_their_own(translator: Translator, tmp_path: Path) -> None:
    """Where the artifact has one for targets, their ids are its, and the weights those of transformers for them."""
    artifact = translators.with_own_targets(translator.artifact, tmp_path / "artifact")
    with serving(artifact, Session) as running:
        item, plain = running.client.align("abc", "abc"), translator.client.align("abc", "zyx")
        assert item.target.tokens.ids == plain.target.tokens.ids != item.source.tokens.ids
        np.testing.assert_allclose(item.attention, plain.attention, atol=1e-5)


# ---------------------------------------------------------------- what is made of them


def _words(tokens: Tokens, kept: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for token in kept:
        same = groups and tokens.words[token] >= 0 and tokens.words[token] == tokens.words[groups[-1][-1]]
        groups[-1].append(token) if same else groups.append([token])
    return groups


def _named(places: Places, tokens: Tokens) -> set[int]:
    named = {token % len(tokens) for token in places.tokens}
    for start, end, _ in places.spans:
        named |= {token for token, (a, b) in enumerate(tokens.char_spans) if max(a, start) < min(b, end)}
    return named if places else set(range(len(tokens)))


def expected(whole: NDArray[np.float32], asked: Attention, target: Tokens, source: Tokens) -> NDArray[np.float32]:
    """Compute what is asked from all weights (layers, heads, target, source), before top_k."""
    reduce: dict[str, Any] = {"mean": np.mean, "max": np.max}
    weights = whole[list(asked.layers)] if asked.layers else whole
    weights = weights[:, list(asked.heads)] if asked.heads else weights
    weights = reduce[asked.reduce_heads](weights, axis=1) if asked.reduce_heads else weights
    weights = reduce[asked.reduce_layers](weights, axis=0) if asked.reduce_layers else weights
    rows, columns = (
        [token for token in range(len(side)) if asked.special_tokens == "keep" or not side.special[token]]
        for side in (target, source)
    )
    if asked.special_tokens == "renormalize":
        weights = weights / weights[..., columns].sum(axis=-1, keepdims=True)
    row_groups = _words(target, rows) if asked.words else [[token] for token in rows]
    column_groups = _words(source, columns) if asked.words else [[token] for token in columns]
    row_groups = [group for group in row_groups if _named(asked.queries, target) & set(group)]
    column_groups = [group for group in column_groups if _named(asked.keys, source) & set(group)]
    made = [[weights[..., row, :][..., column].sum(-1).mean(-1) for column in column_groups] for row in row_groups]
    return np.moveaxis(np.asarray(made), (0, 1), (-2, -1))


OPTIONS: dict[str, dict[str, Any]] = {
    "some layers and heads": {"layers": [2, -3], "heads": [-1, 0]},
    "the mean over heads": {"layers": [1], "reduce_heads": "mean"},
    "the largest of heads and layers": {"heads": [0, 2], "reduce_heads": "max", "reduce_layers": "max"},
    "the mean over layers": {"layers": [0, 2], "reduce_layers": "mean"},
    "words": {"words": True, "reduce_heads": "mean"},
    "words without special tokens": {"words": True, "special_tokens": "drop"},
    "words, renormalized": {"words": True, "special_tokens": "renormalize", "reduce_layers": "mean"},
    "renormalized": {"special_tokens": "renormalize", "layers": [0]},
    "rows by number": {"queries": [0, -1]},
    "rows and columns by span": {"queries": [(0, 3)], "keys": [(4, 9), 0]},
    "words by span": {"words": True, "queries": [(4, 6)], "keys": [(0, 1)], "special_tokens": "drop"},
    "columns without special tokens": {"keys": [1, 2, 3], "special_tokens": "drop", "reduce_heads": "mean"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_selections_are_what_numpy_makes_of_all_weights(t5: Translator, options: dict[str, Any]) -> None:
    """Each choice and reduction is that of the whole tensor, and labels fit it."""
    source, target = PAIRS[0]
    item = t5.client.align(source, target, **options)
    want = expected(t5.whole(item), item.asked, item.target.tokens, item.source.tokens)
    assert item.attention.shape == want.shape
    np.testing.assert_allclose(item.attention, want, atol=1e-4)
    assert item.attention.shape[-2:] == (len(item.row_labels), len(item.column_labels))


def test_the_largest_of_each_row(t5: Translator) -> None:
    """top_k gives the largest of each row with their columns, and in float16 half the bytes."""
    whole = t5.client.align(*PAIRS[0]).attention
    item = t5.client.align(*PAIRS[0], top_k=3, data_type="float16")
    assert item.attention.dtype == np.float16
    order = np.argsort(-whole, axis=-1, kind="stable")[..., :3]
    np.testing.assert_array_equal(item.attention_keys, order)
    np.testing.assert_allclose(item.attention, np.take_along_axis(whole, order, -1), atol=1e-3)
    assert item.to_numpy().shape == whole.shape


def test_word_pairs(t5: Translator) -> None:
    """A word of the target looks most at the word of the source with the largest mean of sums of its tokens."""
    item = t5.client.align("the cat sat", "die katze")
    mean = t5.whole(item).mean(axis=(0, 1))
    rows, columns = [[0, 1, 2], [3, 4, 5, 6, 7]], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    looks = [[mean[row][:, column].sum(axis=1).mean() for column in columns] for row in rows]
    pairs = item.word_pairs()
    assert [pair.target for pair in pairs] == ["die", "katze"]
    assert [pair.target_span for pair in pairs] == [(0, 3), (4, 9)]
    assert [pair.source for pair in pairs] == [["the", "cat", "sat"][int(np.argmax(row))] for row in looks]
    assert [pair.weight for pair in pairs] == [pytest.approx(max(row), abs=1e-4) for row in looks]
    least = sorted(looks[0] + looks[1])[2] - 1e-3
    some = item.word_pairs(least)
    assert sorted(pair.weight for pair in some) == pytest.approx(sorted(looks[0] + looks[1])[2:], abs=1e-4)
    merged = t5.client.align("the cat sat", "die katze", words=True, special_tokens="drop", reduce_heads="mean")
    assert [pair[:2] for pair in merged.word_pairs()] == [pair[:2] for pair in pairs]
    layer = t5.client.align("the cat sat", "die katze", layers=[1]).word_pairs()
    assert [pair.weight for pair in layer] == pytest.approx([pair.weight for pair in item.word_pairs(layer=1)])


def test_word_pairs_of_token_ids(t5: Translator) -> None:
    """Where there is no text each token but the special ones is a word."""
    ids = t5.client.align("the cat", "die")
    item = t5.client.align(ids.source.tokens.ids, "die")
    (pair,) = item.word_pairs()
    assert (pair.target, pair.source_span) == ("die", (0, 0))
    assert pair.source in ids.source.tokens.texts[:-1]
    with pytest.raises(InvalidRequest, match="threshold must be a number above 0 and up to 1, got 0"):
        item.word_pairs(0)


def test_an_aligned_shows_itself(t5: Translator, tmp_path: Path) -> None:
    """It is a table in a notebook, a heatmap in a file, and says its size."""
    item = t5.client.align("the cat sat", "die katze")
    assert repr(item) == "Aligned(9 target tokens, 10 source tokens, attention (3, 4, 9, 10))"
    assert "mean over all layers" in item._repr_html_()
    assert item.save(tmp_path / "heat.png", layer=1).stat().st_size > 1000
    with pytest.raises(InvalidRequest, match=r"\.png"):
        item.save(tmp_path / "heat.html")


# ---------------------------------------------------------------- what is refused


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


# ---------------------------------------------------------------- parts by themselves


def _cross(target: int, source: int) -> Cross:
    def tokens(length: int) -> Tokens:
        nothing = [(0, 0)] * length
        return Tokens([4] * length, ["a"] * length, nothing, nothing, [-1] * length, [0] * length, [False] * length)

    look = look_across(Attention((0, 2), (0, 3)), tokens(target), tokens(source), data_type="float32")
    return Cross(look, shifted(np.arange(4, 4 + target), 0), 0)


def test_much_is_run_in_parts() -> None:
    """What one run yields is bounded, with the padding that it brings; a pair that is too large runs alone."""
    sizes = [(100, 100), (90, 110), (1000, 1000), (10, 10), (10, 10)]
    wanted = (None, *(_cross(*size) for size in sizes))
    parts = list(runs(wanted, layers=24, heads=16))
    assert [part.rows for part in parts] == [(1, 2), (3,), (4, 5)]
    assert parts[0].outputs == ["cross_attention.0", "cross_attention.2"]
    feeds = parts[0].feeds(np.zeros((6, 120, 8), np.float32), np.ones((6, 120), np.int64))
    assert {name: array.shape for name, array in feeds.items()} == {
        "decoder_input_ids": (2, 100),
        "encoder_hidden_states": (2, 110, 8),
        "attention_mask": (2, 110),
    }
    assert feeds["decoder_input_ids"][1, :3].tolist() == [0, 4, 5]
    assert not feeds["decoder_input_ids"][1, 90:].any()


def test_parts_are_as_good_as_the_whole(t5: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose pairs run one by one gives the same."""
    whole = t5.client.align_pairs(PAIRS)
    monkeypatch.setattr("service.cross._MOST_RUN_BYTES", 1)
    for one, other in zip(whole, t5.client.align_pairs(PAIRS), strict=True):
        np.testing.assert_allclose(one.attention, other.attention, atol=1e-5)


def test_requests_are_the_same_on_both_sides() -> None:
    """A request that is written and read again says the same."""
    request = align_request(
        [("a", "b"), ([4, 1], ("c", "d"))],
        layers=[0],
        heads=[1],
        queries=[1, Span(0, 2)],
        top_k=2,
        words=True,
        special_tokens="drop",
        data_type="float16",
        truncation="off",
        prompt_name="p",
        model="m",
    )
    again = pb.AlignRequest.FromString(encode_align_request(request).SerializeToString())
    assert decode_align_request(again) == request


def test_the_asynchronous_client(t5: Translator) -> None:
    """It gives the same."""

    async def ask() -> Any:
        from attencode import AsyncClient

        async with AsyncClient(t5.running.address) as client:
            return await client.align("the cat", "die katze", layers=[0])

    want = t5.client.align("the cat", "die katze", layers=[0])
    np.testing.assert_allclose(asyncio.run(ask()).attention, want.attention, atol=1e-6)


def test_the_description_has_the_decoder(t5: Translator) -> None:
    """GetModel tells the decoder's layers, heads and longest target."""
    decoder, told = open_artifact(t5.artifact).decoder, t5.client.get_model().decoder
    assert decoder is not None
    assert told is not None
    assert (told.num_layers, told.num_heads, told.max_tokens) == (decoder.num_layers, decoder.num_heads, 512)
