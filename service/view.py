"""View: attention weights as pages and pictures, and their files.

Pages are made by the installed bertviz, from our numbers; pictures by matplotlib. Both are imported where they are
needed, and no page or picture is made here of what a server would have to be asked for. May import: errors.
"""

import json
import math
import os
import secrets
import warnings
from importlib import import_module, resources
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import ConfigError, InvalidRequest

PAGES = ("head", "model", "neuron")
PICTURES = ("heatmap", "rollout")
MODES = (*PAGES, *PICTURES)

_FORM = (
    '<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>{title}</title></head><body>\n{body}\n</body></html>\n'
)
_NEURON = """
<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js"></script>
<div id="{root}" style="padding:8px;font-family:'Helvetica Neue', Helvetica, Arial, sans-serif;">
<span style="user-select:none"><span class="dropdown-label">Layer: </span><select id="layer"></select>
<span class="dropdown-label">Head: </span><select id="att_head"></select>{filters}</span><div id="vis"></div></div>
<script>window.bertviz_params = {params}</script>
<script>{script}</script>
"""
_FILTERS = {
    "all": "All",
    "aa": "First text to itself",
    "ab": "First text to second",
    "ba": "Second text to first",
    "bb": "Second text to itself",
}
_NUMBERED = 14  # rows and columns up to which a cell has room for its number
_MOST_INCHES = 80.0  # 8000 dots, 256 MB while the picture is drawn
_DPI = 100
_FONTS = (
    "DejaVu Sans",
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Sans Arabic", "Noto Sans Devanagari"),
    *("Noto Emoji", "Symbola", "Arial Unicode MS"),
)


# ---------------------------------------------------------------- files


def check(path: str | Path, mode: str) -> Path:
    """Check, before anything is computed, that a file of this name can be written in this mode.

    Raises:
        InvalidRequest: There is no such mode, it has no such suffix, or the folder is not there.
        ConfigError: A package is missing.
    """
    path = Path(path)
    if mode not in MODES:
        raise InvalidRequest(f"mode {mode!r} is unknown; it must be {', '.join(MODES)}")
    suffixes = (".html", ".htm") if mode in PAGES else (".png", ".svg")
    if path.suffix.lower() not in suffixes:
        raise InvalidRequest(f"{mode} writes {suffixes[0]}{' or .svg' if mode in PICTURES else ''}, got {path.name!r}")
    if not path.parent.is_dir():
        raise InvalidRequest(f"the folder {str(path.parent)!r} is not there; make it, or write elsewhere")
    _package("bertviz" if mode in PAGES else "matplotlib")
    return path


