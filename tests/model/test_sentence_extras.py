"""Folders that sentence-transformers itself saved, against its own encode(): what stands behind the encoder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    LSTM,
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
    WeightedLayerPooling,
)
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from torch import nn

from model.checkpoint import load_encoder, read_json
from model.errors import CheckpointError
from model.families import read_config
from model.graphs import EncoderGraph
from model.sentence import SentenceSettings, read_sentence, read_tokenizer

TEXTS = ["a b c", "", "Abc dé Z", "q r s t u v w x y z a b c d e f g h i j", "bad cab. fed"]
PROMPTS = {"query": "q a b: ", "document": ""}


@pytest.fixture(scope="module")
def plain(make_bert: Callable[..., Path]) -> Path:
    """Give a plain checkpoint, whose model takes 40 tokens and has vectors of 24 numbers."""
    return make_bert()


@pytest.fixture
def save(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    """Give a function that lets sentence-transformers save the plain checkpoint with modules behind it."""

    def write(*behind: nn.Module, prompts: dict[str, str] | None = None, **transformer: Any) -> Path:
        modules = [Transformer(str(plain), **transformer), *behind]
        SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save_pretrained(str(tmp_path / "saved"))
        return tmp_path / "saved"

    return write


def dense(width: int, out: int, **options: Any) -> Dense:
    """Make a Dense module with random weights large enough that it shows."""
    module = Dense(width, out, **options)
    draw = torch.Generator().manual_seed(out)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return module


def vectors(folder: Path, texts: Sequence[str], prompt: str = "") -> tuple[np.ndarray, SentenceSettings, str]:
    """Give the sentence vectors of our own graph, and the settings and the pooling's name."""
    encoder = load_encoder(folder)
    sentence, head = read_sentence(folder, encoder.config)
    graph = EncoderGraph(encoder, head, pool_prompt=sentence.pool_prompt)
    tokenizer = read_tokenizer(folder, encoder.config)
    tokenizer.enable_truncation(sentence.max_tokens)
    tokenizer.enable_padding(pad_id=encoder.config.pad_token_id)
    encodings = tokenizer.encode_batch([prompt + text for text in texts])
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    fed = {name: torch.tensor([getattr(one, key) for one in encodings]) for name, key in columns.items()}
    fed["pooling_mask"] = fed["attention_mask"].clone()
    fed["state_rows"] = torch.zeros(0, dtype=torch.int64)
    if prompt:
        tokenizer.no_padding()
        fed["pooling_mask"][:, : len(tokenizer.encode(prompt).ids) - 1] = 0
    with torch.inference_mode():
        outputs = dict(zip(graph.outputs, graph(*(fed[name] for name in graph.inputs)), strict=True))
    vector = outputs[f"pooled_{head.pooling}"]
    assert vector.shape == (len(texts), head.size(encoder.config.hidden_size))
    return (nn.functional.normalize(vector, dim=-1) if sentence.normalize else vector).numpy(), sentence, head.pooling


def expected(folder: Path, texts: Sequence[str], **options: Any) -> np.ndarray:
    """Give what sentence-transformers gives for the saved folder."""
    return np.asarray(SentenceTransformer(str(folder), device="cpu").encode(list(texts), **options))


HEADS: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "mean": (lambda: [Pooling(24)], "mean"),
    "last": (lambda: [Pooling(24, "lasttoken")], "last"),
    "normalized": (lambda: [Pooling(24, "cls"), Normalize()], "cls"),
    "tanh": (lambda: [Pooling(24), dense(24, 7)], "sentence"),
    "tanh without bias": (lambda: [Pooling(24), dense(24, 7, bias=False)], "sentence"),
    "identity": (lambda: [Pooling(24, "max"), dense(24, 30, activation_function=nn.Identity())], "sentence"),
    "identity without bias": (lambda: [Pooling(24), dense(24, 5, bias=False, activation_function=None)], "sentence"),
    "other activations": (
        lambda: [Pooling(24), dense(24, 9, activation_function=nn.GELU()), dense(9, 6, activation_function=nn.ReLU())],
        "sentence",
    ),
    "two poolings": (lambda: [Pooling(24, ("mean", "cls"))], "sentence"),
    "four poolings": (lambda: [Pooling(24, ("lasttoken", "max", "cls", "mean")), Normalize()], "sentence"),
    "two poolings, dense": (lambda: [Pooling(24, ("max", "mean")), dense(48, 11), Normalize()], "sentence"),
    "normalized in the middle": (lambda: [Pooling(24), Normalize(), dense(24, 8)], "sentence"),
    "normalized twice": (lambda: [Pooling(24), Normalize(), dense(24, 8), Normalize()], "sentence"),
}


