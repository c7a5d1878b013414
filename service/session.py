"""Session: an artifact on an execution provider. Arrays in, arrays out.

ONNX Runtime is the one runtime; what differs is the provider. `auto` takes the fastest that is present
and says why; a provider that was asked for by name and cannot run stops the start.
May import: artifact, batching, cuda, errors, onnxruntime, numpy.
"""

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.artifact import Artifact
from service.batching import Batch, Graph
from service.cuda import cuda_precision, open_graph
from service.errors import ProviderError

_LOG = logging.getLogger(__name__)

PROVIDERS = ("auto", "cuda", "openvino", "cpu")
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
_PRECISIONS_OF: Mapping[str, tuple[str, ...]] = {
    "cuda": ("float32", "float16"),
    "openvino": ("float32", "bfloat16"),
    "cpu": ("float32",),
}
_OPENVINO = "OpenVINOExecutionProvider"
_OPENVINO_PRECISION = {"float32": "f32", "bfloat16": "bf16"}
# OpenVINO keeps compiled code for every shape that it has seen; unbounded, 600 shapes cost 1.2 GB,
# bounded to 64 they cost 0.3 GB (measured, MiniLM-L6).
_OPENVINO_CACHED_SHAPES = "64"
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")  # as Linux names them in /proc/cpuinfo
_WARM_UP_SHAPES = ((1, 16), (8, 16), (8, 64))


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
        return Placement(chosen, cuda_precision(artifact, precision), reason)
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
        raise ProviderError("ONNX Runtime is not installed; install attencode[cpu], [openvino] or [gpu]")
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
    if provider == "openvino":
        try:
            _register_openvino()
        except ImportError:
            return "onnxruntime-ep-openvino is not installed; install attencode[openvino]"
        return None if _openvino_devices() else "its plugin offers no device on this processor"
    return None


def _nvidia_present() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or os.name == "nt"


def _register_openvino() -> None:
    import onnxruntime  # noqa: PLC0415
    import onnxruntime_ep_openvino as plugin  # noqa: PLC0415

    if not _openvino_devices():
        try:
            onnxruntime.register_execution_provider_library(_OPENVINO, plugin.get_library_path())
        except Exception as error:  # ONNX Runtime raises its own kinds; registering twice is one of them
            if "already registered" not in str(error):
                raise ProviderError(f"OpenVINO's plugin cannot be loaded: {error}") from error


def _openvino_devices() -> list[Any]:
    import onnxruntime  # noqa: PLC0415

    cpu = onnxruntime.OrtHardwareDeviceType.CPU
    offered = onnxruntime.get_ep_devices()
    return [device for device in offered if device.ep_name == _OPENVINO and device.device.type == cpu]


def _has_bfloat16() -> bool:
    """Tell whether the processor multiplies bfloat16 natively; elsewhere float32 is as fast."""
    try:
        flags = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    except OSError:
        return False
    return any(flag in flags for flag in _BFLOAT16_FLAGS)


class Session:
    """Both graphs of an artifact on one provider; `inspect` is loaded when it is first needed.

    Runs may come from several threads at once.
    """

    def __init__(self, artifact: Artifact, placement: Placement, *, threads: int, streams: int = 1) -> None:
        """Store what is needed; `load` does the work.

        Args:
            artifact: The model.
            placement: Where it runs.
            threads: Threads of all streams together.
            streams: Runs that go on side by side.
        """
        self.artifact = artifact
        self.placement = placement
        self._threads = threads
        self._streams = streams
        self._sessions: dict[Graph, Any] = {}
        self._lock = Lock()

    def load(self, graph: Graph = "encode") -> Any:
        """Load a graph if it is not loaded yet.

        Raises:
            ProviderError: The provider refuses it.
        """
        with self._lock:
            if graph not in self._sessions:
                self._sessions[graph] = self._create(graph)
            return self._sessions[graph]

    def warm_up(self) -> None:
        """Run the plain graph on common shapes, so that the first caller waits for no compilation."""
        for rows, longest in _WARM_UP_SHAPES:
            length = min(longest, self.artifact.max_tokens)
            self.check(self.run(self.trial(rows, length)))

    def trial(self, rows: int, length: int) -> Batch:
        """Give a batch to try the plain graph with."""
        ids = np.full((rows, length), self.artifact.vocab_size - 1, dtype=np.int64)
        ones, zeros = np.ones_like(ids), np.zeros_like(ids)
        return Batch("encode", (f"pooled_{self.artifact.pooling}",), (length,) * rows, ids, ones, zeros, ones)

    def check(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Refuse what a trial yielded unless all of it is finite.

        Raises:
            ProviderError: Some of it is not.
        """
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise ProviderError(f"{self.placement.provider} computes NaN or infinity for a trial batch")

    def run(self, batch: Batch) -> dict[str, NDArray[np.float32]]:
        """Run one batch.

        Returns:
            The batch's outputs by name, float32, padding included.
        """
        session = self._sessions.get(batch.graph) or self.load(batch.graph)
        feeds = {name: getattr(batch, name) for name in self.artifact.inputs}
        return dict(zip(batch.outputs, session.run(batch.outputs, feeds), strict=True))

    def _create(self, graph: Graph) -> Any:
        import onnxruntime  # noqa: PLC0415

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = max(1, self._threads // self._streams)
        path = str(self.artifact.folder / f"{graph}.onnx")
        provider = self.placement.provider
        try:
            if provider == "openvino":
                with self._openvino_settings() as settings:
                    options.add_provider_for_devices(_openvino_devices()[:1], {"load_config": settings})
                    return onnxruntime.InferenceSession(path, options)
            if provider == "cuda":
                return open_graph(self.artifact, graph, self.placement.precision, options)
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except ProviderError:
            raise
        except Exception as error:  # ONNX Runtime raises a kind of its own for each status
            raise ProviderError(f"{provider} cannot load {path}: {error}") from error

    @contextmanager
    def _openvino_settings(self) -> Iterator[str]:
        """Write OpenVINO's properties to a file, the only way in that the plugin offers."""
        properties = {
            "INFERENCE_PRECISION_HINT": _OPENVINO_PRECISION[self.placement.precision],
            "INFERENCE_NUM_THREADS": str(self._threads),
            "NUM_STREAMS": str(self._streams),
            "CPU_RUNTIME_CACHE_CAPACITY": _OPENVINO_CACHED_SHAPES,
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="ascii") as file:
            json.dump({"CPU": properties}, file)
            file.flush()
            yield file.name
