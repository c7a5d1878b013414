"""Measure the float16 graph on an NVIDIA GPU: parity, tokens a second, latency, and the share of the card's own rate.

    python loadtests/gpu.py [--seconds 1.0] [--models minilm base large]
    python loadtests/gpu.py --smoke      # the same code on the processor, with tiny models

Needs torch, numpy, onnx, onnxruntime-gpu, tokenizers and transformers, no network: the models have random
weights, which are as fast as trained ones. Prints one table in Markdown. A model that fails is a line of it and
does not stop the others; then, or where a cosine is too low, the exit status is 1, and 2 without a GPU.

Floating-point operations of a batch, per token and layer: 2 (4 d^2 + 2 d f) for the products with weights and
4 s d for the scores and the context, with d = hidden size, f = intermediate size, s = padded length.
"""

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
try:
    import grpc  # noqa: F401
except ImportError:  # errors carry a status each, which is all that a measured session needs of gRPC
    absent = ModuleType("grpc")
    names = "INTERNAL INVALID_ARGUMENT RESOURCE_EXHAUSTED DEADLINE_EXCEEDED UNAUTHENTICATED UNAVAILABLE"
    absent.StatusCode = Enum("StatusCode", names)  # type: ignore[attr-defined]
    sys.modules["grpc"] = absent

import onnxruntime

from model.export import MIN_COSINES, export
from service.artifact import CUDA_POOLED_GRAPH, Artifact, open_artifact
from service.batching import Batch
from service.cuda import CudaGraph
from service.placement import Placement, choose_placement, usable_cores
from service.session import Session

LAST_START_S = 420.0  # no model is begun later, so that the whole stays under eight minutes
TOO_LOW = " (too low)"
PARITY_LENGTHS = (5, 64, 23, 40)
LATENCY_SHAPE = (1, 16)
HEAD = (
    "model",
    "batch x length",
    "tokens/s, 1 in flight",
    "tokens/s, 2 in flight",
    "TFLOP/s",
    "of the card's rate",
    "p50 ms, 1x16",
    "cosine, worst token",
    "cosine, worst pooled",
)