@pytest.mark.parametrize(("modules", "pooling"), HEADS.values(), ids=HEADS)
def test_heads(save: Callable[..., Path], modules: Callable[[], list[nn.Module]], pooling: str):
    """Poolings, Dense and Normalize in their usual orders give sentence-transformers' vectors to 1e-5."""
    behind = modules()
    folder = save(*behind)
    got, sentence, name = vectors(folder, TEXTS)
    assert name == pooling
    assert sentence.normalize is isinstance(behind[-1], Normalize)
    np.testing.assert_allclose(got, expected(folder, TEXTS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "max", "lasttoken", ("mean", "cls")], ids=str)
def test_prompts(save: Callable[..., Path], mode: Any, include: bool):
    """A prompt's tokens are looked at by the text's, and pooled with them only where the folder says so."""
    folder = save(Pooling(24, mode, include_prompt=include), prompts=PROMPTS)
    texts = [text for text in TEXTS if text]
    got, sentence, _ = vectors(folder, texts, PROMPTS["query"])
    assert sentence.pool_prompt is include
    assert sentence.prompts == PROMPTS
    np.testing.assert_allclose(got, expected(folder, texts, prompt_name="query"), rtol=0, atol=1e-5)
    bare, _, _ = vectors(folder, texts)
    np.testing.assert_allclose(bare, expected(folder, texts, prompt_name="document"), rtol=0, atol=1e-5)
    assert np.abs(got - bare).max() > 1e-3


def test_prompts_before_a_dense_module(save: Callable[..., Path]):
    """A prompt left out of the pooling is left out before a Dense module too."""
    folder = save(Pooling(24, include_prompt=False), dense(24, 8), Normalize(), prompts=PROMPTS)
    got, _, name = vectors(folder, TEXTS, PROMPTS["query"])
    assert name == "sentence"
    np.testing.assert_allclose(got, expected(folder, TEXTS, prompt_name="query"), rtol=0, atol=1e-5)


