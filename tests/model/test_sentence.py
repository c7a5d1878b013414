"""What surrounds the encoder: sentence-transformers' settings, and the tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer

from model.checkpoint import read_json
from model.config import EncoderConfig
from model.errors import CheckpointError
from model.sentence import SentenceSettings, read_settings, read_tokenizer

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"pooling_mode": "mean"}


@pytest.fixture(scope="module")
def plain(make_bert: Callable[..., Path]) -> Path:
    """Give a plain Hugging Face checkpoint, whose model takes 40 tokens."""
    return make_bert()


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """Give a copy of the plain checkpoint."""
    return Path(shutil.copytree(plain, tmp_path / "checkpoint"))


def write(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")


def write_modules(folder: Path, pooling: object, *more: object) -> None:
    write(folder, "modules.json", [TRANSFORMER, POOLING, *more])
    write(folder, "1_Pooling/config.json", pooling)


def config_of(folder: Path) -> EncoderConfig:
    return EncoderConfig.from_hf(read_json(folder / "config.json"))


def settings_of(folder: Path) -> SentenceSettings:
    return read_settings(folder, config_of(folder))


# ---------------------------------------------------------------- settings


def test_a_plain_folder_gets_the_defaults(folder: Path):
    """Without modules.json: mean pooling, not normalized, no prompts, all the tokens that the model takes."""
    assert settings_of(folder) == SentenceSettings(40, "mean", normalize=False, prompts={}, default_prompt_name=None)


def test_minilm(minilm: Path):
    """The real checkpoint's own files are read: mean, normalized, 256 tokens of the model's 512."""
    assert settings_of(minilm) == SentenceSettings(256, "mean", normalize=True)


@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_lasttoken", "last"),
    ],
)
def test_pooling_by_flag(folder: Path, flag: str, pooling: str):
    """Of the older flags the one that is set decides."""
    flags = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens"), False)
    write_modules(folder, {"word_embedding_dimension": 24, **flags, flag: True})
    assert settings_of(folder).pooling == pooling


@pytest.mark.parametrize(("mode", "pooling"), [("cls", "cls"), ("mean", "mean"), ("max", "max"), ("lasttoken", "last")])
def test_pooling_by_name(folder: Path, mode: str, pooling: str):
    """The newer one-word name decides."""
    write_modules(folder, {"embedding_dimension": 24, "pooling_mode": mode, "include_prompt": True})
    assert settings_of(folder).pooling == pooling
    write_modules(folder, {"pooling_mode": [mode]})
    assert settings_of(folder).pooling == pooling


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": ["mean", "cls"]}, "mean + cls"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "pooling_mode_mean_sqrt_len_tokens"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            "pooling_mode_cls_token + pooling_mode_max_tokens",
        ),
        ({"pooling_mode_mean_tokens": False}, "none"),
    ],
)
def test_other_poolings_are_refused(folder: Path, pooling: object, named: str):
    """A pooling that is not supported, or a mixture, is refused by its name, with those that are."""
    write_modules(folder, pooling)
    with pytest.raises(CheckpointError, match="supported: one of cls, mean, max, lasttoken") as caught:
        settings_of(folder)
    assert f"asks for pooling {named};" in str(caught.value)


def test_normalize(folder: Path):
    """A Normalize module turns normalization on, its absence leaves it off."""
    write_modules(folder, MEAN)
    assert settings_of(folder).normalize is False
    write_modules(folder, MEAN, NORMALIZE)
    assert settings_of(folder).normalize is True


@pytest.mark.parametrize(
    ("sentence_limit", "tokenizer_limit", "expected"),
    [
        (12, None, 12),
        (12, 30, 12),
        (None, 30, 30),
        (None, int(1e30), 40),
        (None, float("inf"), 40),
        (500, None, 40),
        (None, None, 40),
    ],
)
def test_longest_sequence(folder: Path, sentence_limit: int | None, tokenizer_limit: int | None, expected: int):
    """max_seq_length decides, else the tokenizer's model_max_length, never more than the model takes."""
    write_modules(folder, MEAN)
    write(folder, "sentence_bert_config.json", {"max_seq_length": sentence_limit, "do_lower_case": False})
    write(folder, "tokenizer_config.json", {"model_max_length": tokenizer_limit})
    assert settings_of(folder).max_tokens == expected


