"""The command `attencode attend`, and the flags that say what attention is wanted, which `attencode view` has too.

May import: attention, cli_client, cli_print, errors.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from service.attention import ALL
from service.cli_client import open_client
from service.cli_print import print_json, result_json
from service.errors import InvalidRequest

_RANGE = re.compile(r"(-?[0-9]+)(?:-(-?[0-9]+))?")
_MOST_NUMBER = 9999  # of a layer or head, so that a range is not longer than any model
_MOST_WEIGHTS = 2**32 - 1  # of a row, as the contract has it
_REDUCTIONS = ("mean", "max")
_LISTS = ("--layers", "--heads")
PAIR_HELP = "second text of a pair; both go through the model as one input, and look at each other too"


# ---------------------------------------------------------------- flags


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command; gives its parser, to which the flags of all clients are added."""
    attend: argparse.ArgumentParser = commands.add_parser("attend", help="print who attends to whom, token by token")
    attend.add_argument("text", metavar="TEXT", type=utf8, help="the text whose tokens look at each other")
    attend.add_argument("pair", metavar="TEXT_B", nargs="?", type=utf8, help=PAIR_HELP)
    attend.add_argument("--layer", type=int, help="one layer, negative from the end; the last if unset")
    attend.add_argument("--head", type=int, help="one head, negative from the end; the mean over heads if unset")
    add_attention_arguments(attend)
    attend.add_argument("--rollout", action="store_true", help="what reaches each position through the layers")
    add_top_k(attend)
    attend.set_defaults(run=run)
    return attend


def add_top_k(command: argparse.ArgumentParser) -> None:
    """Add the flag that leaves the largest weights alone."""
    command.add_argument("--top-k", type=_count, default=0, metavar="K", help="only the K largest weights of each row")


def add_attention_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags that choose and reduce attention."""
    group = command.add_argument_group("which attention")
    add = group.add_argument
    add("--layers", type=_numbers, metavar="LIST", help="layers, such as 0,2-4 or -1; all for every one")
    add("--heads", type=_numbers, metavar="LIST", help="heads, such as 0,2-4 or -1; all for every one")
    add("--reduce-heads", choices=_REDUCTIONS, help="over all heads, or those of --heads")
    add("--reduce-layers", choices=_REDUCTIONS, help="over all layers, or those of --layers")
    add("--words", action="store_true", help="merge the tokens of each word")
    add(
        "--special-tokens",
        choices=("keep", "drop", "renormalize"),
        default="keep",
        help="drop leaves out [CLS], [SEP] and their like, renormalize also scales the rest to 100 %%; keep if unset",
    )


def joined(words: Sequence[str]) -> list[str]:
    """Write `--layers -2,-1` as `--layers=-2,-1`, which argparse would else take for another flag."""
    made: list[str] = []
    for place, word in enumerate(words):
        if word == "--":
            return [*made, *words[place:]]
        if made and made[-1] in _LISTS and re.match(r"-\d", word):
            made[-1] += f"={word}"
        else:
            made.append(word)
    return made


def _numbers(word: str) -> tuple[int, ...]:
    """Read a list of layers or heads.

    Raises:
        ArgumentTypeError: It is none.
    """
    if word == "all":
        return ALL
    numbers: list[int] = []
    for part in word.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found and any(len((bound or "").lstrip("-0")) > len(str(_MOST_NUMBER)) for bound in found.groups()):
            raise argparse.ArgumentTypeError(
                f"must be numbers from -{_MOST_NUMBER} to {_MOST_NUMBER}, got {_cut(part)!r}"
            )
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if first > last or (first < 0) != (last < 0):
            raise argparse.ArgumentTypeError(
                f"must be all, numbers and ascending ranges such as 0,2-4 or -2,-1, got {part!r} in {word!r}"
            )
        numbers += range(first, last + 1)
    return tuple(numbers)


def _count(word: str) -> int:
    """Read how many weights of a row are wanted.

    Raises:
        ArgumentTypeError: It is not a whole number that the contract carries.
    """
    digits = word.lstrip("0") if re.fullmatch(r"[0-9]+", word) else ""
    if not digits or len(digits) > len(str(_MOST_WEIGHTS)) or int(digits) > _MOST_WEIGHTS:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {_MOST_WEIGHTS}, got {_cut(word)!r}")
    return int(digits)


def utf8(word: str) -> str:
    """Read a text that goes to the server.

    Raises:
        ArgumentTypeError: Its bytes are not UTF-8.
    """
    try:
        word.encode()
    except UnicodeEncodeError as error:
        byte = ord(word[error.start]) & 0xFF  # PEP 383, as Python reads the command line
        raise argparse.ArgumentTypeError(
            f"must be UTF-8, got the byte 0x{byte:02x} behind {error.start} characters; set the terminal to UTF-8, or "
            "convert the text, for instance with iconv -f LATIN1 -t UTF-8"
        ) from error
    return word


def _cut(word: str) -> str:
    return word if len(word) <= 40 else f"{word[:40]}..."


def common_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Give those options of `attend` that mean the same in every command of a client."""
    names = ("truncation", "prompt_name", "model", "words", "special_tokens")
    return {name: getattr(parsed, name) for name in names}


