"""Aligned: one pair's cross-attention with what its axes stand for, as word pairs, as a table, as a picture.

Numpy alone; with `save` matplotlib is imported. May import: attention, matrix, request, values, errors, view.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from service.attention import Attention, Axis
from service.errors import InvalidRequest
from service.matrix import Matrix, labels_of
from service.request import InputResult, PairResult, Tokens
from service.values import shown


class WordPair(NamedTuple):
    """A word of the target, a word of the source that it looks at, and how much.

    Attributes:
        target: The target's word.
        source: The source's word.
        weight: From 0 to 1.
        target_span: Characters of the target that its word covers, half-open; (0, 0) where it was token ids.
        source_span: The same of the source.
    """

    target: str
    source: str
    weight: float
    target_span: tuple[int, int]
    source_span: tuple[int, int]


class _Word(NamedTuple):
    """Places of one axis that are one word."""

    places: list[int]
    first: int
    last: int


class Aligned(Matrix):
    """One pair's answer: rows are the target's tokens, columns the source's.

    Attributes:
        result: The answer itself; its `source` and `target` have the tokens.
        asked: What was asked of the weights.
        source_texts: What the source was, one text or two; none if it was token ids.
        target_texts: The same of the target.
    """

    result: PairResult

    def __init__(
        self,
        result: PairResult,
        asked: Attention | None = None,
        source_texts: Sequence[str] = (),
        target_texts: Sequence[str] = (),
    ) -> None:
        """Keep the answer beside its question."""
        super().__init__(result, asked)
        self.source_texts = tuple(source_texts)
        self.target_texts = tuple(target_texts)

    def __repr__(self) -> str:
        """Name the answer's size."""
        source, target = self.result.source.num_tokens, self.result.target.num_tokens
        shape = None if self.result.attention is None else self.result.attention.shape
        return f"Aligned({target} target tokens, {source} source tokens, attention {shape})"

    @property
    def described(self) -> bool:
        """Whether the answer says what tokens there are."""
        return self.result.source.tokens is not None and self.result.target.tokens is not None

    @property
    def row_labels(self) -> list[str]:
        """What each row stands for: the target's tokens, or words; one label each."""
        return labels_of(_tokens(self.result.target), self.target_texts, self.result.query_axis)

    @property
    def column_labels(self) -> list[str]:
        """What each column stands for: the source's tokens, or words; one label each."""
        return labels_of(_tokens(self.result.source), self.source_texts, self.result.key_axis)

    def word_pairs(
        self, threshold: float | None = None, *, layer: int | None = None, head: int | None = None
    ) -> list[WordPair]:
        """Give each word of the target with the word of the source that it looks at most, in the target's order.

        A word w of the target looks at a word v of the source by

            A[w, v] = mean over layers, heads and the tokens t in w of (sum over the tokens s in v of A[l, h, t, s])

        as AttentionOptions.words has it (Clark et al. 2019, section 4.1). Special tokens and a prompt are no words and
        take no part; where a side was token ids each of its other tokens is a word. A word whose row is all 0, as
        `top_k` may leave it, has no pair.

        Args:
            threshold: All pairs with A[w, v] of at least this instead, of each word the largest first.
            layer: As the model counts, instead of the mean over the answer's.
            head: Likewise.

        Raises:
            InvalidRequest: The answer has no such layer or head, or no weights; the threshold is no number above 0.
        """
        if threshold is not None and not (isinstance(threshold, int | float | np.number) and 0 < threshold <= 1):
            raise InvalidRequest(f"threshold must be a number above 0 and up to 1, got {shown(threshold)}")
        weights = self.chosen(layer, head).weights
        sides = (
            (self.result.target, self.target_texts, self.result.query_axis),
            (self.result.source, self.source_texts, self.result.key_axis),
        )
        targets, sources = (_words(_tokens(side), axis, known=bool(texts)) for side, texts, axis in sides)
        pairs: list[WordPair] = []
        for word in targets:
            row = weights[word.places].mean(axis=0)
            looks = np.asarray([row[source.places].sum() for source in sources])
            order = np.argsort(-looks, kind="stable")
            chosen = order[:1] if threshold is None else order[looks[order] >= threshold]
            pairs += [self._pair(word, sources[place], float(looks[place])) for place in chosen if looks[place] > 0]
        return pairs

    def save(self, path: str | Path, *, layer: int | None = None, head: int | None = None) -> Path:
        """Write a heatmap.

        Args:
            path: The file, .png or .svg.
            layer: As the model counts; the mean over the answer's if None.
            head: Likewise.

        Returns:
            The file's path.

        Raises:
            InvalidRequest: The answer has no such layer or head, or the path names no file that can be written.
            NotWritten: The file system does not take the file, for instance because the disk is full.
            ConfigError: A package is missing.
        """
        from service import view  # noqa: PLC0415

        target = view.check(path, "heatmap")
        return view.write(target, view.picture(*self.chosen(layer, head), kind=target.suffix.lower()[1:]))

    def _pair(self, target: _Word, source: _Word, weight: float) -> WordPair:
        names, spans = [], []
        for side, texts, word in (
            (self.result.target, self.target_texts, target),
            (self.result.source, self.source_texts, source),
        ):
            tokens = _tokens(side)
            names += labels_of(tokens, texts, [(word.first, word.last + 1)])
            spans.append((tokens.char_spans[word.first][0], tokens.char_spans[word.last][1]))
        return WordPair(names[0], names[1], weight, spans[0], spans[1])


def _tokens(side: InputResult) -> Tokens:
    if side.tokens is None:
        raise InvalidRequest("this answer does not say what its tokens are")
    return side.tokens


def _words(tokens: Tokens, axis: Axis | None, *, known: bool) -> list[_Word]:
    """Give an axis's words; those of a text that is `known` cover a part of it."""
    words: list[_Word] = []
    before: tuple[int, int] | None = None
    for place, (start, end) in enumerate(axis or [(token, token + 1) for token in range(len(tokens))]):
        first, last = tokens.char_spans[start][0], tokens.char_spans[end - 1][1]
        if tokens.special[start] or (known and first == last):
            before = None
            continue
        word = (tokens.sequences[start], tokens.words[start])
        if word[1] >= 0 and word == before:
            words[-1] = _Word([*words[-1].places, place], words[-1].first, end - 1)
        else:
            words.append(_Word([place], start, end - 1))
        before = word
    return words