@pytest.mark.parametrize("limit", [0, -1, "256", True, float("nan")])
def test_an_impossible_limit_is_refused(folder: Path, limit: object):
    """A max_seq_length that is no number of tokens is refused with its file and value."""
    write(folder, "sentence_bert_config.json", {"max_seq_length": limit})
    with pytest.raises(CheckpointError, match="max_seq_length must be a number of tokens") as caught:
        settings_of(folder)
    assert "sentence_bert_config.json" in str(caught.value)
    assert repr(limit) in str(caught.value)


def test_prompts(folder: Path):
    """Prompts are read, and which of them is the default."""
    write_modules(folder, MEAN)
    prompts = {"query": "query: ", "passage": "passage: "}
    write(folder, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    settings = settings_of(folder)
    assert (settings.prompts, settings.default_prompt_name) == (prompts, "query")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"prompts": ["query: "]}, "prompts must map names to texts"),
        ({"prompts": {"query": 3}}, "prompts must map names to texts"),
        ({"prompts": {"a": "x"}, "default_prompt_name": "b"}, r"default_prompt_name 'b' is not among prompts \['a'\]"),
        ({"prompts": {"a": "x"}, "default_prompt_name": ["a"]}, "default_prompt_name .* is not among prompts"),
        ({"default_prompt_name": "b"}, "default_prompt_name 'b' is not among prompts"),
    ],
)
def test_broken_prompts_are_refused(folder: Path, content: object, reason: str):
    """Prompts of another form, and a default that is none of them, are refused."""
    write_modules(folder, MEAN)
    write(folder, "config_sentence_transformers.json", content)
    with pytest.raises(CheckpointError, match=reason):
        settings_of(folder)


def test_prompts_outside_the_pooling_are_refused(folder: Path):
    """A pooling that leaves the prompt's tokens out is refused where there are prompts."""
    write_modules(folder, {"pooling_mode": "mean", "include_prompt": False})
    assert settings_of(folder).pooling == "mean"
    write(folder, "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    with pytest.raises(CheckpointError, match="include_prompt=false, which is not supported"):
        settings_of(folder)


@pytest.mark.parametrize("kind", ["Dense", "WeightedLayerPooling", "LayerNorm"])
def test_other_modules_are_refused(folder: Path, kind: str):
    """A module that is not supported is refused by its name, with those that are."""
    write_modules(folder, MEAN, {"path": "2_Other", "type": f"sentence_transformers.models.{kind}"})
    with pytest.raises(CheckpointError, match=f"the module {kind}, .*supported: Transformer, Pooling, Normalize"):
        settings_of(folder)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([], "lists no module"),
        ([POOLING, TRANSFORMER], "must list one Transformer module, and list it first"),
        ([TRANSFORMER, TRANSFORMER], "must list one Transformer module, and list it first"),
        ({"0": TRANSFORMER}, "must hold a JSON list, got dict"),
        (["Transformer"], "must list objects with type and path"),
        ([{"path": ""}], "must list objects with type and path"),
        ([TRANSFORMER, POOLING], r"config\.json is missing"),
    ],
)
def test_broken_modules_are_refused(folder: Path, modules: object, reason: str):
    """A modules.json of another form or order, or that names what is not there, is refused."""
    write(folder, "modules.json", modules)
    with pytest.raises(CheckpointError, match=reason):
        settings_of(folder)


