"""Pages: attention weights in the views of the installed bertviz, made from our numbers.

bertviz and the torch that it takes are imported where they are needed. May import: view.
"""

import html
import json
import math
import secrets
import warnings
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.view import LABEL, all_shortened, breadth, package

_FORM = (
    '<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>attencode: {mode} view</title>'
    "<style>#vis svg{{min-width:{width}px}}</style></head><body>\n"  # what is wider than the window is scrolled to
    '<p style="font:13px sans-serif;color:#555;margin:4px 0 10px;user-select:none">{hint}</p>\n{body}\n</body></html>\n'
)
_HINTS = {
    "head": "Each square is a head: click to add it or leave it out, double-click for it alone. "
    "Point at a token for its lines only.",
    "model": "Click a picture to enlarge it, and again to close it.",
    "neuron": "Point at a token on the left for its lines only; click its plus for the vectors behind them.",
}
_NEURON = """
<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js"></script>
<div id="{root}" style="padding:8px;font-family:'Helvetica Neue', Helvetica, Arial, sans-serif;">
<span style="user-select:none"><span class="dropdown-label">Layer: </span><select id="layer"></select>
<span class="dropdown-label">Head: </span><select id="att_head"></select>{filters}</span><div id="vis"></div></div>
<script>window.bertviz_params = {params}</script>
<script>{script}</script>
"""
_MENU = '<span class="dropdown-label"> Attention: </span><select id="filter">{}</select>'
_FILTERS = {
    "all": "All",
    "aa": "First text to itself",
    "ab": "First text to second",
    "ba": "Second text to first",
    "bb": "Second text to itself",
}
_DETAIL = 22  # in what a model view enlarges, which is to stay inside the page


def page(
    mode: str,
    weights: NDArray[np.float32],
    rows: list[str],
    columns: list[str],
    *,
    second_text_start: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    numbers: tuple[list[int], list[int]] | None = None,
    note: str = "",
) -> str:
    """Make bertviz's head or model view.

    Args:
        mode: head or model.
        weights: (layers, heads, query, key) float32.
        rows: A label for each query.
        columns: A label for each key.
        second_text_start: First row of a pair's second text.
        layer: Place of the layer that a head view opens with, or the one of a model view.
        head: Likewise.
        numbers: What the model calls the layers and the heads; counted from 0 if None.
        note: What else the page says.
    """
    bertviz, torch = package("bertviz"), package("torch")
    tensors = [torch.from_numpy(_rounded(values[None])) for values in weights]
    rows, columns = (all_shortened(labels, _DETAIL if mode == "model" else LABEL) for labels in (rows, columns))
    box = _box(mode, rows + columns)
    mark = _free_character(rows, columns)
    rows, columns = ([label.replace("<", mark) for label in labels] for labels in (rows, columns))
    tokens: dict[str, Any] = {"attention": tensors, "tokens": rows, "sentence_b_start": second_text_start or None}
    if rows != columns:
        tokens = {"cross_attention": tensors, "decoder_tokens": rows, "encoder_tokens": columns}
    options: dict[str, Any] = {"layer": layer, "heads": None if head is None else [head]}
    if mode == "model":
        only = {"include_layers": layer, "include_heads": head}
        options = {name: None if place is None else [place] for name, place in only.items()}
        options["display_mode"] = "light"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves the closing of its script to the collector
        made = getattr(bertviz, f"{mode}_view")(**tokens, **options, html_action="return")
    script = _mended(mode, made.data, box)
    if numbers is not None:
        script = _renumbered(script, mode, numbers, layer, head)
    # The labels lie in JSON inside a script, which a label such as </script> would end.
    return _framed(mode, script.replace(_escaped(mark), "\\u003c"), note, box)


