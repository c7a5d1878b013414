"""Tokenization: texts to token sequences with offsets, and the policy on length.

The tokenizer is Hugging Face's `tokenizers`, run without truncation and padding: which tokens stay is
decided here, so that the original length is known and special tokens are kept whatever the family's
template. No I/O after construction; calls release the interpreter lock and may run on any thread.
May import: artifact, decoder, tokenizer_file, request, errors, tokenizers, numpy.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from service.artifact import Artifact
from service.decoder import TARGET_TOKENIZER
from service.errors import InvalidRequest
from service.request import TextInput, TokenIdsInput, TokenizeRequest, Tokens, Truncation
from service.tokenizer_file import is_failure, load_tokenizer

_MEND = "send some text, or leave the input out"


@dataclass(frozen=True, slots=True)
class Sequence:
    """One tokenized input, special tokens included, no padding.

    Attributes:
        input_ids: (tokens,) int64.
        token_type_ids: (tokens,) int64, or None for all 0.
        original_length: Tokens before truncation.
        tokens: Their description, None unless it was asked for.
        unpooled: Leading tokens, a prompt's, that poolings leave out.
        texts: What it was made of, one or two, where tokens are described; none if it was token ids.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64] | None
    original_length: int
    tokens: Tokens | None
    unpooled: int = 0
    texts: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Count the tokens."""
        return len(self.input_ids)


class TextTokenizer:
    """One artifact's tokenizer with its length policy and prompts."""

    def __init__(self, artifact: Artifact, tokenizer: Tokenizer | None = None) -> None:
        """Load `tokenizer.json`, or take a tokenizer that is loaded.

        Raises:
            ArtifactError: It cannot be loaded.
        """
        self._tokenizer = tokenizer or load_tokenizer(artifact.folder)
        self._artifact = artifact
        # What the template puts around one text: the special tokens before and after nothing.
        template = self._tokenizer.encode("x")
        special = [sequence is None for sequence in template.sequence_ids]
        first_content = special.index(False) if False in special else len(special)
        self._prefix = template.ids[:first_content]
        pair = self._tokenizer.encode("x", "x")
        self._special_ids = {
            token for token, owner in zip(pair.ids, pair.sequence_ids, strict=True) if owner is None
        } | set(self._prefix)
        self._suffix = template.ids[len(special) - special[::-1].index(False) :] if False in special else []

    def for_targets(self) -> "TextTokenizer":
        """Give the tokenizer of what the artifact's decoder is given; the same one where it has none of its own.

        Raises:
            ArtifactError: It cannot be loaded.
        """
        decoder = self._artifact.decoder
        assert decoder is not None, "targets are for models with a decoder"
        described = replace(
            self._artifact,
            vocab_size=decoder.vocab_size,
            type_vocab_size=0,
            pad_token_id=decoder.pad_token_id,
            max_tokens=decoder.max_tokens or self._artifact.max_tokens,
            prompts={},
            default_prompt_name=None,
        )
        own = decoder.tokenizer == TARGET_TOKENIZER
        return TextTokenizer(described, load_tokenizer(described.folder, TARGET_TOKENIZER) if own else self._tokenizer)

    @property
    def max_tokens(self) -> int:
        """Longest sequence in tokens, special tokens included."""
        return self._artifact.max_tokens

    def tokenize(self, request: TokenizeRequest, *, describe: bool) -> list[Sequence]:
        """Tokenize a request's inputs, in their order.

        Args:
            request: Inputs, truncation and prompt.
            describe: Whether each sequence carries its `Tokens`.

        Raises:
            InvalidRequest: An input that is empty, too long with truncation off, or holds token ids that
                the model cannot take; an unknown prompt.
        """
        prompt = self._prompt(request)
        texts = [item for item in request.inputs if isinstance(item, TextInput)]
        batch = [prompt + item.text if item.pair is None else (prompt + item.text, item.pair) for item in texts]
        unpooled = self._unpooled(prompt)
        with_offsets = describe or prompt
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        encodings = iter(_without_panic(encode, batch) if batch else [])
        sequences = []
        for number, item in enumerate(request.inputs):
            if isinstance(item, TextInput):
                encoding = next(encodings)
                kept = self._kept(number, item, encoding, request.truncation, len(prompt))
                tokens = _describe(item, encoding, kept, len(prompt)) if describe else None
                sequence = self._sequence(item, encoding, kept, tokens, unpooled)
            else:
                sequence = self._from_ids(number, item, request.truncation, describe=describe)
            sequences.append(sequence)
        return sequences

    def _prompt(self, request: TokenizeRequest) -> str:
        name = request.prompt_name
        if name is None:
            name = self._artifact.default_prompt_name or ""
            if any(isinstance(item, TokenIdsInput) for item in request.inputs):
                name = ""
        if not name:
            return ""
        if name not in self._artifact.prompts:
            known = ", ".join(sorted(self._artifact.prompts)) or "none"
            raise InvalidRequest(f"prompt_name {name!r} is unknown; this model's prompts: {known}")
        if any(isinstance(item, TokenIdsInput) for item in request.inputs):
            raise InvalidRequest(f"prompt_name {name!r} goes with texts; leave it out, or send texts, not token ids")
        return self._artifact.prompts[name]

    def _kept(
        self, number: int, item: TextInput, encoding: Encoding, truncation: Truncation, prompt_chars: int
    ) -> SequenceOf[int]:
        """List the places that stay after truncation, special tokens among them."""
        if not item.text or item.pair == "":
            raise InvalidRequest(f"{_which(number, item, second=bool(item.text))} is empty; {_MEND}")
        special_count = len(self._prefix) + len(self._suffix)
        if item.pair is None and not prompt_chars and special_count < len(encoding) <= self._artifact.max_tokens:
            return range(len(encoding))  # the common case, decided by the length alone
        owners = encoding.sequence_ids
        special = [place for place, owner in enumerate(owners) if owner is None]
        first = [place for place, owner in enumerate(owners) if owner == 0]
        second = [place for place, owner in enumerate(owners) if owner == 1]
        covered = encoding.offsets[first[-1]][1] if first and prompt_chars else len(first)
        if covered <= prompt_chars or (item.pair is not None and not second):
            raise InvalidRequest(
                f"{_which(number, item, second=covered > prompt_chars)} has no token: white space and control "
                f"characters alone encode nothing; {_MEND}"
            )
        maximum = self._artifact.max_tokens
        if len(owners) > maximum:
            _refuse_if_off(number, len(owners), maximum, truncation)
            if maximum < len(special) + 1 + bool(second):
                raise InvalidRequest(f"input {number}: the model's {maximum} tokens have no room for a pair of texts")
            keep_first, keep_second = _longest_first(len(first), len(second), maximum - len(special))
            first, second = _cut(first, keep_first, truncation), _cut(second, keep_second, truncation)
        return sorted(special + first + second)

    def _sequence(
        self, item: TextInput, encoding: Encoding, kept: SequenceOf[int], tokens: Tokens | None, unpooled: int
    ) -> Sequence:
        """Take the kept places of an encoding; of the unpooled ones in front those that were kept."""
        ids = np.array(encoding.ids, dtype=np.int64)
        segments = item.pair is not None and self._artifact.type_vocab_size > 1
        types = np.array(encoding.type_ids, dtype=np.int64) if segments else None
        if len(kept) < len(encoding):
            ids, types = ids[kept], None if types is None else types[kept]
            unpooled = sum(place < unpooled for place in kept)
        texts = () if tokens is None else (item.text,) if item.pair is None else (item.text, item.pair)
        return Sequence(ids, types, len(encoding), tokens, unpooled, texts)

    def _unpooled(self, prompt: str) -> int:
        """Count the places that a prompt takes in front of its text, special tokens among them.

        The rule is sentence-transformers': the prompt alone is tokenized, and its closing token left out.
        """
        if not prompt or self._artifact.pool_prompt:
            return 0
        return len(self._tokenizer.encode(prompt)) - len(self._suffix)

    def _from_ids(self, number: int, item: TokenIdsInput, truncation: Truncation, *, describe: bool) -> Sequence:
        ids, types = list(item.ids), list(item.token_type_ids) if item.token_type_ids else None
        self._check_ids(number, ids, types)
        length, maximum = len(ids), self._artifact.max_tokens
        if length > maximum:
            _refuse_if_off(number, length, maximum, truncation)
            owners = self._owners(ids)
            special, first, second = ([place for place in range(length) if owners[place] == o] for o in (-1, 0, 1))
            if maximum < len(special) + bool(first) + bool(second):
                raise InvalidRequest(
                    f"input {number}: {len(special)} of its {length} tokens are special ones, which are never cut, and "
                    f"the model's {maximum} have no room for the others; leave some of them out"
                )
            keep_first, keep_second = _longest_first(len(first), len(second), maximum - len(special))
            kept = sorted(special + _cut(first, keep_first, truncation) + _cut(second, keep_second, truncation))
            ids = [ids[place] for place in kept]
            types = types and [types[place] for place in kept]
        tokens = self._describe_ids(ids) if describe else None
        return Sequence(
            np.array(ids, dtype=np.int64), np.array(types, dtype=np.int64) if types else None, length, tokens
        )

    def _check_ids(self, number: int, ids: list[int], types: list[int] | None) -> None:
        """Refuse token ids that the tokenizer could not have made."""
        vocabulary, segments = self._artifact.vocab_size, max(1, self._artifact.type_vocab_size)
        head, tail = self._prefix, self._suffix
        if not ids:
            raise InvalidRequest(f"input {number} has no token ids; send at least one token beside the special ones")
        if max(ids) >= vocabulary:
            raise InvalidRequest(f"input {number}: token id {max(ids)} is outside the vocabulary of {vocabulary}")
        if self._artifact.pad_token_id in ids:
            raise InvalidRequest(
                f"input {number} holds the padding token {self._artifact.pad_token_id}; "
                "leave padding out, the server pads by itself"
            )
        if ids[: len(head)] != head or ids[len(ids) - len(tail) :] != tail:
            raise InvalidRequest(
                f"input {number}: token ids must begin with {self._named(head)} and end with {self._named(tail)}, "
                "as Tokenize returns them"
            )
        if all(owner == -1 for owner in self._owners(ids)):
            raise InvalidRequest(f"input {number} has special tokens alone; send at least one other token")
        if types and len(types) != len(ids):
            raise InvalidRequest(
                f"input {number} has {len(ids)} ids and {len(types)} token_type_ids; send as many, or none"
            )
        if types and max(types) >= segments:
            raise InvalidRequest(f"input {number}: token_type_id {max(types)} must be below {segments}")

    def _named(self, ids: list[int]) -> str:
        return " ".join(f"{token} ({self._tokenizer.id_to_token(token)})" for token in ids) or "any token"

    def _describe_ids(self, ids: list[int]) -> Tokens:
        """Describe given token ids: without a text there are no spans and no words."""
        owners = self._owners(ids)
        texts = [self._tokenizer.id_to_token(token) or "" for token in ids]
        nowhere = [(0, 0)] * len(ids)
        special = [owner == -1 for owner in owners]
        return Tokens(ids, texts, nowhere, nowhere, [-1] * len(ids), owners, special)

    def _owners(self, ids: list[int]) -> list[int]:
        """Say which text each id belongs to: -1 for special tokens, 1 behind those that part a pair."""
        owners: list[int] = []
        parted = False
        for token in ids:
            special = token in self._special_ids
            parted = parted or (special and 0 in owners)
            owners.append(-1 if special else int(parted))
        return owners


