"""The service as its callers meet it: a real grpc.aio server, a real session, the client's numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attencode
from attencode import Client

TEXTS = [
    "time flies like an arrow",
    "fruit flies like a banana",
    "a",
    "the dog did not attack the old man because it was sleepy",
    "注意力机制 is all you need",
    " ".join(["word"] * 60),
]


@pytest.fixture(scope="module")
def reference(minilm: Path) -> Callable[..., Any]:
    """Give transformers' own answer for one text: hidden states and eager attentions."""
    import torch
    from transformers import AutoTokenizer, BertModel

    model = BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm)

    def forward(*text: str) -> Any:
        with torch.inference_mode():
            return model(
                **tokenizer(*text, return_tensors="pt", truncation=True, max_length=256),
                output_hidden_states=True,
                output_attentions=True,
            )

    return forward


def test_everything_equals_transformers(minilm_client: Client, reference: Callable[..., Any]) -> None:
    """Token embeddings, hidden states and attention of a mixed request are transformers' own."""
    result = minilm_client.encode(TEXTS, token_embeddings=True, hidden_states=True, attention=True)
    assert result.pooled is None
    for text, item in zip(TEXTS, result.results, strict=True):
        expected = reference(text)
        assert item.token_embeddings is not None
        assert item.hidden_states is not None
        assert item.attention is not None
        np.testing.assert_allclose(item.token_embeddings, expected.last_hidden_state[0], atol=1e-4)
        np.testing.assert_allclose(item.hidden_states, np.concatenate(expected.hidden_states), atol=1e-4)
        np.testing.assert_allclose(item.attention, np.concatenate(expected.attentions), atol=1e-4)
        np.testing.assert_allclose(item.attention.sum(-1), 1.0, atol=1e-4)
        assert item.attention.shape == (6, 12, item.num_tokens, item.num_tokens)


def test_pairs_equal_transformers(minilm_client: Client, reference: Callable[..., Any]) -> None:
    """A pair of texts is one sequence with two segments."""
    pair = ("is it sleepy?", "the dog did not attack the old man because it was sleepy")
    (item,) = minilm_client.encode([pair], token_embeddings=True).results
    np.testing.assert_allclose(item.token_embeddings, reference(*pair).last_hidden_state[0], atol=1e-4)
    assert item.tokens is not None
    assert set(item.tokens.sequences) == {-1, 0, 1}


