"""Attended: one input's answer with what its attention's axes stand for, as a table, as tensors, as a page or picture.

Numpy alone; torch, and with `save` matplotlib or bertviz, are imported by the method that needs them.
May import: attention, pages, request, values, errors, view.
"""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.attention import Attention, Axis
from service.errors import ConfigError, InvalidRequest
from service.request import InputResult, Tokens
from service.values import is_whole, shown

_SHOWN = 64  # rows and columns of the table in a notebook; more of them are slow to show
_TABLE = (
    '<table style="border-collapse:collapse;font:11px sans-serif;width:auto">'
    '<caption style="text-align:left;padding:0 4px 8px">{caption}</caption>'
    "<thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>"
)
_PLAIN = "font-weight:normal;white-space:pre"
_HEAD = (
    f'<th style="writing-mode:vertical-rl;transform:rotate(180deg);text-align:left;{_PLAIN};padding:2px 0">{{}}</th>'
)
_ROW = f'<tr><th style="text-align:right;{_PLAIN};padding:0 4px">{{}}</th>{{}}</tr>'
_CELL = '<td title="{:.1f}%" style="background:#1f6fb4{:02x};min-width:14px;height:14px;padding:0"></td>'


class Labelled(NamedTuple):
    """Weights (rows, columns) float32 and what each row and column stands for."""

    weights: NDArray[np.float32]
    rows: list[str]
    columns: list[str]
    name: str


