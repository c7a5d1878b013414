"""The tokenizer of a folder: what is dropped of it, what is put before it, what is refused."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer

from model.checkpoint import read_json
from model.config import EncoderConfig
from model.errors import CheckpointError
from model.families import read_config
from model.sentence import read_tokenizer


def config_of(folder: Path) -> EncoderConfig:
    return read_config(read_json(folder / "config.json"))


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
        settings = {"max_seq_length": 20, "do_lower_case": lower}
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings), "utf-8")
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