def _which(number: int, item: TextInput, *, second: bool) -> str:
    """Name an input, and of a pair which text."""
    return f"input {number}" if item.pair is None else f"input {number}: the {'second' if second else 'first'} text"


def _refuse_if_off(number: int, length: int, maximum: int, truncation: Truncation) -> None:
    if truncation == "off":
        raise InvalidRequest(
            f"input {number}: sequence of {length} tokens exceeds the model's {maximum}; set truncation, or shorten it"
        )


def _longest_first(first: int, second: int, budget: int) -> tuple[int, int]:
    """Share a budget of tokens between two texts: the longer one loses first, ties in favour of the second.

    The rule and its rounding are those of Hugging Face's `longest_first`.
    """
    if first + second <= budget:
        return first, second
    half = budget // 2
    shorter = min(first, second)
    if shorter <= half:
        return (first, budget - first) if first <= second else (budget - second, second)
    return (half, budget - half) if first <= second else (budget - half, half)


def _cut(places: list[int], keep: int, truncation: Truncation) -> list[int]:
    """Keep so many places, from the end that truncation spares."""
    return places[:keep] if truncation == "right" else places[len(places) - keep :]


def _without_panic(encode: Callable[[list[Any]], list[Encoding]], batch: list[Any]) -> list[Encoding]:
    """Encode, and make an error of a panic, which nobody above would take for one."""
    try:
        return encode(batch)
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise RuntimeError(f"the tokenizer gave up: {error}") from error


