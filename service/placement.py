"""Placement: which execution provider runs a model, in which precision, on how many cores.

`auto` takes the fastest that is present and says why; a provider that was asked for by name and cannot run
stops the start.
May import: openvino, cuda, artifact, errors, onnxruntime.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from service import cuda, openvino
from service.artifact import Artifact
from service.errors import ProviderError

PROVIDERS = ("auto", "cuda", "openvino", "cpu")
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
_PRECISIONS_OF: Mapping[str, tuple[str, ...]] = {
    "cuda": cuda.PRECISIONS,
    "openvino": tuple(openvino.PRECISIONS),
    "cpu": ("float32",),
}
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")  # as Linux names them in /proc/cpuinfo


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a session runs, and why there."""

    provider: str
    precision: str
    reason: str

    @property
    def device(self) -> str:
        """Provider and precision in one phrase."""
        return f"{self.provider} {self.precision}"


def usable_cores() -> int:
    """Count the cores that this process may use: its affinity, cut by a cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def streams_for(provider: str, threads: int) -> int:
    """Give how many batches should run side by side.

    A batch on one thread waits for no other thread: on two cores, beside the event loop, two batches of one thread
    each yield a fifth more texts a second than one of two threads (loadtests/README.md). Beyond eight there are more
    batches in flight than callers fill, so threads are added to each instead.
    """
    return cuda.STREAMS if provider == "cuda" else min(threads, 8)


def choose_placement(provider: str, precision: str, artifact: Artifact | None = None) -> Placement:
    """Decide provider and precision from what is asked for and what is present.

    Args:
        provider: One of `PROVIDERS`.
        precision: One of `PRECISIONS`.
        artifact: What is to run, where that is known already: it may lack a precision.

    Raises:
        ProviderError: What was asked for by name cannot run here, or two builds of ONNX Runtime are
            installed over one another.
    """
    _refuse_two_runtimes()
    if provider == "auto":
        candidates = ["cuda", "openvino", "cpu"]
        absences = {name: _absence(name) for name in candidates}
        chosen = next(name for name in candidates if absences[name] is None)
        passed = [f"{name}: {absence}" for name, absence in absences.items() if absence]
        reason = "fastest present" + (f" ({'; '.join(passed)})" if passed else "")
    else:
        chosen, reason = provider, "asked for"
        if absence := _absence(provider):
            raise ProviderError(f"provider {provider} cannot run here: {absence}")
    if chosen == "cuda" and precision in ("auto", *_PRECISIONS_OF[chosen]):
        return Placement(chosen, cuda.choose_precision(artifact, precision), reason)
    if precision == "auto":
        native = chosen == "openvino" and _has_bfloat16()
        return Placement(chosen, "bfloat16" if native else "float32", reason)
    if precision not in _PRECISIONS_OF[chosen]:
        offered = ", ".join(_PRECISIONS_OF[chosen])
        raise ProviderError(f"provider {chosen} does not run {precision}; it runs {offered}")
    return Placement(chosen, precision, reason)


def _refuse_two_runtimes() -> None:
    installed = []
    for name in _RUNTIMES:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        installed.append(name)
    if not installed:
        raise ProviderError("ONNX Runtime is not installed; install attencode[cpu], [openvino], [amd] or [gpu]")
    if len(installed) > 1:
        raise ProviderError(
            f"{' and '.join(installed)} are installed over one another, so which one runs is undefined; "
            f"uninstall all of them and install one again"
        )


def _absence(provider: str) -> str | None:
    """Say why a provider cannot run here; None when it can."""
    import onnxruntime  # noqa: PLC0415 - only after it is known to be installed once

    if provider == "cuda":
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return "this ONNX Runtime is built without CUDA; install attencode[gpu]"
        return None if _nvidia_present() else "no NVIDIA device"
    return openvino.absence() if provider == "openvino" else None


def _nvidia_present() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or os.name == "nt"


def _has_bfloat16() -> bool:
    """Tell whether the processor multiplies bfloat16 natively; elsewhere float32 is as fast."""
    try:
        flags = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    except OSError:
        return False
    return any(flag in flags for flag in _BFLOAT16_FLAGS)
