"""Attention as it is asked for: every selection and reduction equals plain loops over transformers' whole tensor."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attencode import Attention, Client, InvalidRequest, Places, Span, Tokens
from service.errors import ProviderError
from service.placement import choose_placement
from tests.service.attention_reference import expected

LAYERS, HEADS = 6, 12
TEXTS: list[Any] = [
    "the transformer's unbelievable tokenization splits antidisestablishmentarianism",
    "short",
    ("is it sleepy, or merely unenthusiastic?", "the dog did not chase 漢字 and naïve cats 🙂"),
    "many words, of which some are embeddings, others hyperparameters; " * 6,
]


@dataclass(frozen=True)
class Known:
    """A text with its tokens and all that transformers attends to: (layers, heads, tokens, tokens)."""

    text: Any
    tokens: Tokens
    whole: NDArray[np.float64]
    queries: NDArray[np.float64]
    keys: NDArray[np.float64]


@pytest.fixture(scope="module")
def known(minilm: Path, minilm_client: Client) -> list[Known]:
    """Give the texts with transformers' eager attention, and the vectors that its projections give."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    found = []
    for text in TEXTS:
        first, second = (text, None) if isinstance(text, str) else text
        with torch.inference_mode():
            fed = tokenizer(first, second, return_tensors="pt")
            output = model(**fed, output_attentions=True, output_hidden_states=True)
            vectors = [
                [getattr(layer.attention.self, name)(state)[0].unflatten(-1, (HEADS, -1)).transpose(0, 1)]
                for name in ("query", "key")
                for layer, state in zip(model.encoder.layer, output.hidden_states[:-1], strict=True)
            ]
        both = torch.stack([one for (one,) in vectors]).double().numpy()
        tokens = minilm_client.tokenize([text]).results[0].tokens
        assert tokens is not None
        whole = torch.stack([weights[0] for weights in output.attentions]).double().numpy()
        found.append(Known(text, tokens, whole, both[:LAYERS], both[LAYERS:]))
    return found


def numbers(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw a choice of layers or heads, some counted from the end; empty for all."""
    signed = st.tuples(st.integers(0, count - 1), st.booleans())
    chosen = st.lists(signed, max_size=4, unique_by=lambda pair: pair[0])
    return chosen.map(lambda pairs: tuple(number - count if negative else number for number, negative in pairs))


@st.composite
def places(draw: st.DrawFn, tokens: Tokens, special: str) -> Places:
    """Draw tokens and spans that a sequence has, special ones only where they stay."""
    there = [token for token in range(len(tokens)) if special == "keep" or not tokens.special[token]]
    chosen = draw(st.lists(st.sampled_from(there), max_size=4, unique=True))
    signed = tuple(token - len(tokens) if draw(st.booleans()) else token for token in chosen)
    real = [token for token in range(len(tokens)) if not tokens.special[token]]
    spans = []
    for token in draw(st.lists(st.sampled_from(real), max_size=2)):
        start, end = tokens.char_spans[token]
        spans.append(Span(start, end + draw(st.integers(0, 9)), tokens.sequences[token]))
    return Places(signed, tuple(spans))


@st.composite
def wishes(draw: st.DrawFn, tokens: Tokens) -> Attention:
    """Draw any selection and reduction of a sequence's attention."""
    special = draw(st.sampled_from(["keep", "drop", "renormalize"]))
    rollout = draw(st.booleans())
    reductions = st.sampled_from([None, "mean", "max"])
    return Attention(
        layers=draw(numbers(LAYERS)),
        heads=draw(numbers(HEADS)),
        reduce_heads=draw(reductions),
        reduce_layers=None if rollout else draw(reductions),
        rollout=rollout,
        queries=draw(places(tokens, special)),
        keys=draw(places(tokens, special)),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 500])),
        special_tokens=special,  # type: ignore[arg-type]
        words=draw(st.booleans()),
    )


def options(asked: Attention) -> dict[str, Any]:
    """Give the plain values that ask for it."""
    values = {name: getattr(asked, name) for name in Attention.__slots__ if name != "layers"}
    return {"attention": asked.layers or True, **values}


def check(item: Any, one: Known, asked: Attention, tolerance: float) -> None:
    """Hold an answer against the loops."""
    weights, rows, columns = expected(one.whole, asked, one.tokens)
    for axis, groups in ((item.query_axis, rows), (item.key_axis, columns)):
        named = axis if axis is not None else [(token, token + 1) for token in range(len(one.tokens))]
        assert [(group[0], group[-1] + 1) for group in groups] == named
    if not asked.top_k:
        assert item.attention_keys is None
        np.testing.assert_allclose(item.attention, weights, atol=tolerance, rtol=0)
        return
    count = min(asked.top_k, weights.shape[-1])
    assert item.attention_keys.dtype == np.int32
    assert item.attention.shape == item.attention_keys.shape == (*weights.shape[:-1], count)
    np.testing.assert_allclose(item.attention, -np.sort(-weights)[..., :count], atol=tolerance, rtol=0)
    found = np.take_along_axis(weights, item.attention_keys.astype(int), axis=-1)
    np.testing.assert_allclose(item.attention, found, atol=tolerance, rtol=0)
    assert all(len(set(row)) == count for row in item.attention_keys.reshape(-1, count))


SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@SLOW
@given(data=st.data())
def test_any_selection_equals_the_loops(known: list[Known], minilm_client: Client, data: st.DataObject) -> None:
    """One input: 1e-4 in float32."""
    one = data.draw(st.sampled_from(known))
    asked = data.draw(wishes(one.tokens))
    check(minilm_client.encode([one.text], **options(asked)).results[0], one, asked, 1e-4)


