"""View: attention weights as pictures by matplotlib, and the files of pictures and pages.

matplotlib is imported where it is needed, and nothing is made here of what a server would have to be asked for.
May import: destination, values, errors.
"""

import math
import os
import unicodedata
import warnings
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import destination
from service.errors import ConfigError, InvalidRequest
from service.values import shown

PAGES = ("head", "model", "neuron")
PICTURES = ("heatmap", "rollout")
MODES = (*PAGES, *PICTURES)
_SUFFIXES = ((".html", ".htm"), (".png", ".svg"))  # of pages, of pictures

LABEL = 40  # letters, before a label is cut
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
        InvalidRequest: It is no path, there is no such mode, it has no such suffix, or such a file cannot be written.
        ConfigError: A package is missing.
    """
    written = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(written, str) or "\0" in written:
        raise InvalidRequest(f"path must be a file's path, such as 'attention.png', got {shown(path)}")
    given, path = path, Path(written)
    if mode not in MODES:
        raise InvalidRequest(f"mode {mode!r} is unknown; it must be {', '.join(MODES)}")
    suffix, fitting = path.suffix.lower(), _SUFFIXES[mode in PICTURES]
    if suffix not in fitting:
        others = PAGES if mode in PICTURES else PICTURES
        modes = " or ".join((", ".join(others[:-1]), others[-1]))
        way = f"; {suffix} goes with --mode {modes}" if suffix in _SUFFIXES[mode in PAGES] else ""
        writes = ".png or .svg" if mode in PICTURES else ".html"
        raise InvalidRequest(f"{mode} writes {writes}, got {path.name!r}{way}")
    if found := destination.trouble(given):
        raise InvalidRequest(found)
    package("bertviz" if mode in PAGES else "matplotlib")
    return path


def write(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all; gives its path.

    Raises:
        NotWritten: The file system does not take it.
    """
    part = destination.part_of(path)
    with destination.writing(path, len(content)):
        try:
            with part.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def package(name: str) -> ModuleType:
    """Import what the extra viz brings.

    Raises:
        ConfigError: It is not there.
    """
    try:
        return import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise ConfigError(f"the package {missing} is missing; install attencode[viz] for pages and pictures") from error


# ---------------------------------------------------------------- labels


def all_shortened(labels: list[str], most: int) -> list[str]:
    """Cut each label that is too broad."""
    return [shortened(label, most) for label in labels]


def shortened(label: str, most: int = LABEL) -> str:
    """Cut a label that is broader than so many letters, and say so by three dots."""
    if breadth(label) <= most:
        return label
    kept = next(end for end in range(len(label), -1, -1) if breadth(label[:end]) <= most - 1)
    return label[:kept] + "\u2026"


def breadth(label: str) -> float:
    """Measure a label in small letters."""
    return sum(
        2.0 if unicodedata.east_asian_width(character) in "WF" else 1.3 if character.isupper() else 1.0
        for character in label
    )


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
    matplotlib = package("matplotlib")
    for part in ("figure", "colors"):
        package(f"matplotlib.{part}")
    family, drawn = _fonts()
    rows, columns = (
        all_shortened([_drawable(label, drawn, kind) for label in labels], LABEL) for labels in (rows, columns)
    )
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
    manager, ft2font = package("matplotlib.font_manager"), package("matplotlib.ft2font")
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
