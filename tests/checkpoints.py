"""Checkpoints: tiny seeded ones, made by transformers, for tests and for fuzzing. May import: torch, transformers."""

from pathlib import Path

VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghij"),
]


def save_bert(folder: Path, *, save: str = "safetensors", max_shard_size: str = "5GB", **config: object) -> Path:
    """Save a BERT of two layers, its weights so large that differences show, and its tokenizer; gives the folder."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

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