@settings(SLOW, max_examples=10)
@given(data=st.data())
def test_many_inputs_and_mixed_batches(known: list[Known], minilm_client: Client, data: st.DataObject) -> None:
    """Requests that come together, each with wishes of its own and some plain, share batches and get their own."""
    wished = [(one, data.draw(wishes(one.tokens))) for one in known for _ in range(2)]
    several = Attention(**{name: getattr(wished[0][1], name) for name in ("layers", "heads", "words", "top_k")})
    plain = minilm_client.encode([one.text for one in known]).pooled
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(minilm_client.encode, [one.text], **options(asked)) for one, asked in wished]
        together = pool.submit(minilm_client.encode, [one.text for one in known], **options(several))
        plains = pool.submit(minilm_client.encode, [one.text for one in known])
        for (one, asked), answer in zip(wished, answers, strict=True):
            check(answer.result().results[0], one, asked, 1e-4)
        for one, item in zip(known, together.result().results, strict=True):
            check(item, one, several, 1e-4)
        np.testing.assert_allclose(plains.result().pooled, plain, atol=1e-5)


@settings(SLOW, max_examples=20)
@given(data=st.data())
def test_float16_is_within_its_rounding(known: list[Known], minilm_client: Client, data: st.DataObject) -> None:
    """Weights in float16 differ by at most 1e-3."""
    one = data.draw(st.sampled_from(known))
    asked = data.draw(wishes(one.tokens))
    item = minilm_client.encode([one.text], **options(asked), data_type="float16").results[0]
    assert item.attention is not None
    assert item.attention.dtype == np.float16
    check(item, one, asked, 1e-3)


@pytest.fixture(scope="module")
def bfloat16_client(serve_for_module: Callable[..., str], minilm_artifact: Path) -> Iterator[Client]:
    """Give a client of a server that computes in bf16."""
    try:
        choose_placement("openvino", "bfloat16")
    except ProviderError as error:
        pytest.skip(str(error))
    with Client(serve_for_module(minilm_artifact, provider="openvino", precision="bfloat16")) as client:
        yield client


@settings(SLOW, max_examples=30)
@given(data=st.data())
def test_bfloat16_is_within_its_tolerance(known: list[Known], bfloat16_client: Client, data: st.DataObject) -> None:
    """Weights of hidden states that were computed in bf16 differ by at most 0.02, as do sums and means of them.

    What is renormalized differs by as much more as it was divided by.
    """
    one = data.draw(st.sampled_from(known))
    asked = data.draw(wishes(one.tokens))
    if asked.special_tokens == "renormalize":
        asked = replace(asked, special_tokens="drop")
    check(bfloat16_client.encode([one.text], **options(asked)).results[0], one, asked, 0.02)


def test_query_and_key_vectors(known: list[Known], minilm_client: Client) -> None:
    """They are the projections of transformers, of the layers and heads that are asked for, in their order."""
    one = known[2]
    item = minilm_client.encode([one.text], query_key_vectors=[4, -6], heads=[3, -1]).results[0]
    assert item.attention is None
    np.testing.assert_allclose(item.query_vectors, one.queries[[4, 0]][:, [3, 11]], atol=1e-4)
    np.testing.assert_allclose(item.key_vectors, one.keys[[4, 0]][:, [3, 11]], atol=1e-4)
    both = minilm_client.encode([one.text], query_key_vectors=True, attention=[2], hidden_states=[1]).results[0]
    assert both.query_vectors is not None
    assert both.key_vectors is not None
    scores = both.query_vectors[2] @ both.key_vectors[2].transpose(0, 2, 1) / np.sqrt(32)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(both.attention[0], weights, atol=1e-4)  # type: ignore[index]


def test_rollout_by_hand(known: list[Known], minilm_client: Client) -> None:
    """Two layers, as the paper multiplies them: the later one from the left."""
    one = known[0]
    item = minilm_client.encode([one.text], attention=[1, 0], rollout=True).results[0]
    first, second = ((one.whole[layer].mean(0) + np.eye(len(one.tokens))) / 2 for layer in (0, 1))
    np.testing.assert_allclose(item.attention, second @ first, atol=1e-4)
    np.testing.assert_allclose(item.attention.sum(axis=-1), 1, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"attention": True, "rollout": True, "reduce_layers": "mean"}, "leave reduce_layers out"),
        ({"attention": True, "queries": [99]}, r"input 0: queries name token 99; it must be from -3 to 2"),
        (
            {"attention": True, "keys": [(7, 9)]},
            r"input 0: keys name characters 7 to 9 of text 0, which has 5 characters",
        ),
        ({"attention": True, "keys": [(0, 5, 1)]}, "of text 1, and this input is one text"),
        ({"attention": True, "queries": 0, "special_tokens": "drop"}, r"name token 0 \('\[CLS\]'\), which special"),
        ({"attention": True, "reduce_heads": "sum"}, "reduce_heads 'sum' is unknown; known: max, mean"),
        ({"attention": True, "special_tokens": "hide"}, "special_tokens 'hide' is unknown"),
        ({"attention": True, "top_k": -1}, "top_k must be a whole number from 0 to"),
        ({"attention": True, "queries": ["short"]}, "queries must be token numbers, or spans"),
        ({"attention": [6]}, "attention layer 6 does not exist"),
        ({"query_key_vectors": [0], "heads": [12]}, "head 12 does not exist"),
        ({"reduce_heads": "mean"}, "go with attention"),
        ({"heads": [1]}, "heads goes with attention or query_key_vectors"),
    ],
)
def test_refusals_say_what_to_change(minilm_client: Client, asked: dict[str, Any], message: str) -> None:
    """What the model or the text does not have is refused by name."""
    with pytest.raises(InvalidRequest, match=message):
        minilm_client.encode(["short"], **asked)
