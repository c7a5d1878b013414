"""Models with modules behind the encoder, served: dense layers, several poolings, prompts that are not pooled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from attencode import Client, InvalidRequest

TEXTS = ["abc de", "a", "f g h i j k l m n o p", "dog"]
PROMPTS = {"query": "q u: ", "plain": ""}


@pytest.fixture
def serve_modules(
    make_bert: Callable[..., Path], tmp_path: Path, serve: Callable[..., str], export_artifact: Callable[[Path], Path]
) -> Callable[..., tuple[SentenceTransformer, Client]]:
    """Give a function that saves sentence-transformers modules and serves them: the model and a client."""

    def build(*behind: Any, **options: Any) -> tuple[SentenceTransformer, Client]:
        modules = [Transformer(str(make_bert())), *behind]
        model = SentenceTransformer(modules=modules, device="cpu", **options)
        model.save(str(tmp_path / "model"))
        return model, Client(serve(export_artifact(tmp_path / "model")))

    return build


def test_poolings_side_by_side_and_dense(serve_modules: Callable[..., tuple[SentenceTransformer, Client]]) -> None:
    """The model's own vector goes through all its modules; a pooling named by a request is a plain one."""
    model, client = serve_modules(Pooling(24, pooling_mode=("cls", "mean")), Dense(48, 10), Normalize())
    with client:
        np.testing.assert_allclose(client.encode(TEXTS).pooled, model.encode(TEXTS), atol=1e-5)
        np.testing.assert_array_equal(client.encode(TEXTS, pooling="sentence").pooled, client.encode(TEXTS).pooled)
        assert client.encode(TEXTS, pooling="mean").pooled.shape == (4, 24)  # type: ignore[union-attr]
        info = client.get_model()
        assert (info.default_pooling, info.pooled_size, info.default_normalize) == ("sentence", 10, True)
        with pytest.raises(InvalidRequest, match="dimensions 11 must be from 1 to the model's 10"):
            client.encode(TEXTS, dimensions=11)


def test_a_plain_model_has_no_sentence_pooling(minilm_client: Client) -> None:
    """Where one pooling is all there is, `sentence` is unknown."""
    with pytest.raises(InvalidRequest, match="pooling 'sentence' is unknown; known poolings: cls, mean, max, last"):
        minilm_client.encode("x", pooling="sentence")


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(serve_modules: Callable[..., tuple[SentenceTransformer, Client]], include_prompt: bool) -> None:
    """A prompt is pooled or not as the model says, alone and in a mixed batch."""
    pooling = Pooling(24, pooling_mode="mean", include_prompt=include_prompt)
    model, client = serve_modules(pooling, prompts=PROMPTS, default_prompt_name="query")
    with client:
        np.testing.assert_allclose(client.encode(TEXTS).pooled, model.encode(TEXTS), atol=1e-5)
        for name in PROMPTS:
            expected = model.encode(TEXTS, prompt_name=name)
            np.testing.assert_allclose(client.encode(TEXTS, prompt_name=name).pooled, expected, atol=1e-5)
        alone = [client.encode(text).pooled[0] for text in TEXTS]  # type: ignore[index]
        np.testing.assert_allclose(client.encode(TEXTS).pooled, alone, atol=1e-5)