def _describe(item: TextInput, encoding: Encoding, kept: SequenceOf[int], prompt_chars: int) -> Tokens:
    """Describe the kept tokens; spans and words count from the caller's text, not from the prompt."""
    owners, offsets, words = encoding.sequence_ids, encoding.offsets, encoding.word_ids
    byte_offsets = (_byte_offsets(item.text), _byte_offsets(item.pair or ""))
    # The text's first word is that of the first token which reaches into it from the prompt.
    reaching = (
        word for owner, (_, end), word in zip(owners, offsets, words, strict=True) if owner == 0 and end > prompt_chars
    )
    first_word = (next(reaching, None) or 0) if prompt_chars else 0
    char_spans, byte_spans, numbers = [], [], []
    for place in kept:
        owner, (start, end), word = owners[place], offsets[place], words[place]
        if owner == 0:
            start, end, word = max(start - prompt_chars, 0), max(end - prompt_chars, 0), word and word - first_word
        if owner is not None:  # tokenizers that mark word beginnings count the space before a word to it
            text = item.text if owner == 0 else item.pair or ""
            start = end - len(text[start:end].lstrip()) if text[start:end].strip() else start
        if owner is None or start == end:
            start, end, word, owner = 0, 0, None, owner or 0
        in_bytes = byte_offsets[owner]
        char_spans.append((start, end))
        byte_spans.append((start, end) if in_bytes is None else (int(in_bytes[start]), int(in_bytes[end])))
        numbers.append(-1 if word is None else max(word, 0))
    ids, texts = encoding.ids, encoding.tokens
    sequences: list[int] = [-1 if owners[place] is None else owners[place] for place in kept]
    return Tokens(
        ids=[ids[place] for place in kept],
        texts=[texts[place] for place in kept],
        char_spans=char_spans,
        byte_spans=byte_spans,
        words=numbers,
        sequences=sequences,
        special=[owner == -1 for owner in sequences],
    )


def _byte_offsets(text: str) -> NDArray[np.int64] | None:
    """Give the byte offset of every code point and of the end; None when both counts are the same."""
    if text.isascii():
        return None
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)  # RFC 3629, section 3
    return np.concatenate(([0], widths.cumsum()))