def test_what_sentence_transformers_saves_now(plain: Path, tmp_path: Path):
    """A folder saved by the installed sentence-transformers gives the settings that it was saved with."""
    modules = [Transformer(str(plain), max_seq_length=20), Pooling(24, pooling_mode="max"), Normalize()]
    prompts = {"query": "query: ", "document": ""}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts, default_prompt_name="query").save_pretrained(
        str(tmp_path)
    )
    expected = SentenceSettings(20, "max", normalize=True, prompts=prompts, default_prompt_name="query")
    assert settings_of(tmp_path) == expected
    assert read_tokenizer(tmp_path, config_of(tmp_path)).encode("abc").ids[0] == 2


def test_a_dense_module_saved_now_is_refused(plain: Path, tmp_path: Path):
    """A folder that the installed sentence-transformers saved with a Dense module is refused by that name."""
    modules = [Transformer(str(plain)), Pooling(24), Dense(24, 8)]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    with pytest.raises(CheckpointError, match="the module Dense, which is not supported"):
        settings_of(tmp_path)


# ---------------------------------------------------------------- tokenizer


def test_saved_truncation_and_padding_are_dropped(folder: Path):
    """A tokenizer that was saved with truncation and padding gives each text its own whole length."""
    path = folder / "tokenizer.json"
    saved = Tokenizer.from_file(str(path))
    saved.enable_truncation(3)
    saved.enable_padding(length=8)
    saved.save(str(path))
    assert len(Tokenizer.from_file(str(path)).encode("a b c d e f g h i j").ids) == 8
    tokenizer = read_tokenizer(folder, config_of(folder))
    assert (tokenizer.truncation, tokenizer.padding) == (None, None)
    assert [len(encoding.ids) for encoding in tokenizer.encode_batch(["a b c d e", "a"])] == [7, 3]


def test_lower_case(folder: Path):
    """sentence-transformers' do_lower_case lowercases the texts of a tokenizer that does not."""
    path = folder / "tokenizer.json"
    cased = Tokenizer.from_file(str(path))
    cased.normalizer = BertNormalizer(lowercase=False)
    cased.save(str(path))
    for lower, expected in ((False, "[UNK]"), (True, "a")):
        write(folder, "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": lower})
        assert read_tokenizer(folder, config_of(folder)).encode("A").tokens == ["[CLS]", expected, "[SEP]"]


def test_ids_beyond_the_vocabulary_are_refused(folder: Path):
    """A tokenizer with more ids than the embedding has rows is refused with both numbers."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(path))
    with pytest.raises(CheckpointError, match="has ids up to 41, config field vocab_size is 41"):
        read_tokenizer(folder, config_of(folder))


@pytest.mark.parametrize("text", ["", "{}", "nonsense"])
def test_an_unreadable_tokenizer_is_refused(folder: Path, text: str):
    """A tokenizer.json that is none is refused with its path."""
    (folder / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        read_tokenizer(folder, config_of(folder))


@pytest.mark.parametrize("vocabulary", [None, ""])
def test_a_folder_without_tokenizer_is_refused(folder: Path, vocabulary: str | None):
    """A folder without the files of a tokenizer, or with an empty vocabulary, says so, with its path."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    if vocabulary is not None:
        (folder / "vocab.txt").write_text(vocabulary, "utf-8")
    with pytest.raises(CheckpointError, match=r"has no tokenizer|has an empty vocabulary") as caught:
        read_tokenizer(folder, config_of(folder))
    assert str(folder) in str(caught.value)


def test_a_vocabulary_alone_is_converted(folder: Path):
    """A folder with vocab.txt alone gets BERT's tokenizer: lower case, [CLS] and [SEP], word pieces."""
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)), "utf-8")
    tokenizer = read_tokenizer(folder, config_of(folder))
    encoding = tokenizer.encode("Bad Z", "é ?")
    assert encoding.tokens == ["[CLS]", "b", "##a", "##d", "z", "[SEP]", "e", "[UNK]", "[SEP]"]
    assert encoding.ids == [vocabulary[token] for token in encoding.tokens]
    assert encoding.type_ids == [0] * 6 + [1] * 3