def neuron_page(
    weights: NDArray[np.float32],
    queries: NDArray[np.floating],
    keys: NDArray[np.floating],
    labels: list[str],
    *,
    second_text_start: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    numbers: tuple[list[int], list[int]] | None = None,
    note: str = "",
) -> str:
    """Make a page around bertviz's neuron view, whose function in Python takes only models of its own.

    Args:
        weights: (layers, heads, tokens, tokens) float32.
        queries: (layers, heads, tokens, head_dim).
        keys: Likewise.
        labels: A label for each token.
        second_text_start: First token of a pair's second text.
        layer: Place of the layer that it opens with.
        head: Likewise.
        numbers: What the model calls the layers and the heads; counted from 0 if None.
        note: What else the page says.
    """
    package("bertviz")
    parts = {"all": (slice(None), slice(None))}
    if second_text_start:
        a, b = slice(0, second_text_start), slice(second_text_start, None)
        parts |= {"aa": (a, a), "ab": (a, b), "ba": (b, a), "bb": (b, b)}
    pretty = all_shortened([label.replace("\u0120", " ").replace("\u2581", " ") for label in labels], LABEL)
    root = f"bertviz-{secrets.token_hex(8)}"
    params = {
        "attention": {
            part: {
                "attn": _rounded(weights[:, :, rows, columns]).tolist(),
                "left_text": pretty[rows],
                "right_text": pretty[columns],
                "queries": _rounded(queries[:, :, rows]).tolist(),
                "keys": _rounded(keys[:, :, columns]).tolist(),
            }
            for part, (rows, columns) in parts.items()
        },
        "default_filter": "all",
        "root_div_id": root,
        "bidirectional": True,
        "display_mode": "light",
        "layer": layer,
        "head": head,
        "names": numbers or [list(range(count)) for count in weights.shape[:2]],
    }
    box = _box("neuron", pretty)
    options = "".join(f'<option value="{part}">{_FILTERS[part]}</option>' for part in parts)
    body = _NEURON.format(
        root=root,
        filters=_MENU.format(options) if second_text_start else "",
        params=json.dumps(params).replace("<", "\\u003c"),
        script=_mended("neuron", (resources.files("bertviz") / "neuron_view.js").read_text(encoding="utf-8"), box),
    )
    return _framed("neuron", body, note, box)


def _framed(mode: str, body: str, note: str, box: int) -> str:
    hint = _HINTS[mode] + (f"<br>{html.escape(note)}" if note else "")
    width = {"head": 2 * box + 120, "model": 970, "neuron": 2 * box + 770}[mode]  # of all that it may draw
    return _FORM.format(mode=mode, hint=hint, body=body, width=width)


def _box(mode: str, labels: list[str]) -> int:
    """Give the width in pixels that labels need, and bertviz's own at least; in a neuron view the plus is beside it."""
    room = max(map(breadth, labels), default=0.0)
    letter, least, beside = {"head": (8.5, 110, 16), "model": (7.3, 80, 6), "neuron": (8.5, 120, 40)}[mode]
    return max(least, math.ceil(room * letter) + beside)


def _mended(mode: str, script: str, box: int) -> str:
    """Give labels room in a script of bertviz, and mend a few things in it; what it has otherwise by now it keeps."""
    changes = {
        "head": (("const BOXWIDTH = 110;", f"const BOXWIDTH = {box};"),),
        "model": (
            ("const DETAIL_BOX_WIDTH = 80;", f"const DETAIL_BOX_WIDTH = {box};"),
            ("const DETAIL_WIDTH = 300;", f"const DETAIL_WIDTH = {140 + 2 * box};"),
            ("axisSize, config.detailHeight);", "axisSize, config.detailHeight + 8);"),  # a frame has an upper edge
            # What was enlarged is gone after a choice of text to text; the next click on it is to show it again.
            ("function render() {", "function render() {\nconfig.detail_layer = config.detail_head = null;"),
            ("= params['total_heads']", "= Math.max(params['total_heads'], 12)"),  # few heads are not drawn larger
            ("config.layers[layer] % 10", "(config.layers[layer] + 1000) % 10"),  # negative ones have a colour too
        ),
        "neuron": (
            ("const BOXWIDTH = TEXT_SIZE * 8;", f"const BOXWIDTH = {box};"),
            (".val(i).text(i)", ".val(i).text(params.names[1][i])"),
            (".val(i).text(i)", ".val(i).text(params.names[0][i])"),
        ),
    }
    for old, new in changes[mode]:
        script = new.join(script.rsplit(old, 1))  # the last one: labels come before
    return script


def _renumbered(
    script: str, mode: str, numbers: tuple[list[int], list[int]], layer: int | None, head: int | None
) -> str:
    """Call layers and heads in bertviz's script what the model calls them; no label has an unescaped quote."""
    layers, heads = numbers
    kept = layers if mode == "head" or layer is None else [layers[layer]]
    places = list(range(len(layers))) if mode == "head" or layer is None else [layer]
    script = script.replace(f'"include_layers": {places}', f'"include_layers": {kept}', 1)
    if mode == "head":
        return script if layer is None else script.replace(f'"layer": {layer}', f'"layer": {layers[layer]}', 1)
    kept, places = (heads, list(range(len(heads)))) if head is None else ([heads[head]], [head])
    return script.replace(f'"include_heads": {places}', f'"include_heads": {kept}', 1)


def _rounded(array: NDArray[np.floating]) -> NDArray[np.float64]:
    """Keep six decimals, more than a page shows, so that it is a third as long."""
    wide: NDArray[np.float64] = array.astype(np.float64)
    return wide.round(6)


def _free_character(*labels: list[str]) -> str:
    """Find a character of Unicode's private area that no label has."""
    taken = set().union(*(set(label) for every in labels for label in every))
    return next(character for character in map(chr, range(0xE000, 0xF8FF)) if character not in taken)


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]
