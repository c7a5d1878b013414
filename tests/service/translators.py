"""Translators: tiny seeded encoder-decoder checkpoints, made by transformers, whose words are several tokens."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attencode import Client
from tests.service.faulty import Faults, Running, serving

_SPECIALS = ("<pad>", "</s>", "<unk>", "<s>")
_VOCABULARY = [*_SPECIALS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
PAD, END, START = 0, 1, 3


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=len(_VOCABULARY),
        d_model=24,
        d_kv=6,
        d_ff=40,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        n_positions=64,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    return T5ForConditionalGeneration(config)


def _bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=len(_VOCABULARY),
        d_model=24,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=3,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=END,
        forced_eos_token_id=END,
    )
    return BartForConditionalGeneration(config)


def _marian() -> Any:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=len(_VOCABULARY),
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        forced_eos_token_id=END,
        scale_embedding=True,
    )
    return MarianMTModel(config)


FAMILIES: Mapping[str, Callable[[], Any]] = {"t5": _t5, "bart": _bart, "marian": _marian}


@dataclass(frozen=True)
class Translator:
    """A served model, and transformers' own of the same weights."""

    model: Any
    artifact: Path
    faults: Faults
    running: Running

    @property
    def client(self) -> Client:
        return self.running.client

    def whole(self, item: Any) -> NDArray[np.float32]:
        """Give what transformers says of an answer's pair."""
        return cross_attentions(self.model, item.source.tokens.ids, item.target.tokens.ids)


def served(family: str, folder: Path, export: Callable[[Path], Path]) -> Iterator[Translator]:
    """Serve a family's tiny model, with company for whoever asks at the same time."""
    model, faults = save(family, folder), Faults()
    artifact = export(folder)
    settings = {"max_queue_delay_ms": 50, "max_batch_tokens": 4096, "max_inputs": 64, "max_message_bytes": 2**20}
    with serving(artifact, faults.session, **settings) as running:
        yield Translator(model, artifact, faults, running)


def save(family: str, folder: Path) -> Any:
    """Save a family's checkpoint with a tokenizer that makes a token of every letter; gives the model."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(5)
    model = FAMILIES[family]().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():  # larger weights than the usual initialisation, so that differences show
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                middle = 1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0
                parameter.copy_(middle + torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(_VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if family == "bart" else "$A </s>",
        pair="<s> $A </s> $B </s>" if family == "bart" else "$A </s> $B </s>",
        special_tokens=[("<s>", START), ("</s>", END)],
    )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return model


def cross_attentions(model: Any, source: list[int], target: list[int]) -> NDArray[np.float32]:
    """Give transformers' own cross-attention of one pair: (layers, heads, target, source)."""
    import torch

    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([source]),
            labels=torch.tensor([target]),
            output_attentions=True,
        )
    return torch.cat(output.cross_attentions).numpy()


def with_own_targets(artifact: Path, folder: Path) -> Path:
    """Copy an artifact into a folder, with a tokenizer of its own for targets: z takes a's place, y b's, and so on."""
    shutil.copytree(artifact, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    words = tokenizer["model"]["vocab"]
    turned = {word: words[word if word.startswith("<") else word[:-1] + _turned(word[-1])] for word in words}
    tokenizer["model"]["vocab"] = dict(sorted(turned.items(), key=lambda item: item[1]))
    written = json.dumps(tokenizer).encode()
    (folder / "target_tokenizer.json").write_bytes(written)
    described = json.loads((folder / "artifact.json").read_bytes())
    described["decoder"]["tokenizer"] = "target_tokenizer.json"
    digest = hashlib.sha256(written).hexdigest()
    described["files"]["target_tokenizer.json"] = {"bytes": len(written), "sha256": digest}
    (folder / "artifact.json").write_text(json.dumps(described))
    return folder


def _turned(letter: str) -> str:
    return chr(ord("a") + ord("z") - ord(letter)) if letter.isalpha() else letter