@dataclass(frozen=True)
class Size:
    """A model's size, in Hugging Face's names."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int = 30522

    def flops(self, rows: int, length: int) -> float:
        """Count the operations of one batch."""
        products = 2 * (4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size)
        return rows * length * self.num_hidden_layers * (products + 4 * length * self.hidden_size)


SIZES = {
    "minilm": Size(6, 384, 12, 1536),
    "base": Size(12, 768, 12, 3072),
    "large": Size(24, 1024, 16, 4096),
}
SHAPES = ((64, 32), (64, 128), (32, 512), (256, 128))
TINY = {"tiny": Size(2, 32, 4, 64, 100)}
TINY_SHAPES = ((2, 8), (4, 16))


def main() -> int:
    """Measure and print; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--smoke", action="store_true", help="tiny models on the processor")
    arguments = parser.parse_args()
    if not arguments.smoke and (lack := missing()):
        print(f"gpu.py needs an NVIDIA GPU: {lack}; --smoke runs the same code without one", file=sys.stderr)
        return 2
    started = time.monotonic()
    sizes = TINY if arguments.smoke else {name: SIZES[name] for name in arguments.models}
    shapes = TINY_SHAPES if arguments.smoke else SHAPES
    rate = matrix_rate(128 if arguments.smoke else 8192, "cpu" if arguments.smoke else "cuda")
    card = "processor" if arguments.smoke else torch.cuda.get_device_name()
    print(f"{card}, float16 products of torch: {rate / 1e12:.1f} TFLOP/s, onnxruntime {onnxruntime.__version__}\n")
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    failed = False
    for name, size in sizes.items():
        try:
            if time.monotonic() - started > LAST_START_S:
                raise TimeoutError("no time left")
            rows = measure(name, size, shapes, rate, seconds=arguments.seconds, smoke=arguments.smoke)
        except Exception as error:  # noqa: BLE001 - the others shall be measured all the same
            failed = True
            rows = [(name, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")]
        failed |= any(TOO_LOW in word for row in rows for word in row)
        for row in rows:
            print("| " + " | ".join((*row, *[""] * (len(HEAD) - len(row)))) + " |", flush=True)
    return int(failed)


def missing() -> str:
    """Say what is missing for CUDA; empty when nothing is."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this ONNX Runtime is built without CUDA (install onnxruntime-gpu)"
    return "" if torch.cuda.is_available() else "torch finds none"


def matrix_rate(width: int, device: str) -> float:
    """Measure the device's rate at a float16 product of two square matrices, in operations a second."""
    a, b = (torch.randn(width, width, device=device, dtype=torch.float16) for _ in range(2))
    seconds = []
    for _ in range(8):
        wait(device)
        started = time.perf_counter()
        for _ in range(5):
            a @ b
        wait(device)
        seconds.append((time.perf_counter() - started) / 5)
    return 2 * width**3 / min(seconds)


def wait(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    name: str, size: Size, shapes: tuple[tuple[int, int], ...], rate: float, *, seconds: float, smoke: bool
) -> list[tuple[str, ...]]:
    """Export a model and measure it; gives its rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(size, Path(folder) / "checkpoint")
        place = Path(folder) / "artifact"
        export(str(checkpoint), place, precision="float16", report=lambda line: print(line, file=sys.stderr))
        artifact = open_artifact(place)
        session = open_session(artifact, smoke=smoke)
        token, pooled = parity(session, artifact)
        p50_s = latency(session, artifact, seconds)
        cosines = {"token": token, "pooled": pooled}
        shown = [f"{value:.6f}{'' if value >= MIN_COSINES[kind] else TOO_LOW}" for kind, value in cosines.items()]
        rows = []
        for batch_size, length in shapes:
            batch = random_batch(artifact, (length,) * batch_size, (f"pooled_{artifact.pooling}",))
            rates = [throughput(session, batch, in_flight, seconds) for in_flight in (1, 2)]
            flops = size.flops(batch_size, length) * max(rates)
            figures = [f"{batches * batch_size * length:,.0f}" for batches in rates]
            rows.append((name, f"{batch_size}x{length}", *figures, f"{flops / 1e12:.1f}", f"{flops / rate:.0%}"))
        rows[0] += (f"{1e3 * p50_s:.3f}", *shown)
        return rows


def make_checkpoint(size: Size, folder: Path) -> Path:
    """Save a BERT of random weights with a small tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    BertModel(BertConfig(**vars(size))).save_pretrained(folder)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = [*names.values(), *"abcdefghij"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def open_session(artifact: Artifact, *, smoke: bool) -> Session:
    """Open the float16 graph as the service does; the smoke run puts the same graph on the processor."""
    if not smoke:
        placement = choose_placement("cuda", "float16", artifact)
        return Session(artifact, placement, threads=usable_cores(), streams=2)
    session = Session(artifact, Placement("cpu", "float16", "smoke"), threads=1)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    path = artifact.folder / CUDA_POOLED_GRAPH
    opened = partial(onnxruntime.InferenceSession, path, options, providers=["CPUExecutionProvider"])
    session._sessions["encode", 1] = CudaGraph(opened)
    return session


def random_batch(artifact: Artifact, lengths: tuple[int, ...], outputs: tuple[str, ...]) -> Batch:
    """Draw a batch of random tokens, padded on the right."""
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(3).integers(5, artifact.vocab_size, shape) * mask
    return Batch(outputs, lengths, ids, mask, np.zeros_like(ids), mask)


def parity(session: Session, artifact: Artifact) -> tuple[float, float]:
    """Give the smallest cosine of a token and of a pooled vector to the CPU's in float32."""
    batch = random_batch(artifact, PARITY_LENGTHS, ("last_hidden_state", "pooled_mean"))
    exact = Session(artifact, Placement("cpu", "float32", "oracle"), threads=usable_cores()).run(batch)
    close = session.run(batch)
    kept = batch.attention_mask.astype(bool)
    token = cosine(exact["last_hidden_state"][kept], close["last_hidden_state"][kept])
    return token, cosine(exact["pooled_mean"], close["pooled_mean"])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Give the smallest cosine of two sets of vectors, (vectors, dim)."""
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min())


def latency(session: Session, artifact: Artifact, seconds: float) -> float:
    """Give the median seconds of one short batch after another."""
    rows, length = LATENCY_SHAPE
    batch = random_batch(artifact, (length,) * rows, (f"pooled_{artifact.pooling}",))
    taken = []
    for number in range(3, 10**6):
        started = time.perf_counter()
        session.run(batch)
        taken.append(time.perf_counter() - started)
        if number > 8 and sum(taken) > seconds:
            break
    return statistics.median(taken[5:])


def throughput(session: Session, batch: Batch, in_flight: int, seconds: float) -> float:
    """Give the batches a second of so many threads, each of which runs one batch after another."""
    for _ in range(3):
        session.run(batch)
    end = time.perf_counter() + seconds

    def run_on() -> tuple[int, float]:
        count = 0
        while time.perf_counter() < end or not count:
            session.run(batch)
            count += 1
        return count, time.perf_counter()

    started = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as threads:
        done = [future.result() for future in [threads.submit(run_on) for _ in range(in_flight)]]
    return sum(count for count, _ in done) / (max(stopped for _, stopped in done) - started)


if __name__ == "__main__":
    sys.exit(main())
