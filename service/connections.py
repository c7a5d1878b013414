"""Connections: how many are open to one of this process' ports, from Linux' tables of sockets.

gRPC limits them, and does not say how many there are. Where there is no Linux the number is NaN.
May import: nothing of the project.
"""

import math
import re
from pathlib import Path

_TABLES = ("self/net/tcp", "self/net/tcp6")  # of IPv4 and IPv6; those of a port on both are in the second


class Connections:
    """The open TCP connections to a port."""

    def __init__(self, port: int, proc: Path = Path("/proc")) -> None:
        """Keep the port.

        Args:
            port: Where the server listens.
            proc: Where processes are.
        """
        self._tables = [proc / table for table in _TABLES]
        # A line begins with its number, the own address, the peer's, and the state, of which 01 is ESTABLISHED.
        self._line = re.compile(rb"^ *\d+: [0-9A-F]+:%04X [0-9A-F]+:[0-9A-F]{4} 01 " % port, re.MULTILINE)

    def count(self) -> float:
        """Give how many there are, those included that have said nothing yet."""
        found = [len(self._line.findall(content)) for table in self._tables if (content := _read(table))]
        return float(sum(found)) if found else math.nan


def _read(table: Path) -> bytes:
    """Read a table; empty where there is none, as that of IPv6 on a kernel without it."""
    try:
        return table.read_bytes()
    except OSError:
        return b""
