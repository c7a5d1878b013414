"""Tokenizers from sentencepiece models: the ids of transformers' MarianTokenizer, and of sentencepiece for T5."""

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pieces
import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import MarianTokenizer

import families
from model.errors import CheckpointError
from model.export import export
from model.families import read_config
from model.pieces import read_marian, read_t5
from model.sentence import read_tokenizer
from model.spm import read_spm
from service.artifact import open_artifact

TEXTS = [
    "the old man sat by the river.",
    "der alte mann saß am fluß",
    "  two   spaces  ",
    "",
    "   ",
    "ﬁsh in ½ boats",  # characters that the normalizer maps
    "the\ttab\nnewline",
    "e\u0301té 漢字 and 🙂🙂 x",
    "▁the ▁ old",
    ">>deu<< the old man",
    "a </s> b <unk> c <pad>",
    "riverboats  !",
    "saß",
]


def random_texts(letters: str) -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices(letters, k=draw.randint(1, 30))) for _ in range(200)]


@pytest.fixture(scope="module", params=[False, True], ids=["one", "two"])
def marian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the files of a Marian tokenizer, with one vocabulary for both sides or one for each."""
    folder = tmp_path_factory.mktemp("marian")
    pieces.save_marian(folder, separate=request.param)
    return folder


@pytest.mark.parametrize("target", [False, True], ids=["source", "target"])
def test_marian_gives_transformers_ids(marian: Path, target: bool) -> None:
    """Each side's ids are MarianTokenizer's, whatever a text holds; a row of unknown characters apart."""
    with warnings.catch_warnings(action="ignore"):  # of a package that it does without
        theirs = MarianTokenizer.from_pretrained(marian)
    ours = read_marian(marian, target=target, vocab_size=pieces.VOCABULARY)
    known = "".join(sorted({*"".join(pieces.GERMAN if target else pieces.ENGLISH)}))
    others = "ß" if not target else "c"
    texts = [*TEXTS, *random_texts(known + " .!?"), *(f"the {others} {word}" for word in random_texts(known))]
    for text in texts:
        expected = theirs(text_target=text)["input_ids"] if target else theirs(text)["input_ids"]
        assert ours.encode(text).ids == expected, text


def test_offsets_are_those_of_the_text(marian: Path) -> None:
    """A token's place is in the text as it came, and words are numbered."""
    text = "  the  ①oats"
    encoding = read_marian(marian, target=False, vocab_size=pieces.VOCABULARY).encode(text)
    assert "".join(text[start:stop] for start, stop in encoding.offsets).split() == ["the", "①oats"]
    assert [number for number in encoding.word_ids if number is not None][-1] == 1
    assert encoding.special_tokens_mask[-1] == 1


def test_t5_gives_sentencepieces_ids(tmp_path: Path) -> None:
    """A T5 with spiece.model alone gets sentencepiece's ids, `</s>` behind them, and sentinels at the end."""
    pieces.save_spm(tmp_path / "spiece.model", pieces.ENGLISH, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 5}', "utf-8")
    config = read_config(json.loads(families.make_model("t5, plain").config.to_json_string()) | {"vocab_size": 200})
    ours = read_tokenizer(tmp_path, config)
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "spiece.model"))
    for text in [text for text in TEXTS if "<" not in text] + random_texts("abcdehimnorstuvw .!?XY"):
        assert ours.encode(text).ids == [*theirs.encode(text), 1], text
    size = theirs.GetPieceSize()
    assert ours.encode("<extra_id_0><extra_id_4>").ids == [size + 4, size, 1]
    assert ours.encode("a", "a").ids == [*ours.encode("a").ids, *ours.encode("a").ids]


def test_an_export_has_both_tokenizers(tmp_path: Path) -> None:
    """A Marian checkpoint's artifact holds a tokenizer for each side, and the service opens it."""
    families.save("marian", tmp_path / "checkpoint", whole=True)
    for path in (tmp_path / "checkpoint").glob("*token*"):
        path.unlink()
    pieces.save_marian(tmp_path / "checkpoint")
    vocabulary = json.loads((tmp_path / "checkpoint/vocab.json").read_text("utf-8"))
    kept = {token: number for token, number in vocabulary.items() if number < 60}
    (tmp_path / "checkpoint/vocab.json").write_text(json.dumps(kept), "utf-8")
    artifact = open_artifact(export(str(tmp_path / "checkpoint"), tmp_path / "artifact", report=lambda _line: None))
    assert artifact.decoder is not None
    assert artifact.decoder.tokenizer == "target_tokenizer.json"
    for target, name in ((False, "tokenizer.json"), (True, "target_tokenizer.json")):
        exported = Tokenizer.from_file(str(artifact.folder / name))
        ours = read_marian(tmp_path / "checkpoint", target=target, vocab_size=60)
        assert exported.encode("der old boats").ids == ours.encode("der old boats").ids


