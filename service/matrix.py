"""Matrix: attention weights with what their rows and columns stand for, as arrays, as a table in a notebook.

Numpy alone. May import: attention, request, values, errors; view for the table.
"""

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.attention import Attention, Axis
from service.errors import InvalidRequest
from service.request import InputResult, PairResult, Tokens
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


class Matrix(ABC):
    """An answer with attention weights; what it holds is reached as in the answer itself, for instance `.attention`.

    Attributes:
        result: The answer.
        asked: What was asked of the weights.
    """

    def __init__(self, result: InputResult | PairResult, asked: Attention | None) -> None:
        """Keep the answer beside its question."""
        self.result = result
        self.asked = asked or Attention()

    def __getattr__(self, name: str) -> Any:
        """Give an attribute of the answer."""
        if name.startswith("__") or name == "result":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.result, name)

    def __dir__(self) -> list[str]:
        """List the answer's attributes too."""
        return sorted({*super().__dir__(), *dir(self.result)})

    @property
    @abstractmethod
    def described(self) -> bool:
        """Whether the answer says what tokens there are."""

    @property
    @abstractmethod
    def row_labels(self) -> list[str]:
        """What each place of the query axis stands for, one label each."""

    @property
    @abstractmethod
    def column_labels(self) -> list[str]:
        """What each place of the key axis stands for, one label each."""

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

    def _repr_html_(self) -> str:
        """Show a small heatmap in a notebook: the mean over layers and heads, the weights as percent on hovering."""
        if self.result.attention is None or not self.described:
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

    def _numbers(self, axis: int, count: int) -> list[int]:
        """Give the model's numbers of an axis's places; a negative one asked for stays as it was asked."""
        asked = (self.asked.layers, self.asked.heads)[axis]
        return list(asked) if asked else list(range(count))

    def _reduced_name(self, axis: int, count: int, noun: str) -> str:
        reduction = (self.asked.reduce_layers, self.asked.reduce_heads)[axis]
        asked = (self.asked.layers, self.asked.heads)[axis]
        if reduction is None and count == 1 and len(asked) == 1:
            return f"last {noun}" if asked == (-1,) else f"{noun} {asked[0]}"
        over = f"{noun}s {', '.join(map(str, asked))}" if asked else f"all {noun}s"
        return f"{'maximum' if reduction == 'max' else 'mean'} over {over}"


def labels_of(tokens: Tokens, texts: Sequence[str], axis: Axis | None) -> list[str]:
    """Give one label for each place of an axis.

    Args:
        tokens: The sequence's.
        texts: What it was made of, one or two; none if it was token ids.
        axis: What the places stand for; None where place i is token i.
    """
    if axis is None:
        return list(tokens.texts)
    return [tokens.texts[start] if end - start == 1 else _word(tokens, texts, start, end) for start, end in axis]


def _word(tokens: Tokens, texts: Sequence[str], start: int, end: int) -> str:
    """Write several tokens as the text has them, or joined where the text is not known."""
    sequence = tokens.sequences[start]
    first, last = tokens.char_spans[start][0], tokens.char_spans[end - 1][1]
    if 0 <= sequence < len(texts) and last > first:
        return texts[sequence][first:last]
    return "".join(text.removeprefix("##").strip("\u2581\u0120") for text in tokens.texts[start:end])


def _alpha(share: float) -> int:
    """Give a colour's opacity, 0 to 255, by the square root, so that small weights show beside a dominant one."""
    return round(255 * math.sqrt(min(max(share, 0.0), 1.0)))
