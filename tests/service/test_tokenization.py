"""Tokenization: spans, truncation, pairs, prompts and token ids, held against transformers."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.artifact import open_artifact
from service.errors import InvalidRequest
from service.request import TextInput, TokenIdsInput, TokenizeRequest, Tokens
from service.tokenization import Sequence, TextTokenizer

TEXTS = {
    "ascii": "Time flies like an arrow.",
    "accents": "Éléphants à la plage, naïve façade",
    "decomposed": "e\u0301te\u0301 cafe\u0301",
    "chinese": "注意力机制 is all you need 你好",
    "emoji": "a family 👨‍👩‍👧‍👦 and a flag 🇳🇴 here",
    "right to left": "שלום עולם and مرحبا بالعالم",
    "control": "a\x00b \x07c\tdef",
}


@pytest.fixture(scope="module")
def tokenizer(minilm_artifact: Path) -> TextTokenizer:
    """Give the default model's tokenizer."""
    return TextTokenizer(open_artifact(minilm_artifact))


@pytest.fixture(scope="module")
def oracle(minilm: Path) -> Any:
    """Give transformers' tokenizer for the same model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm)


def tokens_of(tokenizer: TextTokenizer, *inputs: Any, **options: Any) -> list[Tokens]:
    sequences = tokenize(tokenizer, *inputs, **options)
    assert all(sequence.tokens for sequence in sequences)
    return [sequence.tokens for sequence in sequences if sequence.tokens]


def tokenize(tokenizer: TextTokenizer, *inputs: Any, describe: bool = True, **options: Any) -> list[Sequence]:
    items = tuple(TextInput(item) if isinstance(item, str) else item for item in inputs)
    return tokenizer.tokenize(TokenizeRequest(items, **options), describe=describe)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_spans_cover_what_the_tokens_are(tokenizer: TextTokenizer, oracle: Any, text: str) -> None:
    """text[start:end] is the token's text, in characters and in bytes, as transformers has it."""
    (tokens,) = tokens_of(tokenizer, text)
    expected = oracle(text, return_offsets_mapping=True)
    assert tokens.ids == expected["input_ids"]
    data = text.encode()
    for (start, end), (first, last), special, offsets in zip(
        tokens.char_spans, tokens.byte_spans, tokens.special, expected["offset_mapping"], strict=True
    ):
        assert (start, end) == tuple(offsets)
        assert data[first:last].decode() == text[start:end]
        assert special == (start == end)


def test_a_span_is_the_word_it_names(tokenizer: TextTokenizer) -> None:
    """Spans are right where characters, bytes and code units all differ."""
    text = "👨‍👩‍👧‍👦 注 café"
    (tokens,) = tokens_of(tokenizer, text)
    place = tokens.texts.index("cafe")
    start, end = tokens.char_spans[place]
    assert text[start:end] == "café"
    first, last = tokens.byte_spans[place]
    assert text.encode()[first:last] == "café".encode()


def test_words_group_pieces(tokenizer: TextTokenizer) -> None:
    """Pieces of one word have its number, special tokens have none."""
    (tokens,) = tokens_of(tokenizer, "unbelievable embeddings")
    assert tokens.words[0] == tokens.words[-1] == -1
    pieces = [text for text, word in zip(tokens.texts, tokens.words, strict=True) if word == 1]
    assert pieces == ["em", "##bed", "##ding", "##s"]


@pytest.mark.parametrize("truncation", ["right", "left"])
def test_truncation_keeps_special_tokens(tokenizer: TextTokenizer, oracle: Any, truncation: str) -> None:
    """A long text loses tokens from one end, keeps its special tokens, and says how long it was."""
    text = " ".join(f"word{number}" for number in range(400))
    oracle.truncation_side = truncation
    expected = oracle(text, truncation=True, max_length=256)["input_ids"]
    (sequence,) = tokenize(tokenizer, text, truncation=truncation)
    assert sequence.input_ids.tolist() == expected
    assert sequence.original_length == len(oracle(text, truncation=False)["input_ids"]) > 256


@pytest.mark.parametrize(("first", "second"), [(10, 400), (400, 10), (300, 300), (301, 300), (126, 127), (127, 127)])
@pytest.mark.parametrize("truncation", ["right", "left"])
def test_pairs_lose_from_the_longer_text(
    tokenizer: TextTokenizer, oracle: Any, first: int, second: int, truncation: str
) -> None:
    """Of a pair the longer text is cut first, exactly as transformers' longest_first does."""
    texts = ("dog " * first, "cat " * second)
    oracle.truncation_side = truncation
    expected = oracle(*texts, truncation="longest_first", max_length=256)
    (sequence,) = tokenize(tokenizer, TextInput(*texts), truncation=truncation)
    assert sequence.input_ids.tolist() == expected["input_ids"]
    assert sequence.token_type_ids is not None
    assert sequence.token_type_ids.tolist() == expected["token_type_ids"]