def test_a_shorter_sequence_than_the_models(save: Callable[..., Path]):
    """max_seq_length below the model's cuts texts where sentence-transformers cuts them."""
    folder = save(Pooling(24), max_seq_length=9)
    got, sentence, _ = vectors(folder, TEXTS)
    assert sentence.max_tokens == 9
    np.testing.assert_allclose(got, expected(folder, TEXTS), rtol=0, atol=1e-5)
    whole, _, _ = vectors(folder, [text[:13] for text in TEXTS])  # seven letters and their spaces
    np.testing.assert_allclose(got[3], whole[3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["not", "flag", "saved"])
def test_lower_casing(make_bert: Callable[..., Path], tmp_path: Path, how: str):
    """do_lower_case lowercases before a tokenizer that keeps capitals: as a flag, and as it is saved nowadays."""
    checkpoint = make_bert()
    cased = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    cased.normalizer = BertNormalizer(lowercase=False)
    cased.save(str(checkpoint / "tokenizer.json"))
    modules = [Transformer(str(checkpoint), do_lower_case=how == "saved"), Pooling(24)]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    if how == "flag":
        path = tmp_path / "sentence_bert_config.json"
        path.write_text(json.dumps(read_json(path) | {"do_lower_case": True}), "utf-8")
    got, _, _ = vectors(tmp_path, ["A B C", "a b c"])
    np.testing.assert_allclose(got, expected(tmp_path, ["A B C", "a b c"]), rtol=0, atol=1e-5)
    assert np.allclose(got[0], got[1], atol=1e-5) is (how != "not")


# ---------------------------------------------------------------- refusals


REFUSED: dict[str, Callable[[], list[nn.Module]]] = {
    "WeightedLayerPooling": lambda: [WeightedLayerPooling(24, num_hidden_layers=2), Pooling(24)],
    "LSTM": lambda: [LSTM(24, 12), Pooling(24)],
    "CNN": lambda: [CNN(24, 8), Pooling(24)],
    "LayerNorm": lambda: [Pooling(24), LayerNorm(24)],
    "Dropout": lambda: [Pooling(24), Dropout(0.1)],
}


@pytest.mark.parametrize(("name", "modules"), REFUSED.items(), ids=REFUSED)
def test_other_modules_are_refused(save: Callable[..., Path], name: str, modules: Callable[[], list[nn.Module]]):
    """A folder saved with a module that we have not is refused by its name, with those that we have."""
    folder = save(*modules())
    with pytest.raises(CheckpointError, match=rf"modules\.json has the module {name}, which is not supported; .*Dense"):
        read_sentence(folder, read_config(read_json(folder / "config.json")))


def test_static_embeddings_are_refused(plain: Path, tmp_path: Path):
    """A folder without any transformer is refused by its module's name."""
    static = StaticEmbedding(Tokenizer.from_file(str(plain / "tokenizer.json")), embedding_dim=24)
    SentenceTransformer(modules=[static], device="cpu").save_pretrained(str(tmp_path))
    with pytest.raises(CheckpointError, match="the module StaticEmbedding, which is not supported"):
        read_sentence(tmp_path, read_config(read_json(plain / "config.json")))


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (lambda: [Pooling(24), dense(24, 24, use_residual=True)], "use_residual"),
        (lambda: [Pooling(24), dense(24, 8, use_residual=True)], "use_residual"),
        (lambda: [Pooling(24), dense(24, 8, module_input_name="token_embeddings")], "token_embeddings"),
        (lambda: [Pooling(24), dense(24, 8, activation_function=nn.Softplus())], "activation_function .*Softplus"),
        (lambda: [Pooling(24), dense(24, 8, activation_function=nn.LeakyReLU())], "activation_function .*LeakyReLU"),
        (lambda: [Pooling(24, "weightedmean")], "pooling weightedmean"),
        (lambda: [Pooling(24, ("mean", "weightedmean"))], r"pooling mean \+ weightedmean"),
        (lambda: [Pooling(24, "mean_sqrt_len_tokens")], "pooling mean_sqrt_len_tokens"),
    ],
)
def test_what_a_module_asks_for_is_refused(save: Callable[..., Path], modules: Callable[[], Any], named: str):
    """A Dense or Pooling module that asks for what we have not is refused by its file and what it asks for."""
    folder = save(*modules())
    with pytest.raises(CheckpointError, match=rf"config\.json asks for .*{named}"):
        read_sentence(folder, read_config(read_json(folder / "config.json")))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"in_features": 25}, "takes vectors of 25, the module before it gives 24"),
        ({"in_features": None}, "takes vectors of None, the module before it gives 24"),
        ({"out_features": 9}, r"holds the tensors .*'linear\.weight': \(8, 24\)"),
        ({"bias": False}, r"holds the tensors .*'linear\.bias': \(8,\)"),
        ({"activation_function": None}, "activation_function None"),
    ],
)
def test_a_dense_module_that_does_not_fit(save: Callable[..., Path], changed: dict[str, object], reason: str):
    """A Dense module whose widths or tensors are not those of its config.json is refused with both."""
    folder = save(Pooling(24), dense(24, 8))
    path = folder / "2_Dense" / "config.json"
    path.write_text(json.dumps(read_json(path) | changed), "utf-8")
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_sentence(folder, read_config(read_json(folder / "config.json")))
    assert str(path.parent) in str(caught.value)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_that_special_tokens_fill(make_bert: Callable[..., Path], tmp_path: Path, limit: int) -> None:
    """A maximum length without room for a token of text is refused at export."""
    import shutil

    from model.export import export

    folder = tmp_path / "checkpoint"
    shutil.copytree(make_bert(), folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    with pytest.raises(CheckpointError, match=f"sequences of {limit} tokens, which its 2 special tokens fill"):
        export(str(folder), tmp_path / "artifact", report=lambda _line: None)
