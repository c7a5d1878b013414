"""`python -m service`, the same as `attencode`. May import: cli, once gRPC knows how much it may say."""

import os
import sys


def main() -> int:
    """Run the command; gives the exit status.

    gRPC's core would write lines of its own to stderr, some with a stranger's words in them. It reads the variable when
    it is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from service.cli import main as run  # noqa: PLC0415

    return run()


if __name__ == "__main__":
    sys.exit(main())