def test_truncation_off_refuses(tokenizer: TextTokenizer) -> None:
    """With truncation off the error says how long the text is, how long it may be and what to do."""
    with pytest.raises(InvalidRequest, match=r"sequence of 302 tokens exceeds the model's 256; set truncation"):
        tokenize(tokenizer, "dog " * 300, truncation="off")


def test_described_and_plain_agree(tokenizer: TextTokenizer) -> None:
    """Asking for a description changes no id."""
    inputs = [*TEXTS.values(), TextInput("one", "two"), "dog " * 500]
    for plain, described in zip(
        tokenize(tokenizer, *inputs, describe=False), tokenize(tokenizer, *inputs), strict=True
    ):
        assert plain.input_ids.tolist() == described.input_ids.tolist()
        assert plain.tokens is None
        assert described.tokens is not None
        assert len(described.tokens) == described.length


@pytest.mark.parametrize("text", ["", " ", "\n\t  ", "\x00\x01", "\u200b"])
def test_text_without_tokens_is_refused(tokenizer: TextTokenizer, text: str) -> None:
    """Empty text and text that the tokenizer drops whole is the caller's error, with the input's number."""
    with pytest.raises(InvalidRequest, match=r"input 1 (is empty|has no token)"):
        tokenize(tokenizer, "fine", text)


@pytest.mark.parametrize("pair", [("a", ""), ("", "a"), ("a", " "), (" ", "a")])
def test_half_empty_pairs_are_refused(tokenizer: TextTokenizer, pair: tuple[str, str]) -> None:
    """Both texts of a pair need a token."""
    with pytest.raises(InvalidRequest, match="input 0"):
        tokenize(tokenizer, TextInput(*pair))


def test_token_ids_pass_through(tokenizer: TextTokenizer) -> None:
    """Ids that Tokenize gave encode to the same sequence; they have no spans."""
    (sequence,) = tokenize(tokenizer, "time flies")
    ids = tuple(sequence.input_ids.tolist())
    (again,) = tokenize(tokenizer, TokenIdsInput(ids))
    assert tuple(again.input_ids.tolist()) == ids
    assert again.tokens is not None
    assert again.tokens.special == [True, False, False, True]
    assert set(again.tokens.char_spans) == {(0, 0)}


def test_a_pair_of_token_ids(tokenizer: TextTokenizer) -> None:
    """Ids of a pair are described and cut like the pair itself: separators stay, the longer text loses first."""
    for first, second in ((2, 3), (10, 400), (300, 300)):
        pair = TextInput("dog " * first, "cat " * second)
        (whole,) = tokenize(tokenizer, pair)
        cls, sep, dog, cat = 101, 102, 3899, 4937
        ids = (cls, *[dog] * first, sep, *[cat] * second, sep)
        types = (*[0] * (first + 2), *[1] * (second + 1))
        (again,) = tokenize(tokenizer, TokenIdsInput(ids, types))
        assert again.input_ids.tolist() == whole.input_ids.tolist()
        assert again.token_type_ids is not None
        assert again.token_type_ids.tolist() == whole.token_type_ids.tolist()  # type: ignore[union-attr]
        assert again.tokens is not None
        assert again.tokens.special == whole.tokens.special  # type: ignore[union-attr]
        assert again.tokens.sequences == whole.tokens.sequences  # type: ignore[union-attr]


def test_long_token_ids_are_truncated(tokenizer: TextTokenizer) -> None:
    """Token ids obey the same length policy as text."""
    ids = (101, *range(2000, 2300), 102)
    for truncation, first, last in (("right", 2000, 2253), ("left", 2046, 2299)):
        (sequence,) = tokenize(tokenizer, TokenIdsInput(ids), truncation=truncation)
        assert sequence.input_ids[[0, 1, -2, -1]].tolist() == [101, first, last, 102]
        assert (sequence.length, sequence.original_length) == (256, 302)
    with pytest.raises(InvalidRequest, match="sequence of 302 tokens"):
        tokenize(tokenizer, TokenIdsInput(ids), truncation="off")


@pytest.mark.parametrize(
    ("ids", "types", "message"),
    [
        ((), None, "no token ids"),
        ((101, 30522, 102), None, "outside the vocabulary of 30522"),
        ((2000, 2001), None, r"must begin with 101 \(\[CLS\]\) and end with 102 \(\[SEP\]\)"),
        ((101, 2000), None, "must begin"),
        ((101,), None, "must begin"),
        ((101, 102), None, "special tokens alone"),
        ((101, 2000, 0, 102), None, "holds the padding token 0"),
        ((101, 2000, 102), (0, 0), "3 ids and 2 token_type_ids"),
        ((101, 2000, 102), (0, 0, 2), "token_type_id 2 must be below 2"),
    ],
)
def test_bad_token_ids(tokenizer: TextTokenizer, ids: tuple[int, ...], types: Any, message: str) -> None:
    """Token ids that no tokenizer makes are refused with what is wrong."""
    with pytest.raises(InvalidRequest, match=message):
        tokenize(tokenizer, TokenIdsInput(ids, types))


