"""Families, served: text over gRPC gets what transformers computes for the same tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import families
from attencode import Client, TextInput

TEXTS = [
    "the old man",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "boats",
    "man and river sat by the boats",
]


@pytest.mark.parametrize("case", families.CASES)
def test_served_answers_equal_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    serve: Callable[..., str],
    export_artifact: Callable[[Path], Path],
    case: str,
) -> None:
    """Token embeddings, hidden states, attention and pooled vectors of a mixed request, at most 1e-4 off."""
    folder = tmp_path_factory.mktemp("served")
    model = families.save(case, folder)
    with Client(serve(export_artifact(folder))) as client:
        result = client.encode(
            [*TEXTS, TextInput("the man", "the boats")],
            pooled=True,
            normalize=False,
            token_embeddings=True,
            hidden_states=True,
            attention=True,
        )
    assert result.pooled is not None
    for vector, item in zip(result.pooled, result.results, strict=True):
        assert item.tokens is not None
        ids = torch.tensor([item.tokens.ids])
        expected = families.oracle(model, ids, torch.ones_like(ids))
        # A pair's segments are the tokenizer's own; the oracle is run without them, so pairs are held
        # against it only where the family has none.
        if 1 in item.tokens.sequences and getattr(model.config, "type_vocab_size", 0) > 1:
            continue
        np.testing.assert_allclose(item.token_embeddings, expected.last_hidden_state[0], atol=1e-4)
        np.testing.assert_allclose(item.hidden_states, torch.cat(expected.hidden_states), atol=1e-4)
        np.testing.assert_allclose(item.attention, torch.cat(expected.attentions), atol=1e-4)
        np.testing.assert_allclose(vector, expected.last_hidden_state[0].mean(0), atol=1e-4)
