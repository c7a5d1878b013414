"""The command `attencode view`: a page or a picture of who attends to whom, in a file.

Its flags for the server are those of the other commands of a client. May import: client, view, errors.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from service.errors import InvalidRequest


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command; gives its parser, to which the flags of all clients are added."""
    view: argparse.ArgumentParser = commands.add_parser("view", help="draw who attends to whom into a file")
    view.add_argument("text", metavar="TEXT")
    view.add_argument("pair", metavar="TEXT_B", nargs="?", help="second text of a pair")
    view.add_argument(
        "--mode",
        choices=("head", "model", "neuron", "heatmap", "rollout"),
        default="heatmap",
        help="head, model and neuron are bertviz's pages (.html); heatmap and rollout pictures (.png, .svg)",
    )
    view.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    view.add_argument(
        "--layer",
        type=int,
        help="the one of a heatmap or a model page, the first to show elsewhere; negative from the end",
    )
    view.add_argument("--head", type=int, help="likewise; a heatmap shows all heads reduced to one if unset")
    view.add_argument("--reduce-heads", choices=("mean", "max"), help="of a heatmap; mean if unset")
    view.add_argument("--words", action="store_true", help="merge the tokens of each word")
    view.add_argument("--open", action="store_true", help="open the file in a browser")
    view.set_defaults(run=run)
    return view


def run(parsed: argparse.Namespace) -> int:
    """Ask the server, write the file, and say where it is."""
    from service import view  # noqa: PLC0415
    from service.client import Client  # noqa: PLC0415

    view.check(parsed.output, parsed.mode)
    options, shown = _wanted(parsed)
    text = parsed.text if parsed.pair is None else (parsed.text, parsed.pair)
    common = {"truncation": parsed.truncation, "prompt_name": parsed.prompt_name, "model": parsed.model}
    with Client(parsed.address, timeout_s=parsed.timeout) as client:
        attended = client.attend(text, **options, **common)
    attended.save(parsed.output, parsed.mode, **shown)
    if parsed.json:
        facts = {"file": str(parsed.output), "mode": parsed.mode, "num_tokens": attended.num_tokens}
        sys.stdout.write(json.dumps({**facts, "truncated": attended.truncated}) + "\n")
    else:
        cut = f", cut from {attended.original_num_tokens}" if attended.truncated else ""
        sys.stdout.write(f"{parsed.output}: {parsed.mode} of {attended.num_tokens} tokens{cut}\n")
    if parsed.open:
        import webbrowser  # noqa: PLC0415

        webbrowser.open(parsed.output.resolve().as_uri())
    return 0


def _wanted(parsed: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Turn flags into the options of `attend` and those of `save`.

    Raises:
        InvalidRequest: Flags that do not go together.
    """
    mode, layer, head = parsed.mode, parsed.layer, parsed.head
    if parsed.reduce_heads and (mode != "heatmap" or head is not None):
        raise InvalidRequest("--reduce-heads goes with --mode heatmap and without --head; leave it out")
    if mode == "rollout":
        if layer is not None or head is not None:
            raise InvalidRequest("rollout goes through all layers and heads; leave --layer and --head out")
        return {"rollout": True, "words": parsed.words}, {}
    if mode == "heatmap":
        chosen = {"heads": [head]} if head is not None else {"reduce_heads": parsed.reduce_heads or "mean"}
        return {"layers": [-1 if layer is None else layer], **chosen, "words": parsed.words}, {}
    if mode == "neuron":
        if parsed.words:
            raise InvalidRequest("neuron shows the vectors of tokens, which words have not; leave --words out")
        return {"query_key_vectors": True}, {"layer": layer, "head": head}
    return {"words": parsed.words}, {"layer": layer, "head": head}
