"""The command `attencode align`: which words of a source each word of a target looks at.

Its flags for attention are those of `attencode attend`. May import: attention, cli_attend, cli_client, cli_print;
view with --output.
"""

import argparse
import shutil
import sys
from typing import Any

from service.attention import ALL
from service.cli_attend import (
    add_attention_arguments,
    add_top_k,
    common_options,
    matrix_json,
    refuse_doubles,
    tables,
    utf8,
)
from service.cli_client import open_client
from service.cli_print import print_json, result_json


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command; gives its parser, to which the flags of all clients are added."""
    align: argparse.ArgumentParser = commands.add_parser(
        "align",
        help="print which words of a source a target looks at, in an encoder-decoder model",
        description="Prints how much each token of the target looks at each of the source's, and for each word of the "
        "target the word of the source that it looks at most. The model must have a decoder: T5, BART, Marian. The "
        "target is given, for instance a translation; no text is generated.",
    )
    align.add_argument("source", metavar="SOURCE", type=utf8, help="the text that the encoder reads")
    align.add_argument("target", metavar="TARGET", type=utf8, help="the text that the decoder is given")
    align.add_argument("--layer", type=int, help="one layer, negative from the end; the mean over layers if unset")
    align.add_argument("--head", type=int, help="one head, negative from the end; the mean over heads if unset")
    add_attention_arguments(align)
    add_top_k(align)
    align.add_argument(
        "--threshold", type=float, metavar="W", help="all word pairs of at least this weight, such as 0.2"
    )
    align.add_argument("-o", "--output", metavar="FILE", help="draw a heatmap too, .png or .svg; needs attencode[viz]")
    align.set_defaults(run=run)
    return align


def run(parsed: argparse.Namespace) -> int:
    """Ask the server and print the answer; gives the exit status."""
    options = {**_wanted(parsed), **common_options(parsed), "top_k": parsed.top_k}
    if parsed.output:
        from service import view  # noqa: PLC0415

        view.check(parsed.output, "heatmap")  # before the server is asked
    with open_client(parsed) as client:
        aligned = client.align(parsed.source, parsed.target, **options)
    pairs = aligned.word_pairs(parsed.threshold)
    if parsed.output:
        aligned.save(parsed.output)
    if parsed.json:
        sides = {"source": result_json(aligned.source), "target": result_json(aligned.target)}
        print_json({**matrix_json(parsed, aligned), "word_pairs": [pair._asdict() for pair in pairs], **sides})
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write("\n".join([*tables(aligned, width), _written(pairs, parsed.threshold)]))
    return 0


def _wanted(parsed: argparse.Namespace) -> dict[str, Any]:
    """Turn flags into the options of `align`.

    Raises:
        InvalidRequest: Flags that do not go together.
    """
    refuse_doubles(parsed)
    options: dict[str, Any] = {}
    for noun in ("layer", "head"):
        one, several, reduction = (getattr(parsed, name) for name in (noun, f"{noun}s", f"reduce_{noun}s"))
        if one is None and several is None:
            reduction = reduction or "mean"
        options[f"{noun}s"] = (one,) if one is not None else several or ALL
        options[f"reduce_{noun}s"] = reduction
    return options


def _written(pairs: list[Any], threshold: float | None) -> str:
    """Lay word pairs out, one a line."""
    if not pairs:
        return f"no word looks at one by {threshold:g} or more\n" if threshold is not None else "no words\n"
    margin = max((len(pair.target) for pair in pairs), default=0)
    lines = [f"{pair.target:>{margin}}  {pair.source} {100 * pair.weight:.0f}%" for pair in pairs]
    return "\n".join(["each word of the target, and what it looks at", *lines]) + "\n"
