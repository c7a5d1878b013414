"""The command `attencode view`: a page or a picture of who attends to whom, in a file.

Its flags for the server and for attention are those of the other commands. May import: attention, cli_attend,
cli_client, cli_print, view, errors.
"""

import argparse
import sys
from typing import Any

from service.attention import ALL
from service.cli_attend import (
    PAIR_HELP,
    add_attention_arguments,
    common_options,
    refuse_doubles,
    refuse_for_rollout,
    utf8,
)
from service.cli_client import open_client
from service.cli_print import print_json
from service.errors import InvalidRequest


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command; gives its parser, to which the flags of all clients are added."""
    view: argparse.ArgumentParser = commands.add_parser("view", help="draw who attends to whom into a file")
    view.add_argument("text", metavar="TEXT", type=utf8, help="the text whose tokens look at each other")
    view.add_argument("pair", metavar="TEXT_B", nargs="?", type=utf8, help=PAIR_HELP)
    view.add_argument(
        "--mode",
        choices=("head", "model", "neuron", "heatmap", "rollout"),
        default="heatmap",
        help="head, model and neuron are bertviz's pages (.html); heatmap and rollout pictures (.png, .svg); "
        "heatmap if unset",
    )
    view.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the page or picture; one that is there is replaced"
    )
    view.add_argument(
        "--layer",
        type=int,
        help="the layer of a heatmap, the last if unset; the only one of a model page, all if unset; the one that a "
        "head or neuron page opens with; negative from the end",
    )
    view.add_argument(
        "--head",
        type=int,
        help="the head of a heatmap, all reduced to one by --reduce-heads if unset; the only one of a model page, all "
        "if unset; the one that a head or neuron page opens with; negative from the end",
    )
    add_attention_arguments(view)
    view.add_argument("--open", action="store_true", help="open the file in a browser")
    view.set_defaults(run=run)
    return view


def run(parsed: argparse.Namespace) -> int:
    """Ask the server, write the file, and say where it is."""
    from service import view  # noqa: PLC0415

    target = view.check(parsed.output, parsed.mode)
    options, shown = _wanted(parsed)
    text = parsed.text if parsed.pair is None else (parsed.text, parsed.pair)
    with open_client(parsed) as client:
        attended = client.attend(text, **options, **common_options(parsed))
    attended.save(target, parsed.mode, **shown)
    if parsed.json:
        facts = {"file": str(target), "mode": parsed.mode, "num_tokens": attended.num_tokens}
        print_json({**facts, "truncated": attended.truncated})
    else:
        cut = f", cut from {attended.original_num_tokens}" if attended.truncated else ""
        sys.stdout.write(f"{target}: {parsed.mode} of {attended.num_tokens} tokens{cut}\n")
    if parsed.open:
        _show(target.resolve().as_uri())
    return 0


def _show(address: str) -> None:
    """Open an address in a browser, or say that none opens."""
    import webbrowser  # noqa: PLC0415

    sys.stdout.flush()  # a browser of the terminal takes the screen
    if not webbrowser.open(address):
        sys.stderr.write(f"attencode: no browser opens here; the file is {address}\n")


def _wanted(parsed: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Turn flags into the options of `attend` and those of `save`.

    Raises:
        InvalidRequest: Flags that do not go together.
    """
    mode, layer, head = parsed.mode, parsed.layer, parsed.head
    layers, heads, reduction = parsed.layers, parsed.heads, parsed.reduce_heads
    if mode == "rollout":
        refuse_for_rollout(parsed)
        chosen = {"layers": layers or ALL, "heads": heads or ALL}
        return {"rollout": True, **chosen, "reduce_heads": reduction}, {}
    refuse_doubles(parsed, one_of_many=mode == "heatmap")
    if mode == "heatmap":
        options: dict[str, Any] = {"heads": (head,)} if head is not None else {"heads": heads or ALL}
        options["reduce_heads"] = None if head is not None else reduction or "mean"
        if layers is None and not parsed.reduce_layers:
            return {**options, "layers": (-1 if layer is None else layer,)}, {}
        return {**options, "layers": layers or ALL, "reduce_layers": parsed.reduce_layers or "mean"}, {}
    if reduction or parsed.reduce_layers:
        raise InvalidRequest(f"{mode} shows layers and heads apart; leave --reduce-layers and --reduce-heads out")
    chosen = {"layers": layers or ALL, "heads": heads or ALL}
    opened = {"layer": layer, "head": head}
    if mode == "neuron":
        if parsed.words:
            raise InvalidRequest("neuron shows the vectors of tokens, which words have not; leave --words out")
        if parsed.special_tokens != "keep":
            raise InvalidRequest("neuron shows the vectors of all tokens; leave --special-tokens out")
        return {**chosen, "query_key_vectors": layers or True}, opened
    return chosen, opened
