"""Send one long text to a model that takes 8,192 tokens, beside short ones.

    python loadtests/long.py [--artifact FOLDER] [--tokens 8192] [--provider auto] [--seconds 20]

The model is of ModernBERT-base's size (22 layers, hidden 768) with random weights of a fixed seed, made and exported
here unless an artifact is given. Callers send a short text each, one after another, first for some seconds alone,
then while one long text is encoded. Printed are the short texts' p50 and p99 in both, how long the long text took, and
the server's largest resident memory, mapped weights included.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import numpy as np
import psutil
from arguments import above_zero, one_or_more
from harness import command_line, running_server, serve_words
from texts import TEXT, WORDS
from wire import CHANNEL_OPTIONS, ENCODE, request_bytes


def make_artifact(folder: Path) -> Path:
    """Save the checkpoint with a small tokenizer, and export it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import ModernBertConfig, ModernBertModel, PreTrainedTokenizerFast

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    ids = {f"{name}_id": number for number, name in enumerate(names) if name != "unk_token"}
    torch.manual_seed(0)
    checkpoint = folder / "checkpoint"
    ModernBertModel(ModernBertConfig(**ids, bos_token_id=2, eos_token_id=3)).save_pretrained(checkpoint)
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys((*names.values(), *WORDS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(checkpoint)
    command = [sys.executable, "-m", "service", "export", str(checkpoint), "-o", str(folder / "artifact")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "artifact"


async def short_texts(call: object, until: asyncio.Event) -> list[float]:
    """Send the short text again and again; gives how long each took, in seconds."""
    body, times = request_bytes([TEXT]), []
    while not until.is_set():
        begun = time.perf_counter()
        await call(body)  # type: ignore[operator]
        times.append(time.perf_counter() - begun)
    return times


async def beside(port: int, callers: int, work: object) -> list[float]:
    """Let callers send short texts while `work`, a coroutine, goes on."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        until = asyncio.Event()
        tasks = [asyncio.create_task(short_texts(channel.unary_unary(ENCODE), until)) for _ in range(callers)]
        await work  # type: ignore[misc]
        until.set()
        return [second for task in tasks for second in await task]


async def long_text(port: int, tokens: int) -> float:
    """Send a text of so many tokens; gives how long it took, in seconds."""
    words = (WORDS[number % len(WORDS)] for number in range(tokens - 2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        begun = time.perf_counter()
        await channel.unary_unary(ENCODE)(request_bytes([" ".join(words)], truncation="off"), timeout=290)
        return time.perf_counter() - begun


def most_resident(pid: int) -> int:
    """Give the most bytes that a process has had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


async def measure(port: int, pid: int, arguments: argparse.Namespace) -> None:
    """Run both phases and print two lines of Markdown."""
    process = psutil.Process(pid)
    before = process.memory_info().rss
    await beside(port, arguments.callers, asyncio.sleep(3))
    alone = await beside(port, arguments.callers, asyncio.sleep(arguments.seconds))
    took: list[float] = []

    async def one_long() -> None:
        took.append(await long_text(port, arguments.tokens))

    mixed = await beside(port, arguments.callers, one_long())
    peak = most_resident(pid)
    print(f"{arguments.tokens} tokens: {took[0]:.1f} s, {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at most")
    print("| short texts | requests | p50 ms | p99 ms |")
    print("|---|---|---|---|")
    for name, times in (("alone", alone), ("beside the long one", mixed)):
        p50, p99 = np.percentile(times, (50, 99)) * 1e3
        print(f"| {name} | {len(times)} | {p50:.1f} | {p99:.1f} |")


def main() -> None:
    """Make the model, start the server and measure."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=one_or_more, default=8192)
    parser.add_argument("--callers", type=one_or_more, default=1)
    parser.add_argument("--seconds", type=above_zero, default=20.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.artifact is None:
            arguments.artifact = make_artifact(Path(folder))
        with running_server(*serve_words(arguments), "--stuck-after-s", "280") as (port, pid):
            asyncio.run(measure(port, pid, arguments))


if __name__ == "__main__":
    main()