class Attended:
    """One input's answer; what it holds is reached as in `InputResult`, for instance `.attention` and `.tokens`.

    Attributes:
        result: The answer itself.
        asked: What was asked of the attention weights.
        texts: The input's texts, one or two; none if it was token ids.
    """

    def __init__(self, result: InputResult, asked: Attention | None = None, texts: Sequence[str] = ()) -> None:
        """Keep the answer beside its question."""
        self.result = result
        self.asked = asked or Attention()
        self.texts = tuple(texts)

    def __getattr__(self, name: str) -> Any:
        """Give an attribute of the answer."""
        if name.startswith("__") or name == "result":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.result, name)

    def __dir__(self) -> list[str]:
        """List the answer's attributes too."""
        return sorted({*super().__dir__(), *dir(self.result)})

    def __repr__(self) -> str:
        """Name the answer's size."""
        shape = None if self.result.attention is None else self.result.attention.shape
        return f"Attended({self.result.num_tokens} tokens, attention {shape})"

    @property
    def row_labels(self) -> list[str]:
        """What each place of the query axis stands for, one label each."""
        return self._labels(self.result.query_axis)

    @property
    def column_labels(self) -> list[str]:
        """What each place of the key axis stands for, one label each."""
        return self._labels(self.result.key_axis)

    @property
    def second_text_start(self) -> int | None:
        """The first row that belongs to the second text of a pair; None where there is none."""
        tokens = self._tokens()
        axis = self.result.query_axis or [(token, token + 1) for token in range(len(tokens))]
        return next((place for place, (start, _) in enumerate(axis) if tokens.sequences[start] == 1), None)

    def to_numpy(self) -> NDArray[np.float32]:
        """Give the weights (layers, heads, query, key) float32, without the axes that were reduced.

        With top_k every weight is in its key's place, and those that the answer leaves out are 0.

        Raises:
            InvalidRequest: The answer has no attention weights.
        """
        weights = self.result.attention
        if weights is None:
            raise InvalidRequest("this answer has no attention weights; ask for them with layers")
        places = self.result.attention_keys
        if places is None:
            return weights.astype(np.float32)
        dense = np.zeros((*weights.shape[:-1], len(self.column_labels)), np.float32)
        np.put_along_axis(dense, places.astype(np.int64), weights.astype(np.float32), axis=-1)
        return dense

    def by_layer(self) -> NDArray[np.float32]:
        """Give `to_numpy` with an axis of length 1 for each that was reduced: (layers, heads, query, key) float32."""
        weights = self.to_numpy()
        if weights.ndim == 2:
            return weights[None, None]
        if weights.ndim == 3:
            return weights[:, None] if self.asked.reduce_heads else weights[None]
        return weights

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

    def chosen(self, layer: int | None = None, head: int | None = None) -> Labelled:
        """Choose what one matrix shows.

        Args:
            layer: As the model counts, negative from the end of the answer's; the mean over all if None.
            head: Likewise.

        Raises:
            InvalidRequest: The answer has no such layer or head.
        """
        weights, names = self.by_layer(), []
        for axis, wanted, noun in ((0, layer, "layer"), (1, head, "head")):
            if wanted is None:
                names.append(self._reduced_name(axis, weights.shape[axis], noun))
                weights = weights.mean(axis=axis, keepdims=True)
            else:
                place = self.place(noun, wanted)
                names.append(f"{noun} {self._numbers(axis, weights.shape[axis])[place]}")
                weights = weights[place : place + 1] if axis == 0 else weights[:, place : place + 1]
        name = self._rollout_name() if self.asked.rollout else ", ".join(names)
        return Labelled(weights[0, 0], self.row_labels, self.column_labels, name)

    def _rollout_name(self) -> str:
        layers, heads = (", ".join(map(str, numbers)) for numbers in (self.asked.layers, self.asked.heads))
        parts = [
            f" through layers {layers}" if layers else "",
            f", {'maximum' if self.asked.reduce_heads == 'max' else 'mean'} over heads {heads}" if heads else "",
            ", maximum over heads" if self.asked.reduce_heads == "max" and not heads else "",
        ]
        return "rollout" + "".join(parts)

    def place(self, noun: str, wanted: int) -> int:
        """Find a layer or head in the answer.

        Raises:
            InvalidRequest: It is no number, or not there.
        """
        if not is_whole(wanted):
            raise InvalidRequest(f"{noun} must be a whole number, got {shown(wanted)}")
        axis = ("layer", "head").index(noun)
        reduced = self.asked.rollout or (self.asked.reduce_layers, self.asked.reduce_heads)[axis]
        if reduced:
            raise InvalidRequest(f"the answer's {noun}s are reduced to one; leave {noun} out")
        numbers = self._numbers(axis, self.by_layer().shape[axis])
        if wanted in numbers:
            return numbers.index(wanted)
        if -len(numbers) <= wanted < 0:
            return len(numbers) + wanted
        raise InvalidRequest(f"{noun} {wanted} is not in the answer; it has {', '.join(map(str, numbers))}")

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

    def _repr_html_(self) -> str:
        """Show a small heatmap in a notebook: the mean over layers and heads, the weights as percent on hovering."""
        if self.result.attention is None or self.result.tokens is None:
            return f"<pre>{html.escape(repr(self))}</pre>"
        from service.view import shortened  # noqa: PLC0415

        weights, rows, columns, name = self.chosen()
        most = float(weights.max(initial=0.0)) or 1.0
        part = ""
        if max(weights.shape) > _SHOWN:
            part = f"; the first {_SHOWN} of {len(rows)} rows and {len(columns)} columns"
        lines = []
        for label, line in zip(rows[:_SHOWN], weights[:_SHOWN], strict=False):
            cells = "".join(_CELL.format(100 * weight, _alpha(weight / most)) for weight in line[:_SHOWN])
            lines.append(_ROW.format(html.escape(shortened(label)), cells))
        heads = "".join(_HEAD.format(html.escape(shortened(label))) for label in columns[:_SHOWN])
        return _TABLE.format(caption=html.escape(name + part), heads=heads, rows="".join(lines))

    def _tokens(self) -> Tokens:
        if self.result.tokens is None:
            raise InvalidRequest("this answer has no tokens; ask for attention")
        return self.result.tokens

    def _labels(self, axis: Axis | None) -> list[str]:
        tokens = self._tokens()
        if axis is None:
            return list(tokens.texts)
        return [tokens.texts[start] if end - start == 1 else self._word(tokens, start, end) for start, end in axis]

    def _word(self, tokens: Tokens, start: int, end: int) -> str:
        """Write several tokens as the text has them, or joined where the text is not known."""
        sequence = tokens.sequences[start]
        first, last = tokens.char_spans[start][0], tokens.char_spans[end - 1][1]
        if 0 <= sequence < len(self.texts) and last > first:
            return self.texts[sequence][first:last]
        return "".join(text.removeprefix("##").strip("\u2581\u0120") for text in tokens.texts[start:end])

    def _numbers(self, axis: int, count: int) -> list[int]:
        """Give the model's numbers of an axis's places; a negative one asked for stays as it was asked."""
        asked = (self.asked.layers, self.asked.heads)[axis]
        return list(asked) if asked else list(range(count))

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

    def _reduced_name(self, axis: int, count: int, noun: str) -> str:
        reduction = (self.asked.reduce_layers, self.asked.reduce_heads)[axis]
        asked = (self.asked.layers, self.asked.heads)[axis]
        if reduction is None and count == 1 and len(asked) == 1:
            return f"last {noun}" if asked == (-1,) else f"{noun} {asked[0]}"
        over = f"{noun}s {', '.join(map(str, asked))}" if asked else f"all {noun}s"
        return f"{'maximum' if reduction == 'max' else 'mean'} over {over}"


def _alpha(share: float) -> int:
    """Give a colour's opacity, 0 to 255, by the square root, so that small weights show beside a dominant one."""
    return round(255 * math.sqrt(min(max(share, 0.0), 1.0)))