def refuse_doubles(parsed: argparse.Namespace, *, one_of_many: bool = True) -> None:
    """Refuse flags of which one says what another says otherwise.

    Args:
        parsed: The command line.
        one_of_many: Whether --layer and --head are all that is wanted, not a choice among --layers and --heads.

    Raises:
        InvalidRequest: There are such flags.
    """
    for noun in ("layer", "head"):
        others = [f"--{noun}s"] if one_of_many and getattr(parsed, f"{noun}s") is not None else []
        others += [f"--reduce-{noun}s"] if getattr(parsed, f"reduce_{noun}s") else []
        if getattr(parsed, noun) is not None and others:
            raise InvalidRequest(f"--{noun} takes one {noun} and {others[0]} several; leave one of them out")


def refuse_for_rollout(parsed: argparse.Namespace) -> None:
    """Refuse what a rollout has no use for.

    Raises:
        InvalidRequest: It is there.
    """
    if parsed.layer is not None or parsed.head is not None:
        raise InvalidRequest("rollout goes through all layers and heads, or --layers; leave --layer and --head out")
    if parsed.reduce_layers:
        raise InvalidRequest("rollout goes through the layers itself; leave --reduce-layers out")


def _wanted(parsed: argparse.Namespace) -> dict[str, Any]:
    """Turn flags into the options of `attend`.

    Raises:
        InvalidRequest: Flags that do not go together.
    """
    if parsed.rollout:
        refuse_for_rollout(parsed)
        return {
            "layers": parsed.layers or ALL,
            "heads": parsed.heads or ALL,
            "reduce_heads": parsed.reduce_heads,
            "rollout": True,
        }
    refuse_doubles(parsed)
    layers, heads, reduction = parsed.layers, parsed.heads, parsed.reduce_heads
    if layers is None:
        layers = ALL if parsed.reduce_layers else (-1 if parsed.layer is None else parsed.layer,)
    if heads is None:
        heads = ALL if parsed.head is None else (parsed.head,)
        reduction = reduction or ("mean" if parsed.head is None else None)
    return {"layers": layers, "heads": heads, "reduce_heads": reduction, "reduce_layers": parsed.reduce_layers}


# ---------------------------------------------------------------- the command


def run(parsed: argparse.Namespace) -> int:
    """Ask the server and print the answer; gives the exit status."""
    text = parsed.text if parsed.pair is None else (parsed.text, parsed.pair)
    options = {**_wanted(parsed), **common_options(parsed), "top_k": parsed.top_k}
    with open_client(parsed) as client:
        attended = client.attend(text, **options)
    if parsed.json:
        print_json({**matrix_json(parsed, attended), **result_json(attended, tensors=False)})
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write("\n".join(tables(attended, width)))
    return 0


