"""Align: the cross-attention that transformers computes, whatever else is in the batch, and what is made of it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attencode import Attention, Client, InvalidRequest, Places, Span, align_request
from service.artifact import open_artifact
from service.codec_align import decode_align_request, encode_align_request
from service.cross import Cross, runs, shifted
from service.pb import encoder_pb2 as pb
from service.reduce import look_across
from service.request import Tokens
from service.session import Session
from tests.service.faulty import serving
from tests.service.translators import Translator, with_own_targets

PAIRS = [
    ("the cat sat on a mat", "die katze sass"),
    ("a", "ein lang er satz mit worten"),
    ("old men watched boats by the river", "x"),
    ("yes no", "ja nein"),
]


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
    artifact = with_own_targets(translator.artifact, tmp_path / "artifact")
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
