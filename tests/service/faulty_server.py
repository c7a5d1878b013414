"""A server process that fails as its callers ask: `python -m tests.service.faulty_server ARTIFACT [flags]`.

An input with the token "x" runs for a second, one with "y" for ever; both hold their thread, wherever that is.
"""

import asyncio
import sys
import time

from service.backend import LocalBackend
from service.batching import Batch
from service.cache import open_models
from service.config import parse_config
from service.ending import end_now, end_when_lost
from service.logs import log_to_stderr
from service.server import serve
from tests.checkpoints import VOCABULARY
from tests.service.faulty import Faults


def _fail(batch: Batch) -> None:
    if VOCABULARY.index("x") in batch.input_ids:
        for _ in range(12):  # not one sleep, which a pause of the process would eat up
            time.sleep(0.1)
    while VOCABULARY.index("y") in batch.input_ids:
        time.sleep(0.1)


def main() -> None:
    config = parse_config(sys.argv[1:])
    log_to_stderr(config.log_level, config.log_format)
    faults = Faults()
    faults.before = _fail
    backend = LocalBackend(config, open_models(config), session=faults.session, end=end_now)
    asyncio.run(end_when_lost(serve(config, backend, time.perf_counter())))


if __name__ == "__main__":
    main()
