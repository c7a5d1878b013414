"""Fuzz: send what no client would to the parts of the service, and to a whole server, and count what becomes of it.

    python tests/fuzz/run.py [TARGET ...] [--messages N] [--seconds S] [--artifact FOLDER]

Each target runs until it has had N messages or S seconds, whichever comes first; all of them if none is named. atheris
guides the targets by what their bytes reach; what it found is kept in tests/.fuzz and is where the next run begins.
`storm` sends to a server process over gRPC. Ends with 1 if something is wrong, and tells the bytes.
"""

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
KEPT = ROOT / "tests" / ".fuzz"
COMMITTED = Path(__file__).parent / "corpus"
ON_ARTIFACT = ("tokenization", "selection")
ON_FILES = ("description", "certificates")
TARGETS = ("codec_requests", *ON_ARTIFACT, "answers", "streamed_answers", "statuses", *ON_FILES)
_SLICE = 2000  # messages of the storm between two looks at the server


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[*TARGETS, "storm", []])
    parser.add_argument("--messages", type=int, default=20_000, help="of each target")
    parser.add_argument("--seconds", type=int, default=120, help="of each target, at most")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the storm")
    parser.add_argument("--artifact", type=Path, help="whose tokenizer and sizes are taken; a tiny one if unset")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    if arguments.inside:
        inside(arguments.targets[0], arguments)
        return
    failed = [name for name in arguments.targets or (*TARGETS, "storm") if not fuzz(name, arguments)]
    sys.exit(f"wrong: {', '.join(failed)}" if failed else 0)


def fuzz(name: str, arguments: argparse.Namespace) -> bool:
    """Run one target and tell of it; gives whether all was right."""
    artifact = arguments.artifact or tiny_artifact()
    if name == "storm":
        return asyncio.run(storm(artifact, arguments))
    told = KEPT / f"{name}.json"
    told.unlink(missing_ok=True)
    command = [sys.executable, __file__, name, "--inside", f"--messages={arguments.messages}"]
    command += [f"--seconds={arguments.seconds}", f"--artifact={artifact}"]
    started = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    counts = json.loads(told.read_text("utf-8")) if told.exists() else {}
    total = sum(counts.values())
    print(f"{name}: {total:,} messages, {total / seconds:,.0f} a second: {counts}", flush=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-6000:], sep="\n")
    return not done.returncode


def inside(name: str, arguments: argparse.Namespace) -> None:
    """Be the process of one target; atheris ends it."""
    import atheris

    with atheris.instrument_imports(include=["service"]):
        target = target_of(name, arguments.artifact)
    counts: Counter[str] = Counter()
    told = KEPT / f"{name}.json"
    warnings.simplefilter("error")

    def once(data: bytes) -> None:
        counts[target(data)] += 1
        if not (done := counts.total()) % 500 or done == arguments.messages:
            told.write_text(json.dumps(counts), "utf-8")

    corpus, found = KEPT / name, KEPT / "found"
    for folder in (corpus, found):
        folder.mkdir(exist_ok=True)
    COMMITTED.mkdir(exist_ok=True)
    flags = [f"-runs={arguments.messages}", f"-max_total_time={arguments.seconds}", "-max_len=1024", "-timeout=20"]
    flags += ["-rss_limit_mb=4096", f"-artifact_prefix={found}/{name}-", "-len_control=20"]
    atheris.Setup([sys.argv[0], *flags, str(corpus), str(COMMITTED)], once)
    atheris.Fuzz()


def target_of(name: str, artifact: Path) -> "Target":  # noqa: F821
    """Make a target ready."""
    from fuzz import files, targets

    if name in ON_ARTIFACT:
        return getattr(targets.OnArtifact(artifact), name)
    if name in ON_FILES:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        return getattr(files.OnFiles(folder, artifact, certificate(folder)), name)
    return getattr(targets, name)


def certificate(folder: Path) -> tuple[bytes, bytes]:
    """Make a certificate and its key."""
    from authority import Authority

    files = Authority(folder / "ca").sign("server")
    return files.cert.read_bytes(), files.key.read_bytes()


def tiny_artifact() -> Path:
    """Give the artifact of a tiny BERT, made now if it is not kept."""
    folder = KEPT / "artifact"
    if not (folder / "artifact.json").exists():
        from checkpoints import save_bert

        from model.export import export

        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as checkpoint:
            export(str(save_bert(Path(checkpoint))), folder, report=lambda _line: None)
    return folder


@contextmanager
def server(artifact: Path) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    """Start a server; gives its address, the port of its metrics and its process."""
    words = ["serve", str(artifact), "--port=0", "--metrics-port=0", "--provider=cpu", "--precision=float32"]
    with subprocess.Popen(
        [sys.executable, "-m", "service", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as made:
        try:
            line = made.stdout.readline() if made.stdout else ""
            match = re.search(r" at (\S+:\d+), .*metrics on port (\d+)", line)
            assert match, f"the server did not start: {line}"
            yield match[1], int(match[2]), made
        finally:
            made.terminate()
            made.wait(timeout=60)


async def storm(artifact: Path, arguments: argparse.Namespace) -> bool:
    """Send messages to a server: half of them to their ends, half in haste."""
    from fuzz.storm import Storm, counted, in_excess, left_behind

    statuses: Counter[str] = Counter()
    faults: list[str] = []
    sent, canaries, resident = 0, 0, []
    with server(artifact) as (address, metrics_port, process):
        started = time.perf_counter()
        while sent < arguments.messages and time.perf_counter() - started < arguments.seconds and not faults:
            before = counted(metrics_port)
            hasty = bool(len(resident) % 2)
            one = Storm(address, seed=arguments.seed + len(resident), hasty=hasty)
            told = await one.run(min(_SLICE, arguments.messages - sent))
            sent, canaries = sent + told.sent, canaries + told.canaries
            statuses.update({f"{method} {code}": count for (method, code), count in told.statuses.items()})
            faults += told.faults
            await asyncio.sleep(0.3)
            if not faults and not hasty and (wrong := in_excess(told.statuses, counted(metrics_port) - before)):
                faults.append(f"the server counted otherwise than its client: {wrong}")
            if left := left_behind(metrics_port):
                faults.append(f"left behind: {left}")
            if process.poll() is not None:
                faults.append(f"the server ended with {process.returncode}")
                break
            resident.append(psutil.Process(process.pid).memory_info().rss // 2**20)
        seconds = time.perf_counter() - started
    print(f"storm: {sent:,} messages, {sent / seconds:,.0f} a second, {canaries:,} canaries right: {dict(statuses)}")
    print(f"resident MiB after each {_SLICE:,}: {resident}", *faults[:5], sep="\n", flush=True)
    return not faults


if __name__ == "__main__":
    main()
