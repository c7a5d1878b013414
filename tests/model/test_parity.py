"""Every number that the encoder and its graphs give, against transformers' own BertModel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers import BertModel

import families
from model.checkpoint import load_encoder
from model.encoder import Encoder
from model.sentence import read_sentence, read_tokenizer

CONFIGS: dict[str, dict[str, object]] = {
    "three-heads": {},
    "head-of-one": {"num_attention_heads": 24},
    "one-segment": {"type_vocab_size": 1},
    "odd-sizes": {
        "vocab_size": 43,
        "hidden_size": 35,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "intermediate_size": 13,
        "max_position_embeddings": 23,
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 5,
    },
}
LONGEST = 10**6  # cut to what the model takes
LENGTHS = [(1,), (LONGEST,), (7, 3, 12), (1, LONGEST, 2), (9, 9), (16, 4, 11, 1, 2, 8, 13)]
POOLED = {
    "pooled_cls": lambda tokens: tokens[0],
    "pooled_mean": lambda tokens: tokens.mean(axis=0),
    "pooled_max": lambda tokens: tokens.max(axis=0),
    "pooled_last": lambda tokens: tokens[-1],
}
Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Subject:
    """A checkpoint, loaded by transformers and by us."""

    folder: Path
    reference: Any
    encoder: Encoder


@dataclass(frozen=True)
class Batch:
    """A padded batch: int64 arrays (batch, seq), and each row's number of tokens."""

    lengths: tuple[int, ...]
    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]


@pytest.fixture(scope="module", params=[*CONFIGS, "minilm"])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Give the real weights, or a tiny checkpoint of one configuration."""
    if request.param == "minilm":
        folder = request.getfixturevalue("minilm")
    else:
        folder = request.getfixturevalue("make_bert")(**CONFIGS[request.param])
    reference = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    return Subject(folder, reference, load_encoder(folder))


def draw(encoder: Encoder, lengths: tuple[int, ...]) -> Batch:
    """Draw random tokens of both segments, padded to the longest row."""
    config = encoder.config
    lengths = tuple(min(length, config.max_tokens) for length in lengths)
    rng = np.random.default_rng(len(lengths))
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.where(mask == 1, rng.integers(config.vocab_size, size=shape), config.pad_token_id)
    types = rng.integers(config.type_vocab_size, size=shape) * mask
    return Batch(lengths, ids, mask, types)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: torch.from_numpy(getattr(batch, name)) for name in names}


def oracle(reference: Any, batch: Batch) -> Arrays:
    """Run transformers' model on the padded batch; pool its last hidden state row by row in numpy."""
    with torch.inference_mode():
        output = reference(**tensors(batch), output_hidden_states=True, output_attentions=True)
    arrays = named(output)
    last = arrays["last_hidden_state"]
    rows = [last[row, :length] for row, length in enumerate(batch.lengths)]
    return arrays | {name: np.stack([pool(row) for row in rows]) for name, pool in POOLED.items()}


def named(output: Any) -> Arrays:
    """Name a model's outputs as the graphs name theirs."""
    arrays = {"last_hidden_state": output.last_hidden_state.numpy()}
    arrays |= {f"hidden_states_{n}": state.numpy() for n, state in enumerate(output.hidden_states)}
    return arrays | {f"attentions_{n}": weights.numpy() for n, weights in enumerate(output.attentions)}


