"""What tests of hostile checkpoints share."""

import json
from pathlib import Path

from model.checkpoint import load_encoder
from model.sentence import read_sentence, read_tokenizer

MODULES = ["Transformer", "Pooling", "Dense"]


def write_modules(folder: Path, *more: dict[str, str]) -> None:
    paths = ["", "1_Pooling", "2_Dense"]
    listed = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in zip(paths, MODULES, strict=True)
    ]
    (folder / "modules.json").write_text(json.dumps(listed[: 2 if more else 3] + list(more)), "utf-8")
    change(folder / "1_Pooling/config.json", pooling_mode_mean_tokens=True)
    change(folder / "2_Dense/config.json", in_features=24, out_features=24, bias=False)


def load(folder: Path) -> None:
    """Read a folder in the order in which an export reads it."""
    encoder = load_encoder(folder)
    read_sentence(folder, encoder.config)
    read_tokenizer(folder, encoder.config)


def change(path: Path, **values: object) -> None:
    """Change values of a JSON file, which need not be there yet."""
    raw = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(raw | values), "utf-8")