@pytest.mark.parametrize(
    ("settings", "start"),
    [({"tgt_lang": "the"}, 2), ({}, 2), ({"tgt_lang": "nowhere"}, 2), ({"tgt_lang": "the"}, 5)],
    ids=str,
)
def test_an_mbarts_target_has_its_own_language(tmp_path: Path, settings: dict[str, object], start: int) -> None:
    """The target's code stands where the source's does; an mBART that is told none is exported without Align."""
    families.save("mbart", tmp_path / "checkpoint", whole=True)
    path = tmp_path / "checkpoint/tokenizer_config.json"
    raw = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if key != "tgt_lang"}
    path.write_text(json.dumps(raw | settings), "utf-8")
    path = tmp_path / "checkpoint/config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"decoder_start_token_id": start}), "utf-8")
    lines: list[str] = []
    artifact = open_artifact(export(str(tmp_path / "checkpoint"), tmp_path / "artifact", report=lines.append))
    if (settings, start) != ({"tgt_lang": "the"}, 2):
        assert artifact.decoder is None
        assert "decoder" not in lines[0]
        return
    source, target = (Tokenizer.from_file(str(artifact.folder / f"{name}tokenizer.json")) for name in ("", "target_"))
    ids = source.encode("a b").ids
    assert target.encode("a b").ids == [source.token_to_id("the"), *ids[1:]]
    assert target.encode("").ids[-1] == artifact.decoder.start_token_id


# ---------------------------------------------------------------- what is refused


def _change(**values: object) -> Callable[[Path], object]:
    """Change numbers of the vocabulary; None takes a token out."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "vocab.json").read_text("utf-8")) | values
        (folder / "vocab.json").write_text(
            json.dumps({key: one for key, one in raw.items() if one is not None}), "utf-8"
        )

    return change


def _normalizer(content: bytes) -> Callable[[Path], object]:
    """Put another normalizer's table behind the model's own, which readers take instead."""
    inner = b"\x12" + bytes([len(content)]) + content
    added = b"\x1a" + bytes([len(inner)]) + inner
    return lambda folder: (folder / "source.spm").write_bytes((folder / "source.spm").read_bytes() + added)


def _append(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "source.spm").write_bytes((folder / "source.spm").read_bytes() + content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "source.spm").write_bytes(b"\xff" * 99), r"source\.spm is no sentencepiece model"),
        (lambda folder: (folder / "source.spm").write_bytes(b""), r"source\.spm has no piece"),
        (lambda folder: (folder / "source.spm").unlink(), r"source\.spm is missing"),
        (_append(b"\x12\x02\x18\x02"), r"source\.spm is of a kind that is not supported"),  # a BPE model
        (
            _append(b"\x12\x03\x98\x02\x01"),
            r"source\.spm is of a kind that is not supported",
        ),  # bytes for what is unknown
        (_append(b"\x1a\x02\x18\x00"), r"source\.spm is of a kind that is not supported"),  # no space before a text
        (_normalizer(b"\xff\xff\xff\xff"), r"source\.spm has a table of characters that declares 4294967295 bytes"),
        (lambda folder: (folder / "vocab.json").unlink(), r"vocab\.json is missing"),
        (_change(the=500), r"vocab\.json must give each token a number of its own below vocab_size=200"),
        (_change(the=-1), r"vocab\.json must give each token a number of its own"),
        (_change(the="1"), r"vocab\.json must give each token a number of its own"),
        (_change(the=0), r"vocab\.json must give each token a number of its own"),
        (_change(**{"<unk>": None}), r"vocab\.json lacks <unk>"),
    ],
)
def test_marian_files_that_are_broken(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    """What cannot be read exactly is refused, and the message names the file."""
    pieces.save_marian(tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_marian(tmp_path, target=False, vocab_size=pieces.VOCABULARY)


@pytest.mark.parametrize("extra", [-1, 1000, "5", True])
def test_t5_sentinels_that_cannot_be(tmp_path: Path, extra: Any) -> None:
    """A number of sentinels that is none, or is larger than the vocabulary, is refused."""
    pieces.save_spm(tmp_path / "spiece.model", pieces.ENGLISH, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": extra}), "utf-8")
    with pytest.raises(CheckpointError, match=r"extra_ids must be a number of tokens"):
        read_t5(tmp_path, 200)


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    """A model that lies elsewhere is not read."""
    (tmp_path / "inner").mkdir()
    pieces.save_spm(tmp_path / "elsewhere", pieces.ENGLISH)
    (tmp_path / "inner/source.spm").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"source\.spm is a link to .*outside of its folder"):
        read_spm(tmp_path / "inner/source.spm")
