"""Measure how many of the tokens that a server computes are padding, by its own metrics.

    python loadtests/padding.py [--artifact FOLDER] [--in-flight 32] [--seconds 10]

Requests of one text each, so many in flight, over the mixed trace: seven of ten texts as short as a query, two a few
sentences, one a page.
"""

import asyncio
import socket
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from arguments import above_zero, one_or_more
from closed_loop import saturation
from harness import command_line, exported, running_server, serve_words
from texts import mixed_texts
from wire import request_bytes

TEXTS = 2000


def counted(metrics_port: int, name: str) -> float:
    """Read one of the server's counters, over all models."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def main() -> None:
    """Start a server, load it and print a line of Markdown."""
    parser = command_line(__doc__)
    parser.add_argument("--in-flight", type=one_or_more, default=32)
    parser.add_argument("--seconds", type=above_zero, default=10.0)
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    bodies = [request_bytes([text]) for text in mixed_texts(TEXTS)]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        metrics_port = probe.getsockname()[1]
    with running_server(*serve_words(arguments), f"--metrics-port={metrics_port}") as (port, _):
        load = saturation(
            f"127.0.0.1:{port}", bodies, in_flight=arguments.in_flight, seconds=arguments.seconds, channels=1
        )
        rate = asyncio.run(load)
        computed = counted(metrics_port, "attencode_computed_tokens_total")
        pads = counted(metrics_port, "attencode_pad_tokens_total")
    print("| in flight | texts/s | tokens computed | padding |")
    print("|---|---|---|---|")
    print(f"| {arguments.in_flight} | {rate:.0f} | {computed:.0f} | {pads / computed:.1%} |")


if __name__ == "__main__":
    main()
