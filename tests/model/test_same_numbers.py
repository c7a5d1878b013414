"""Settings that lie beside the weights: honoured as transformers and sentence-transformers do, or refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import families
from model.checkpoint import load_encoder, read_json
from model.errors import CheckpointError
from model.export import export
from model.families import read_config
from model.sentence import read_sentence, read_tokenizer

PACKAGE = "sentence_transformers.models."


@pytest.fixture
def checkpoint(make_bert: Callable[..., Path], tmp_path: Path) -> Path:
    """Give a copy of a tiny BERT with sentence-transformers' files."""
    folder = Path(shutil.copytree(make_bert(), tmp_path / "checkpoint"))
    modules = [{"path": "", "type": PACKAGE + "Transformer"}, {"path": "1_Pooling", "type": PACKAGE + "Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    return folder


def sentence(folder: Path) -> Any:
    return read_sentence(folder, read_config(read_json(folder / "config.json")))[0]


@pytest.mark.parametrize("case", ["roberta", "xlm-roberta", "camembert", "mpnet", "bert", "distilbert", "t5, plain"])
def test_a_padding_token_in_a_text(tmp_path: Path, case: str) -> None:
    """A text that holds the padding token's own string is numbered as transformers numbers it."""
    model = families.save(case, tmp_path)
    pad = model.config.pad_token_id
    ids = torch.tensor([[5, 9, pad, 11, 12, 2]])
    mask = torch.ones_like(ids)
    expected = families.oracle(model, ids, mask)
    with torch.inference_mode():
        got = load_encoder(tmp_path)(ids, mask, torch.zeros_like(ids))
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["roberta", "distilbert", "camembert", "xlm-roberta"])
def test_other_names_of_the_settings(checkpoint: Path, family: str) -> None:
    """Maximum length and lower-casing are read from any of sentence-transformers' file names."""
    settings = {"max_seq_length": 12, "do_lower_case": True}
    (checkpoint / f"sentence_{family}_config.json").write_text(json.dumps(settings))
    assert sentence(checkpoint).max_tokens == 12


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("sentence_bert_config.json", {"config_kwargs": {"num_hidden_layers": 1}}, "config_kwargs"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 10}}}, "processing_kwargs"),
        ("sentence_bert_config.json", {"processor_kwargs": {"truncation_side": "left"}}, "processor_kwargs"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
            "modality_config",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim"),
    ],
)
def test_settings_that_are_not_supported(checkpoint: Path, name: str, settings: dict[str, Any], named: str) -> None:
    """A setting that would change the numbers is refused by its name."""
    (checkpoint / name).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=named):
        sentence(checkpoint)


def test_modules_of_the_checkpoints_own(checkpoint: Path) -> None:
    """A class from another package is refused, even under a known name."""
    modules = json.loads((checkpoint / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"the module custom_st\.Transformer, which is not supported"):
        sentence(checkpoint)


def test_an_encoder_in_a_folder_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """The Transformer module's folder is where config, weights and tokenizer are read from."""
    inner = checkpoint / "0_Transformer"
    inner.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file() and path.name != "modules.json":
            path.rename(inner / path.name)
    (inner / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 7}))
    modules = json.loads((checkpoint / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    artifact = export(str(checkpoint), tmp_path / "artifact", report=lambda _line: None)
    assert json.loads((artifact / "artifact.json").read_text())["max_tokens"] == 7


@pytest.mark.parametrize("change", [{"dense_act_fn": "gelu"}, {"is_gated_act": True}])
def test_t5_fields_at_odds(tmp_path: Path, change: dict[str, Any]) -> None:
    """T5's two ways of saying its feed-forward must agree."""
    families.save("t5, plain", tmp_path)
    raw = read_json(tmp_path / "config.json")
    assert read_config(raw).hidden_act == "relu"
    with pytest.raises(CheckpointError, match=next(iter(change))):
        read_config({**raw, **change})


@pytest.mark.parametrize("wanted", [True, False])
def test_a_space_before_the_text(checkpoint: Path, wanted: bool) -> None:
    """A byte-level tokenizer follows its config on the space before a text."""
    words = {"a": 0, "Ġa": 1, "b": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not wanted)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": wanted}))
    config = read_config(read_json(checkpoint / "config.json"))
    assert read_tokenizer(checkpoint, config).encode("a").ids == [int(wanted)]
