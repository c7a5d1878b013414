"""Attended: one input's answer with what its attention's axes stand for, as a table, as tensors, as a page or picture.

Numpy alone; torch, and with `save` matplotlib or bertviz, are imported by the method that needs them.
May import: attention, matrix, pages, request, errors, view.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.attention import Attention
from service.errors import ConfigError, InvalidRequest
from service.matrix import Matrix, labels_of
from service.request import InputResult, Tokens


class Attended(Matrix):
    """One input's answer; what it holds is reached as in `InputResult`, for instance `.attention` and `.tokens`.

    Attributes:
        result: The answer itself.
        asked: What was asked of the attention weights.
        texts: The input's texts, one or two; none if it was token ids.
    """

    result: InputResult

    def __init__(self, result: InputResult, asked: Attention | None = None, texts: Sequence[str] = ()) -> None:
        """Keep the answer beside its question."""
        super().__init__(result, asked)
        self.texts = tuple(texts)

    def __repr__(self) -> str:
        """Name the answer's size."""
        shape = None if self.result.attention is None else self.result.attention.shape
        return f"Attended({self.result.num_tokens} tokens, attention {shape})"

    @property
    def described(self) -> bool:
        """Whether the answer says what tokens there are."""
        return self.result.tokens is not None

    @property
    def row_labels(self) -> list[str]:
        """What each place of the query axis stands for, one label each."""
        return labels_of(self._tokens(), self.texts, self.result.query_axis)

    @property
    def column_labels(self) -> list[str]:
        """What each place of the key axis stands for, one label each."""
        return labels_of(self._tokens(), self.texts, self.result.key_axis)

    @property
    def second_text_start(self) -> int | None:
        """The first row that belongs to the second text of a pair; None where there is none."""
        tokens = self._tokens()
        axis = self.result.query_axis or [(token, token + 1) for token in range(len(tokens))]
        return next((place for place, (start, _) in enumerate(axis) if tokens.sequences[start] == 1), None)

    def to_bertviz(self) -> tuple[tuple[Any, ...], list[str]]:
        """Give what bertviz's views take: a torch tensor (1, heads, query, key) for each layer, and the tokens.

        Raises:
            InvalidRequest: Rows and columns stand for different things, or there are no weights.
            ConfigError: torch is not installed.
        """
        if self.row_labels != self.column_labels:
            raise InvalidRequest(
                "rows and columns differ, so there is no one list of tokens; leave queries and keys out"
            )
        try:
            from torch import from_numpy  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError("bertviz takes torch's tensors; install attencode[viz]") from error
        return tuple(from_numpy(layer[None].copy()) for layer in self.by_layer()), self.row_labels

    def save(
        self, path: str | Path, mode: str = "heatmap", *, layer: int | None = None, head: int | None = None
    ) -> Path:
        """Write a page or a picture.

        Args:
            path: The file: .html for head, model and neuron, .png or .svg for heatmap and rollout.
            mode: head, model or neuron, bertviz's pages; heatmap, or rollout, of what was asked with rollout=True.
            layer: The one that a page opens with, or a heatmap shows; the mean over the answer's if None there.
            head: Likewise.

        Returns:
            The file's path.

        Raises:
            InvalidRequest: The mode does not go with the file's suffix or with this answer, or the path names no file
                that can be written.
            NotWritten: The file system does not take the file, for instance because the disk is full.
            ConfigError: A package is missing.
        """
        from service import pages, view  # noqa: PLC0415

        target = view.check(path, mode)
        if (mode == "rollout") != self.asked.rollout and mode != "heatmap":
            raise InvalidRequest("mode rollout goes with an answer to rollout=True, and no page does with that")
        if mode in view.PICTURES:
            shown = self.chosen(layer, head)
            return view.write(target, view.picture(*shown, kind=target.suffix.lower()[1:]))
        opened: dict[str, Any] = {
            "layer": None if layer is None else self.place("layer", layer),
            "head": None if head is None else self.place("head", head),
            "second_text_start": self.second_text_start,
            "numbers": (self._page_numbers(0), self._page_numbers(1)),
            "note": self._page_note(mode),
        }
        if mode == "neuron":
            page = pages.neuron_page(*self._vectors(), self.row_labels, **opened)
        else:
            page = pages.page(mode, self.by_layer(), self.row_labels, self.column_labels, **opened)
        return view.write(target, page.encode())

    def _vectors(self) -> tuple[NDArray[np.float32], NDArray[np.floating], NDArray[np.floating]]:
        """Give weights, query and key vectors that belong together."""
        queries, keys, weights = self.result.query_vectors, self.result.key_vectors, self.by_layer()
        if queries is None or keys is None:
            raise InvalidRequest("neuron needs the query and key vectors; attend with query_key_vectors=True")
        if queries.shape[:3] != weights.shape[:3] or keys.shape[2] != weights.shape[3]:
            raise InvalidRequest("neuron needs vectors and weights of the same layers, heads and tokens, none reduced")
        return weights, queries, keys

    def _tokens(self) -> Tokens:
        if self.result.tokens is None:
            raise InvalidRequest("this answer has no tokens; ask for attention")
        return self.result.tokens

    def _page_numbers(self, axis: int) -> list[int]:
        """Give the numbers by which a page calls its layers or heads; 0 where there is one of several."""
        reduced = (self.asked.reduce_layers, self.asked.reduce_heads)[axis]
        return [0] if reduced else self._numbers(axis, self.by_layer().shape[axis])

    def _page_note(self, mode: str) -> str:
        """Say what a page cannot show: how layers or heads were reduced, and which heads a head view's squares are."""
        notes = []
        for axis, noun, reduced in ((0, "layer", self.asked.reduce_layers), (1, "head", self.asked.reduce_heads)):
            if reduced:
                notes.append(f"{self._reduced_name(axis, 1, noun)}.".capitalize())
            elif mode == "head" and noun == "head" and self.asked.heads:
                notes.append(f"Heads from left to right: {', '.join(map(str, self.asked.heads))}.")
        return " ".join(notes)
