"""The command `attencode families`: prints which checkpoints can be exported, from the data that reads them.

The table is Markdown, as it stands in the README. May import: cli_print.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from service.cli_print import print_json


def add(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the command; `commands` is where argparse keeps them."""
    families = commands.add_parser("families", help="list the families of checkpoints that can be exported")
    families.add_argument("--json", action="store_true", help="print one JSON object")
    families.set_defaults(run=run)


def print_families(rows: Sequence[dict[str, str]], *, as_json: bool) -> None:
    """Print one row for each family."""
    if as_json:
        print_json({"families": list(rows)})
        return
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    sys.stdout.writelines("| " + " | ".join(line) + " |\n" for line in lines)
