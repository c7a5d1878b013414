"""The command `attencode keys`: makes API keys, of which a server gets the hashes alone.

May import: keys, when it runs.
"""

import argparse
import sys
from typing import Any

_LIMITS = ("requests_per_second", "burst", "max_concurrent", "weight")


def add(commands: Any) -> None:
    """Add the command; `commands` is where argparse keeps them."""
    keys = commands.add_parser("keys", help="make API keys for `attencode serve --api-keys`")
    new = keys.add_subparsers(required=True, metavar="ACTION").add_parser(
        "new", help="make a key, print it once, and add its hash to a file"
    )
    new.add_argument("name", metavar="NAME", help="whom the key is for: letters, digits, dots, dashes, underscores")
    new.add_argument("--file", required=True, metavar="FILE", help="the file of keys; made if it is not there")
    rate = "requests, and items of streams, each second; any number if unset"
    new.add_argument("--requests-per-second", type=float, metavar="NUMBER", help=rate)
    burst = "how many of them at once after a pause; one second's if unset"
    new.add_argument("--burst", type=float, metavar="NUMBER", help=burst)
    new.add_argument("--max-concurrent", type=int, metavar="NUMBER", help="how many in work at once; any if unset")
    new.add_argument("--weight", type=float, metavar="NUMBER", help="share of the device beside others; 1 if unset")
    new.set_defaults(run=_new)


def _new(parsed: argparse.Namespace) -> int:
    from service.keys import new_key  # noqa: PLC0415

    given = {name: getattr(parsed, name) for name in _LIMITS}
    key = new_key(parsed.name, parsed.file, {name: value for name, value in given.items() if value is not None})
    sys.stdout.write(key + "\n")
    sys.stderr.write(f"the key of {parsed.name!r} is printed this once; {parsed.file!r} has its hash\n")
    return 0