def test_pooled_equals_sentence_transformers(minilm_client: Client, minilm: Path) -> None:
    """The default vectors are sentence-transformers' own."""
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(minilm), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(minilm_client.encode(TEXTS).pooled, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last"])
def test_pooling_is_over_the_tokens(minilm_client: Client, pooling: str) -> None:
    """Each pooling is numpy's on the token embeddings of the same answer, padding or not."""
    result = minilm_client.encode(TEXTS, pooling=pooling, normalize=False, token_embeddings=True)
    pool = {
        "cls": lambda tokens: tokens[0],
        "mean": lambda tokens: tokens.mean(0),
        "max": lambda tokens: tokens.max(0),
        "last": lambda tokens: tokens[-1],
    }[pooling]
    assert result.pooled is not None
    for vector, item in zip(result.pooled, result.results, strict=True):
        np.testing.assert_allclose(vector, pool(item.token_embeddings), atol=1e-5)


def test_dimensions_are_normalized_again(minilm_client: Client) -> None:
    """A shortened vector has length 1 when normalized, and is the plain prefix when not."""
    whole = minilm_client.encode(TEXTS, normalize=False).pooled
    cut = minilm_client.encode(TEXTS, normalize=False, dimensions=64).pooled
    unit = minilm_client.encode(TEXTS, normalize=True, dimensions=64).pooled
    assert whole is not None
    assert cut is not None
    np.testing.assert_array_equal(cut, whole[:, :64])
    np.testing.assert_allclose(unit, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)


def test_layers_and_heads_are_chosen(minilm_client: Client) -> None:
    """Chosen layers and heads come in the order asked for; negative numbers count from the end."""
    whole = minilm_client.encode([TEXTS[0]], hidden_states=True, attention=True).results[0]
    part = minilm_client.encode([TEXTS[0]], hidden_states=[-1, 0, 2], attention=[5, -6], heads=[3, -1]).results[0]
    assert whole.hidden_states is not None
    assert whole.attention is not None
    np.testing.assert_allclose(part.hidden_states, whole.hidden_states[[6, 0, 2]], atol=1e-6)
    np.testing.assert_allclose(part.attention, whole.attention[[5, 0]][:, [3, 11]], atol=1e-6)


def test_the_last_layer_needs_no_inspection(minilm_client: Client) -> None:
    """Hidden state number -1 is the token embeddings."""
    item = minilm_client.encode([TEXTS[0]], hidden_states=[-1], token_embeddings=True).results[0]
    assert item.hidden_states is not None
    np.testing.assert_array_equal(item.hidden_states[0], item.token_embeddings)


def test_float16_on_the_wire(minilm_client: Client) -> None:
    """float16 halves the bytes and stays within its rounding."""
    full = minilm_client.encode(TEXTS, attention=[0], pooled=True)
    half = minilm_client.encode(TEXTS, attention=[0], pooled=True, data_type="float16")
    assert half.pooled is not None
    assert half.pooled.dtype == np.float16
    np.testing.assert_allclose(half.pooled, full.pooled, atol=1e-3)
    for a, b in zip(half.results, full.results, strict=True):
        np.testing.assert_allclose(a.attention, b.attention, atol=1e-3)


def test_token_ids_equal_text(minilm_client: Client) -> None:
    """A sequence sent as token ids gets the vector of its text."""
    result = minilm_client.tokenize([TEXTS[0]]).results[0]
    assert result.tokens is not None
    by_ids = minilm_client.encode(attencode.TokenIdsInput(tuple(result.tokens.ids))).pooled
    np.testing.assert_allclose(by_ids, minilm_client.encode(TEXTS[0]).pooled, atol=1e-6)


def test_a_list_of_integers_is_one_input(minilm_client: Client) -> None:
    """Plain token ids are one input, a list of lists several."""
    assert minilm_client.encode([101, 2051, 102]).pooled.shape == (1, 384)  # type: ignore[union-attr]
    assert minilm_client.encode([[101, 2051, 102], [101, 2052, 102]]).pooled.shape == (2, 384)  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_company_changes_nothing(minilm_client: Client, stream: bool) -> None:
    """A text alone, in any batch, in any place, by either method: the same vectors within 1e-5."""
    order = np.random.default_rng(0).permutation(len(TEXTS) * 3) % len(TEXTS)
    texts = [TEXTS[number] for number in order]
    request = attencode.encode_request(texts, pooled=True, token_embeddings=True, attention=[0])
    if stream:
        (together,) = minilm_client.encode_stream([request])
        assert isinstance(together, attencode.EncodeResult)
    else:
        together = minilm_client.encode(texts, pooled=True, token_embeddings=True, attention=[0])
    assert together.pooled is not None
    for number, vector, item in zip(order, together.pooled, together.results, strict=True):
        alone = minilm_client.encode([TEXTS[number]], pooled=True, token_embeddings=True, attention=[0])
        assert alone.pooled is not None
        np.testing.assert_allclose(vector, alone.pooled[0], atol=1e-5)
        np.testing.assert_allclose(item.token_embeddings, alone.results[0].token_embeddings, atol=1e-5)
        np.testing.assert_allclose(item.attention, alone.results[0].attention, atol=1e-5)


def test_context_shows(minilm_client: Client) -> None:
    """'apple' the company and 'apple' the fruit lie nearer to their own kind."""
    companies = ["the keynote showed a new apple phone", "apple announced its phone at the keynote"]
    fruits = ["she ate a banana, an apple and a pear", "the pear and the apple grew near the banana"]
    vectors = []
    for item in minilm_client.encode(companies + fruits, token_embeddings=True).results:
        assert item.tokens is not None
        assert item.token_embeddings is not None
        vector = item.token_embeddings[item.tokens.texts.index("apple")]
        vectors.append(vector / np.linalg.norm(vector))
    likeness = np.stack(vectors) @ np.stack(vectors).T
    own = min(likeness[0, 1], likeness[2, 3])
    assert own > likeness[:2, 2:].max()


def test_the_answer_describes_itself(minilm_client: Client) -> None:
    """Every answer carries the model's name and digest, and where the time went."""
    result = minilm_client.encode(TEXTS)
    info = minilm_client.get_model()
    assert (result.model, result.model_digest) == (info.model, info.model_digest)
    timings = result.timings
    assert 0 < timings.inference_s <= timings.total_s
    assert timings.tokenize_s > 0
    assert all(item.tokens is None for item in result.results)


def test_truncation_is_told(minilm_client: Client) -> None:
    """A cut text says so, with its original length, on every method."""
    text = "dog " * 300
    for item in (minilm_client.encode([text]).results[0], minilm_client.tokenize([text]).results[0]):
        assert (item.truncated, item.num_tokens, item.original_num_tokens) == (True, 256, 302)


def test_tokens_alone_run_no_model(minilm_client: Client) -> None:
    """Asking for tokens alone gives them without tensors."""
    result = minilm_client.encode(TEXTS[0], tokens=True)
    assert result.pooled is None
    assert result.timings.inference_s == 0
    assert result.results[0].tokens is not None
    assert result.results[0].tokens.texts[1] == "time"


def test_get_model(minilm_client: Client) -> None:
    """GetModel says what the model is, what it defaults to, and where it runs."""
    info = minilm_client.get_model()
    assert (info.family, info.hidden_size, info.num_hidden_layers, info.num_attention_heads) == ("bert", 384, 6, 12)
    assert (info.default_pooling, info.default_normalize, info.max_tokens) == ("mean", True, 256)
    assert (info.provider, info.precision, info.provider_reason) == ("cpu", "float32", "asked for")
    assert info.models == [info.model]
    assert len(info.model_digest) == 64


def test_streams_answer_in_order(minilm_client: Client) -> None:
    """Many requests on one stream are answered in order; an item's error is its own answer."""
    texts = [TEXTS[number % len(TEXTS)] for number in range(100)]
    requests = [attencode.encode_request(text if number % 10 else "") for number, text in enumerate(texts)]
    answers = list(minilm_client.encode_stream(requests))
    assert len(answers) == 100
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        if number % 10 == 0:
            assert isinstance(answer, attencode.InvalidRequest)
            assert "is empty" in str(answer)
        else:
            assert isinstance(answer, attencode.EncodeResult)
            np.testing.assert_allclose(answer.pooled, minilm_client.encode(text).pooled, atol=1e-5)
