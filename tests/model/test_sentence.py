"""What surrounds the encoder: sentence-transformers' settings."""

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from model.checkpoint import read_json
from model.config import EncoderConfig
from model.errors import CheckpointError
from model.families import read_config
from model.sentence import SentenceSettings, read_sentence, read_tokenizer

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"pooling_mode": "mean"}


def write(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")


def write_modules(folder: Path, pooling: object, *more: object) -> None:
    write(folder, "modules.json", [TRANSFORMER, POOLING, *more])
    write(folder, "1_Pooling/config.json", pooling)


def config_of(folder: Path) -> EncoderConfig:
    return read_config(read_json(folder / "config.json"))


def settings_of(folder: Path) -> SentenceSettings:
    return read_sentence(folder, config_of(folder))[0]


def poolings_of(folder: Path) -> tuple[str, ...]:
    return read_sentence(folder, config_of(folder))[1].poolings


def pooling_of(folder: Path) -> str:
    return read_sentence(folder, config_of(folder))[1].pooling


def test_a_plain_folder_gets_the_defaults(folder: Path):
    """Without modules.json: mean pooling, not normalized, no prompts, all the tokens that the model takes."""
    assert settings_of(folder) == SentenceSettings(
        40, normalize=False, prompts={}, default_prompt_name=None, pool_prompt=True
    )
    assert pooling_of(folder) == "mean"


def test_minilm(minilm: Path):
    """The real checkpoint's own files are read: mean, normalized, 256 tokens of the model's 512."""
    assert settings_of(minilm) == SentenceSettings(256, normalize=True)
    assert pooling_of(minilm) == "mean"


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
    assert pooling_of(folder) == pooling


@pytest.mark.parametrize(("mode", "pooling"), [("cls", "cls"), ("mean", "mean"), ("max", "max"), ("lasttoken", "last")])
def test_pooling_by_name(folder: Path, mode: str, pooling: str):
    """The newer one-word name decides."""
    write_modules(folder, {"embedding_dimension": 24, "pooling_mode": mode, "include_prompt": True})
    assert pooling_of(folder) == pooling
    write_modules(folder, {"pooling_mode": [mode]})
    assert pooling_of(folder) == pooling


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode": ["lasttoken", "max", "mean"]}, ("last", "max", "mean")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            ("max", "mean", "last"),
        ),
    ],
)
def test_several_poolings(folder: Path, pooling: object, expected: tuple[str, ...]):
    """Several poolings stand side by side: names as they are listed, flags in sentence-transformers' own order."""
    write_modules(folder, pooling)
    assert (poolings_of(folder), pooling_of(folder)) == (expected, "sentence")


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": ["mean", "weightedmean"]}, "mean + weightedmean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "pooling_mode_mean_sqrt_len_tokens"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_weightedmean_tokens": True},
            "pooling_mode_weightedmean_tokens + pooling_mode_cls_token",
        ),
        ({"pooling_mode_mean_tokens": False}, "none"),
    ],
)
def test_other_poolings_are_refused(folder: Path, pooling: object, named: str):
    """A pooling that is not supported, alone or among others, is refused by its name, with those that are."""
    write_modules(folder, pooling)
    with pytest.raises(CheckpointError, match="supported: cls, max, mean, lasttoken") as caught:
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


def test_prompts_outside_the_pooling(folder: Path):
    """A pooling may leave the prompt's tokens out; without a word about it they are pooled."""
    for pooling, expected in (
        (MEAN, True),
        (MEAN | {"include_prompt": True}, True),
        (MEAN | {"include_prompt": False}, False),
    ):
        write_modules(folder, pooling)
        assert settings_of(folder).pool_prompt is expected
        assert pooling_of(folder) == "mean"


@pytest.mark.parametrize("kind", ["WeightedLayerPooling", "LayerNorm", "Router"])
def test_other_modules_are_refused(folder: Path, kind: str):
    """A module that is not supported is refused by its name, with those that are."""
    write_modules(folder, MEAN, {"path": "2_Other", "type": f"sentence_transformers.models.{kind}"})
    with pytest.raises(CheckpointError, match=f"the module {kind}, .*: Transformer, Pooling, Dense, Normalize"):
        settings_of(folder)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([], "lists no module"),
        ([TRANSFORMER], "must list a Transformer module and then a Pooling module"),
        ([POOLING, TRANSFORMER], "must list a Transformer module and then a Pooling module"),
        ([TRANSFORMER, TRANSFORMER], "must list a Transformer module and then a Pooling module"),
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
    expected = SentenceSettings(20, normalize=True, prompts=prompts, default_prompt_name="query")
    assert settings_of(tmp_path) == expected
    assert pooling_of(tmp_path) == "max"
    assert read_tokenizer(tmp_path, config_of(tmp_path)).encode("abc").ids[0] == 2


def test_a_dense_module_makes_a_vector_of_its_own(plain: Path, tmp_path: Path):
    """A Dense module saved by the installed sentence-transformers is read: its width, and the name `sentence`."""
    modules = [Transformer(str(plain)), Pooling(24), Dense(24, 8)]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    _, head = read_sentence(tmp_path, config_of(tmp_path))
    assert (head.pooling, head.poolings, head.size(24)) == ("sentence", ("mean",), 8)