def real_values(name: str, array: NDArray[np.float32], lengths: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
    """Yield each row of an output without its padded places."""
    for row, length in zip(array, lengths, strict=True):
        if name.startswith("pooled_"):
            yield row
        elif name.startswith("attentions_"):
            yield row[:, :length, :length]
        else:
            yield row[:length]


def assert_close(expected: Arrays, got: Arrays, lengths: tuple[int, ...], tolerance: float) -> None:
    """Hold every output's real places against the oracle's."""
    for name, array in got.items():
        assert array.dtype == np.float32
        assert array.shape == expected[name].shape, name
        pairs = zip(real_values(name, expected[name], lengths), real_values(name, array, lengths), strict=True)
        for row, (theirs, ours) in enumerate(pairs):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=f"{name}, row {row}")


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_torch_equals_transformers(subject: Subject, lengths: tuple[int, ...]):
    """The torch encoder's every hidden state and attention weight is transformers' to 1e-5."""
    batch = draw(subject.encoder, lengths)
    with torch.inference_mode():
        output = subject.encoder(**tensors(batch), output_hidden_states=True, output_attentions=True)
    layers = subject.encoder.config.num_hidden_layers
    assert (len(output.hidden_states), len(output.attentions)) == (layers + 1, layers)
    assert_close(oracle(subject.reference, batch), named(output), batch.lengths, 1e-5)


def test_a_padded_row_equals_the_row_alone(subject: Subject):
    """A row of a padded batch has the values that transformers gives for the row alone, unpadded, to 1e-5."""
    batch = draw(subject.encoder, (7, 3, 12))
    with torch.inference_mode():
        got = named(subject.encoder(**tensors(batch), output_hidden_states=True, output_attentions=True))
    for row, length in enumerate(batch.lengths):
        cut = [array[row : row + 1, :length] for array in (batch.input_ids, batch.attention_mask, batch.token_type_ids)]
        expected = oracle(subject.reference, Batch((length,), *cut))
        alone = {name: next(real_values(name, array[row : row + 1], (length,)))[None] for name, array in got.items()}
        assert_close(expected, alone, (length,), 1e-5)


def test_graphs_equal_transformers(subject: Subject, export_artifact: Callable[[Path], Path]):
    """The graphs' every output is transformers' to 1e-4, whatever the batch and length."""
    folder = export_artifact(subject.folder)
    encode = onnxruntime.InferenceSession(folder / "encode.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in encode.get_outputs()]
    assert set(names) == {"last_hidden_state", "hidden_states", *POOLED}
    for lengths in LENGTHS:
        batch = draw(subject.encoder, lengths)
        expected = oracle(subject.reference, batch)
        feeds = {name: tensor.numpy() for name, tensor in tensors(batch).items()}
        nothing = {"state_rows": np.zeros(0, np.int64)}
        plain = dict(zip(names, encode.run(names, feeds | nothing), strict=True))
        assert plain.pop("hidden_states").shape[1] == 0
        assert_close(expected, plain, batch.lengths, 1e-4)
        inside = families.run_graphs(folder, feeds)
        assert set(inside) == set(expected)
        assert_close(expected, inside, batch.lengths, 1e-4)


def test_pooled_vectors_equal_sentence_transformers(minilm: Path):
    """MiniLM's pooled and normalized vectors are those of sentence-transformers' encode() to 1e-5."""
    texts = ["one", "", "A cat sits on the mat.", "Ünïcödé, 漢字 and 🙂!", "where does this text end? " * 80]
    expected = SentenceTransformer(str(minilm), device="cpu").encode(texts)

    encoder = load_encoder(minilm)
    settings, head = read_sentence(minilm, encoder.config)
    assert (head.pooling, settings.normalize, settings.max_tokens) == ("mean", True, 256)
    tokenizer = read_tokenizer(minilm, encoder.config)
    tokenizer.enable_truncation(settings.max_tokens)
    tokenizer.enable_padding(pad_id=encoder.config.pad_token_id)
    encodings = tokenizer.encode_batch(texts)
    lengths = tuple(sum(encoding.attention_mask) for encoding in encodings)
    assert max(lengths) == 256
    columns = [[getattr(one, name) for one in encodings] for name in ("ids", "attention_mask", "type_ids")]
    batch = Batch(lengths, *(np.array(column) for column in columns))
    with torch.inference_mode():
        hidden = encoder(**tensors(batch)).last_hidden_state
        pooled = head(hidden, torch.from_numpy(batch.attention_mask))
    got = torch.nn.functional.normalize(pooled, dim=1).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
