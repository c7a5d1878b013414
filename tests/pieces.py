"""Tiny sentencepiece models for tests, and Marian's files around two of them. May import: sentencepiece."""

import io
import json
import random
from pathlib import Path

ENGLISH = ["the", "old", "man", "sat", "by", "river", "and", "watched", "boats", "in", "his", "garden", "near", "house"]
GERMAN = ["der", "alte", "mann", "saß", "am", "fluß", "und", "sah", "den", "booten", "zu", "in", "seinem", "garten"]
VOCABULARY = 200


def save_spm(path: Path, words: list[str], *, vocab_size: int = 70, **settings: object) -> None:
    """Train a model on random sentences of some words."""
    import sentencepiece

    draw = random.Random(len(words) + vocab_size)
    sentences = [" ".join(draw.choices(words, k=draw.randint(3, 12))) + draw.choice(".!? ") for _ in range(600)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=written,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    path.write_bytes(written.getvalue())


def save_marian(folder: Path, *, separate: bool = False) -> None:
    """Save both sides' models and their vocabulary, its numbers in an order of its own; `separate` for two of them."""
    import sentencepiece

    pieces = {}
    for name, words in (("source", ENGLISH), ("target", GERMAN)):
        save_spm(folder / f"{name}.spm", words)
        model = sentencepiece.SentencePieceProcessor(str(folder / f"{name}.spm"))
        pieces[name] = {
            model.IdToPiece(number) for number in range(model.GetPieceSize()) if not model.IsControl(number)
        }
    sides = {"vocab": pieces["source"] | (set() if separate else pieces["target"]), "target_vocab": pieces["target"]}
    for name, found in list(sides.items())[: 1 + separate]:
        tokens = sorted(found - {"<unk>"})
        random.Random(7).shuffle(tokens)
        numbered = {token: number for number, token in enumerate(["</s>", "<unk>", *tokens[:5], "<pad>", *tokens[5:]])}
        (folder / f"{name}.json").write_text(json.dumps(numbered | {">>deu<<": VOCABULARY - 1}), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": separate}), "utf-8")