def write(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all; gives its path."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise ConfigError(f"the package {missing} is missing; install attencode[viz] for pages and pictures") from error


# ---------------------------------------------------------------- pages


def page(
    mode: str,
    weights: NDArray[np.float32],
    rows: list[str],
    columns: list[str],
    *,
    second_text_start: int | None = None,
    layer: int | None = None,
    head: int | None = None,
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
    """
    bertviz, torch = _package("bertviz"), _package("torch")
    tensors = [torch.from_numpy(_rounded(values[None])) for values in weights]
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
    # The labels lie in JSON inside a script, which a label such as </script> would end.
    return _FORM.format(title=f"attencode: {mode} view", body=made.data.replace(_escaped(mark), "\\u003c"))


def neuron_page(
    weights: NDArray[np.float32],
    queries: NDArray[np.floating],
    keys: NDArray[np.floating],
    labels: list[str],
    *,
    second_text_start: int | None = None,
    layer: int | None = None,
    head: int | None = None,
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
    """
    _package("bertviz")
    parts = {"all": (slice(None), slice(None))}
    if second_text_start:
        a, b = slice(0, second_text_start), slice(second_text_start, None)
        parts |= {"aa": (a, a), "ab": (a, b), "ba": (b, a), "bb": (b, b)}
    pretty = [label.replace("\u0120", " ").replace("\u2581", " ") for label in labels]
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
    }
    options = "".join(f'<option value="{part}">{_FILTERS[part]}</option>' for part in parts)
    filters = f'<span class="dropdown-label"> Attention: </span><select id="filter">{options}</select>'
    body = _NEURON.format(
        root=root,
        filters=filters if second_text_start else "",
        params=json.dumps(params).replace("<", "\\u003c"),
        script=(resources.files("bertviz") / "neuron_view.js").read_text(encoding="utf-8"),
    )
    return _FORM.format(title="attencode: neuron view", body=body)


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


# ---------------------------------------------------------------- pictures


def picture(weights: NDArray[np.float32], rows: list[str], columns: list[str], title: str, kind: str = "png") -> bytes:
    """Draw weights (rows, columns) as a heatmap that grows with its labels.

    Args:
        weights: (rows, columns) float32, from 0.
        rows: A label for each.
        columns: Likewise.
        title: What the weights are.
        kind: png or svg.
    """
    matplotlib = _package("matplotlib")
    for part in ("figure", "colors"):
        _package(f"matplotlib.{part}")
    family, drawn = _fonts()
    rows, columns = ([_drawable(label, drawn, kind) for label in labels] for labels in (rows, columns))
    settings = {"font.family": family, "svg.fonttype": "none", "svg.hashsalt": "attencode"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Text in an SVG is drawn with the viewer's fonts, so that what is missing here may be there.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = _figure(matplotlib, weights, rows, columns, title)
        stream = BytesIO()
        figure.savefig(
            stream, format=kind, dpi=_DPI, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else {}
        )
    return stream.getvalue()


def _figure(matplotlib: Any, weights: NDArray[np.float32], rows: list[str], columns: list[str], title: str) -> Any:
    """Lay out the heatmap; a cell has a number where there is room for it."""
    numbered = max(weights.shape) <= _NUMBERED
    pitch = 0.48 if numbered else min(0.19, _MOST_INCHES / max(weights.shape))  # inches a cell
    width, height = (max(count * pitch, 1.2) for count in reversed(weights.shape))
    figure = matplotlib.figure.Figure(figsize=(width + 0.9, height + 0.5))
    axes = figure.add_axes((0, 0, width / (width + 0.9), height / (height + 0.5)))
    most = float(weights.max(initial=0.0)) or 1.0
    # By the square root: one column, [CLS] or [SEP], often takes most of the weight, and the rest would look alike.
    norm = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=most)
    image = axes.imshow(weights, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    every = math.ceil(0.09 / pitch)  # inches that a label needs
    size = 10 if numbered else max(5.0, min(9.0, 60 * pitch))
    axes.set_xticks(range(0, len(columns), every), columns[::every], rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(0, len(rows), every), rows[::every], fontsize=size, parse_math=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xlabel("looked at", fontsize=9)
    axes.set_ylabel("looks", fontsize=9)
    axes.set_title(title, fontsize=10, loc="left", pad=10, parse_math=False)
    for place in np.ndindex(*weights.shape) if numbered else ():
        colour = "white" if weights[place] > 0.36 * most else "black"
        axes.text(place[1], place[0], f"{100 * weights[place]:.0f}", ha="center", va="center", fontsize=8, color=colour)
    bar = figure.add_axes(((width + 0.15) / (width + 0.9), 0, 0.14 / (width + 0.9), min(height, 4) / (height + 0.5)))
    scale = figure.colorbar(image, cax=bar, format=lambda share, _: f"{100 * share:.3g}%")
    scale.ax.tick_params(labelsize=8)
    return figure


def _fonts() -> tuple[list[str], set[int]]:
    """Give those fonts that are installed, and every character that one of them has."""
    manager, ft2font = _package("matplotlib.font_manager"), _package("matplotlib.ft2font")
    installed = {font.name: font.fname for font in reversed(manager.fontManager.ttflist)}
    family = [name for name in _FONTS if name in installed]
    paths = [manager.findfont(manager.FontProperties(family=[name])) for name in family]
    return family, set().union(*(ft2font.FT2Font(path).get_charmap() for path in paths))


def _drawable(label: str, drawn: set[int], kind: str) -> str:
    """Write a label with what no font has as U+ and its number, which is more than an empty box says."""
    label = label.replace("\u0120", " ").replace("\u2581", " ").strip() or label
    return "".join(
        character
        if character.isprintable() and (kind == "svg" or ord(character) in drawn)
        else f"U+{ord(character):04X}"
        for character in label
    )
