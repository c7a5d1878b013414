"""sentence-transformers in a loop: the child process that `peers.py` runs in that peer's own environment.

    python loadtests/peer_loop.py MODEL_FOLDER cpu|cuda

Reads one JSON object a line, {"groups": [[text, ...], ...], "times": 1, "vectors": false}: calls `encode` with
each group, the whole list so many times, and writes {"seconds": [...]} with the seconds of each call, and the
last pass's vectors if they are asked for. Imports nothing of this project, which that environment lacks.
"""

import json
import sys
import time

from sentence_transformers import SentenceTransformer


def main() -> None:
    """Answer until the input ends."""
    model = SentenceTransformer(sys.argv[1], device=sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing but answers may come in between
    for line in sys.stdin:
        order = json.loads(line)
        seconds, vectors = [], []
        for number in range(order["times"]):
            for group in order["groups"]:
                started = time.perf_counter()
                encoded = model.encode(group, show_progress_bar=False)
                seconds.append(time.perf_counter() - started)
                if order["vectors"] and number == order["times"] - 1:
                    vectors += encoded.tolist()
        print(json.dumps({"seconds": seconds, "vectors": vectors}), file=answers, flush=True)


if __name__ == "__main__":
    main()