@pytest.fixture
def prompted(
    make_bert: Callable[..., Path], export_artifact: Callable[[Path], Path], minilm_artifact: Path, tmp_path: Path
) -> TextTokenizer:
    """Give a tokenizer with prompts: the default model's files with other words in its description."""
    for path in minilm_artifact.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    description = json.loads((tmp_path / "artifact.json").read_text())
    description |= {"prompts": {"query": "query: ", "plain": ""}, "default_prompt_name": "query"}
    (tmp_path / "artifact.json").unlink()
    (tmp_path / "artifact.json").write_text(json.dumps(description))
    return TextTokenizer(open_artifact(tmp_path))


def test_prompts_come_first(prompted: TextTokenizer) -> None:
    """The default prompt is used unless another one, or none, is named; spans still count from the text."""
    (tokens,) = tokens_of(prompted, "big dog")
    assert tokens.texts == ["[CLS]", "query", ":", "big", "dog", "[SEP]"]
    assert tokens.char_spans == [(0, 0), (0, 0), (0, 0), (0, 3), (4, 7), (0, 0)]
    assert tokens.words == [-1, -1, -1, 0, 1, -1]
    for name in ("", "plain"):
        (tokens,) = tokens_of(prompted, "big dog", prompt_name=name)
        assert tokens.texts == ["[CLS]", "big", "dog", "[SEP]"]


def test_unknown_prompt(prompted: TextTokenizer) -> None:
    """An unknown prompt names those that exist."""
    with pytest.raises(InvalidRequest, match="prompt_name 'nope' is unknown; this model's prompts: plain, query"):
        tokenize(prompted, "x", prompt_name="nope")


def test_prompts_go_with_text_alone(prompted: TextTokenizer) -> None:
    """A prompt cannot stand before token ids, and the default one is then left out."""
    ids = TokenIdsInput((101, 2000, 102))
    assert tokenize(prompted, ids)[0].length == 3
    with pytest.raises(InvalidRequest, match="goes with texts"):
        tokenize(prompted, ids, prompt_name="query")


def test_a_prompt_does_not_make_empty_text_full(prompted: TextTokenizer) -> None:
    """Empty and blank text stay refused behind a prompt."""
    for text in ("", "  "):
        with pytest.raises(InvalidRequest, match="input 0"):
            tokenize(prompted, text)


def test_a_megabyte_of_text(tokenizer: TextTokenizer) -> None:
    """A text of 1 MB is cut like any other, and its description covers the kept tokens alone."""
    (sequence,) = tokenize(tokenizer, "word " * 200_000)
    assert (sequence.length, sequence.original_length) == (256, 200_002)
    assert sequence.tokens is not None
    assert len(sequence.tokens) == 256


@pytest.mark.parametrize("prompt", ["query: ", "Represent this sentence:"])
def test_words_behind_a_prompt_with_word_marks(minilm_artifact: Path, tmp_path: Path, prompt: str) -> None:
    """With a tokenizer whose word mark is a token of its own, words still count from the text's first."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    for path in minilm_artifact.iterdir():
        if path.name not in ("artifact.json", "tokenizer.json"):
            (tmp_path / path.name).hardlink_to(path)
    pieces = [("<unk>", 0.0), ("▁", -1.0), *((character, -2.0) for character in "abcdefghijklmnopqrstuvwxyzR:")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    description = json.loads((minilm_artifact / "artifact.json").read_text())
    content = (tmp_path / "tokenizer.json").read_bytes()
    description["files"]["tokenizer.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    description |= {"prompts": {"p": prompt}, "default_prompt_name": None}
    (tmp_path / "artifact.json").write_text(json.dumps(description))
    marked = TextTokenizer(open_artifact(tmp_path))
    (plain,) = tokens_of(marked, "time flies like")
    (prompted,) = tokens_of(marked, "time flies like", prompt_name="p")

    def spelled(tokens: Tokens) -> dict[int, str]:
        words: dict[int, str] = {}
        for text, word in zip(tokens.texts, tokens.words, strict=True):
            words[word] = words.get(word, "") + text.strip("▁")
        words.pop(-1, None)
        return words

    assert spelled(plain) == {0: "time", 1: "flies", 2: "like"}
    if prompt.endswith(" "):  # else the tokenizer itself joins prompt and text into one word
        assert spelled(prompted) == spelled(plain)
    else:
        assert list(spelled(prompted).values())[1:] == ["flies", "like"]