def matrix_json(parsed: argparse.Namespace, attended: Any) -> dict[str, Any]:
    """Give the weights in the shape that was asked for, and what each of their axes stands for.

    An axis is there for --layers, --heads and their like; not for --layer, --head, or what is reduced.
    """
    axes, weights, keys = ["row", "column"], attended.attention, attended.attention_keys
    asked, facts = attended.asked, {}
    for noun, reduced in (("head", asked.reduce_heads), ("layer", asked.reduce_layers)):
        if asked.rollout or reduced:
            continue
        one = getattr(parsed, f"{noun}s") is None
        axis = weights.ndim - len(axes) - 1
        if one:
            weights, keys = (None if array is None else array.take(0, axis) for array in (weights, keys))
        else:
            numbers = getattr(asked, f"{noun}s")
            facts[f"{noun}s"] = list(numbers or range(weights.shape[axis]))
            axes = [noun, *axes]
    one_layer = not asked.rollout and not asked.reduce_layers and parsed.layers is None
    shown: dict[str, Any] = {
        "layer": asked.layers[0] if one_layer else None,
        "head": parsed.head,
        **facts,
        "axes": axes,
        "rows": attended.row_labels,
        "columns": attended.column_labels,
        "weights": weights.tolist(),
    }
    if keys is not None:
        shown["keys"] = keys.tolist()  # of each weight, its column
    return shown


def tables(attended: Any, width: int | None) -> list[str]:
    """Lay out one table for each layer and head of the answer, in columns of text up to the width, if there is one."""
    dense, asked = attended.by_layer(), attended.asked
    layers, heads = (
        [None] if count == 1 else list(numbers or range(count))
        for count, numbers in zip(dense.shape[:2], (asked.layers, asked.heads), strict=True)
    )
    tables = []
    for layer, head in product(layers, heads):
        weights, rows, columns, name = attended.chosen(layer, head)
        if asked.top_k:
            tables.append(f"{name}: each row's largest weights\n" + _largest(rows, columns, weights, asked.top_k))
        else:
            title = f"{name}: each row's weights over the columns, in percent\n"
            tables.append(title + _matrix(rows, columns, weights, width))
    return tables


def _matrix(rows: list[str], columns: list[str], weights: Any, width: int | None) -> str:
    """Lay out weights (row, column) under and beside their labels; some columns below others where all do not fit."""
    widths = [max(len(label), 3) for label in columns]
    margin = max((len(label) for label in rows), default=0)
    lines, first = [], 0
    while first < len(columns):
        last = first + 1
        while last < len(columns) and (
            width is None or margin + 1 + sum(widths[first : last + 1]) + last - first < width
        ):
            last += 1
        part = range(first, last)
        lines += [""] if first else []
        lines.append(" " * (margin + 2) + " ".join(f"{columns[place]:>{widths[place]}}" for place in part))
        for label, row in zip(rows, weights, strict=True):
            cells = " ".join(f"{100 * row[place]:>{widths[place]}.0f}" for place in part)
            lines.append(f"{label:>{margin}}  {cells}")
        first = last
    return "\n".join(lines) + "\n"


def _largest(rows: list[str], columns: list[str], weights: Any, most: int) -> str:
    """Lay out of each row of weights (row, column) the largest, with their columns' labels."""
    margin = max((len(label) for label in rows), default=0)
    lines = []
    for label, row in zip(rows, weights, strict=True):
        places = (-row).argsort(kind="stable")[:most]
        shown = ", ".join(f"{columns[place]} {100 * row[place]:.0f}%" for place in places)
        lines.append(f"{label:>{margin}}  {shown}")
    return "\n".join(lines) + "\n"
