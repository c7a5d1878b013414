"""Families, served: text over gRPC gets what transformers computes for the same tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import families
from attencode import Client, TextInput
from service.artifact import open_artifact
from service.batching import Batch
from service.errors import ProviderError
from service.placement import choose_placement
from service.session import Session

TEXTS = [
    "the old man",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "boats",
    "man and river sat by the boats",
]


FIRST_OF_EACH = list({family: case for case, (family, _) in reversed(families.CASES.items())}.values())


@pytest.fixture(scope="session")
def saved(
    tmp_path_factory: pytest.TempPathFactory, export_artifact: Callable[[Path], Path]
) -> Callable[[str], tuple[Any, Path]]:
    """Give a function that saves and exports a case once; gives transformers' model and the artifact."""
    made: dict[str, tuple[Any, Path]] = {}

    def save(case: str) -> tuple[Any, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp("served")
            made[case] = families.save(case, folder), export_artifact(folder)
        return made[case]

    return save


@pytest.mark.parametrize("case", FIRST_OF_EACH)
def test_openvino_computes_what_the_processor_does(saved: Callable[[str], tuple[Any, Path]], case: str) -> None:
    """Its float32 is at most 1e-4 off, at near distances and at far ones, which positions tell apart."""
    try:
        placement = choose_placement("openvino", "float32")
    except ProviderError as error:
        pytest.skip(str(error))
    artifact = open_artifact(saved(case)[1])
    lengths = (3, 9, 40, 70)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    draw = np.random.default_rng(3)
    ids = np.where(mask, draw.integers(10, 50, mask.shape), artifact.pad_token_id)
    batch = Batch(("last_hidden_state", "pooled_mean"), lengths, ids, mask, np.zeros_like(ids), mask)
    exact = Session(artifact, choose_placement("cpu", "float32"), threads=1).run(batch)
    found = Session(artifact, placement, threads=1).run(batch)
    kept = mask.astype(bool)
    np.testing.assert_allclose(found["last_hidden_state"][kept], exact["last_hidden_state"][kept], atol=1e-4)
    np.testing.assert_allclose(found["pooled_mean"], exact["pooled_mean"], atol=1e-4)


@pytest.mark.parametrize("case", families.CASES)
def test_served_answers_equal_transformers(
    serve: Callable[..., str], saved: Callable[[str], tuple[Any, Path]], case: str
) -> None:
    """Token embeddings, hidden states, attention and pooled vectors of a mixed request, at most 1e-4 off."""
    model, artifact = saved(case)
    with Client(serve(artifact)) as client:
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
