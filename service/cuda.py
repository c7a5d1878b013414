"""CUDA: how ONNX Runtime's provider for NVIDIA GPUs is set up and fed.

In float16 the plain graph is `encode.cuda.onnx`, or its smaller form `pooled.cuda.onnx`, whose operators are already
the provider's own; the other graphs have no such form and stay in float32.
May import: artifact, errors, onnxruntime, numpy.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.artifact import CUDA_GRAPH, CUDA_POOLED_GRAPH, Artifact
from service.errors import ProviderError

PRECISIONS = ("float32", "float16")
STREAMS = 2
"""Batches in flight: each has a CUDA stream of its own, so that one is copied while the other is computed."""

# Bits of the provider's `sdpa_kernel` (onnxruntime, AttentionBackend). The graph's masks are laid out for
# these two kernels, so no variable of the environment may bring in another one.
_EFFICIENT_ATTENTION, _MATH = 2, 16

# ONNX Runtime fuses these by itself into kernels that sum in the precision of their inputs.
_SUMMING_IN_FLOAT16 = ["EmbedLayerNormFusion"]


def choose_precision(artifact: Artifact | None, precision: str) -> str:
    """Resolve the precision of an artifact on CUDA; `auto` takes float16 where the artifact has it.

    Raises:
        ProviderError: Float16 is asked for and the artifact lacks it.
    """
    if artifact is None or precision == "float32":
        return "float32" if precision == "auto" else precision
    has_float16 = CUDA_GRAPH in artifact.optional_files
    if precision == "float16" and not has_float16:
        raise ProviderError(
            f"{artifact.folder} has no graph for cuda in float16; export the model again with --precision float16"
        )
    return "float16" if has_float16 else "float32"


def provider_options(precision: str) -> dict[str, str]:
    """Give the provider's options.

    TF32 has float16's eleven bits and float32's range: right for the few float32 products of a float16 graph,
    wrong for float32. Skip-norms sum in float32 only in strict mode. Memory grows by what a batch needs, since
    several replicas may share a GPU.
    """
    return {
        "arena_extend_strategy": "kSameAsRequested",
        "enable_skip_layer_norm_strict_mode": "1",
        "sdpa_kernel": str(_EFFICIENT_ATTENTION | _MATH),
        "use_tf32": "1" if precision == "float16" else "0",
    }


class CudaGraph:
    """A graph on the GPU, with the `run` of an `InferenceSession`; runs may come from several threads.

    ONNX Runtime computes every output of a graph, so a smaller graph, with the model's own pooling alone, takes
    the batches that it can; the whole one is loaded when it is first needed.
    """

    def __init__(self, session: Any, open_whole: Callable[[], Any] | None = None) -> None:
        """Store the session.

        Args:
            session: Of the smaller graph, or of the only one.
            open_whole: Loads a session of the whole graph; None where there is nothing else.
        """
        self._session = session
        self._outputs = {output.name for output in session.get_outputs()}
        self._open_whole = open_whole
        self._whole: Any = None
        self._lock = Lock()

    def run(self, outputs: Sequence[str], feeds: Mapping[str, NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        """Run a batch: its inputs are copied once, its named outputs come back, nothing else does."""
        session = self._session if self._outputs.issuperset(outputs) else self._load_whole()
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in outputs:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        arrays: list[NDArray[np.float32]] = binding.copy_outputs_to_cpu()
        return arrays

    def _load_whole(self) -> Any:
        with self._lock:
            if self._whole is None:
                self._whole = self._open_whole() if self._open_whole is not None else self._session
            return self._whole


def open_graph(artifact: Artifact, graph: str, precision: str, options: Any) -> CudaGraph:
    """Load a graph of an artifact.

    Args:
        artifact: The model.
        graph: Its name, `encode` for instance.
        precision: `float32` or `float16`.
        options: ONNX Runtime's session options.

    Raises:
        ProviderError: CUDA does not start.
    """
    import onnxruntime  # noqa: PLC0415 - only after it is known to be installed once

    onnxruntime.preload_dlls()
    if precision == "float16" and graph == "encode":
        pooled = _session(artifact.folder / CUDA_POOLED_GRAPH, "float16", options)
        return CudaGraph(pooled, partial(_session, artifact.folder / CUDA_GRAPH, "float16", options))
    return CudaGraph(_session(artifact.folder / f"{graph}.onnx", "float32", options))


def _session(path: Path, precision: str, options: Any) -> Any:
    import onnxruntime  # noqa: PLC0415

    session = onnxruntime.InferenceSession(
        path,
        options,
        providers=[("CUDAExecutionProvider", provider_options(precision)), "CPUExecutionProvider"],
        disabled_optimizers=_SUMMING_IN_FLOAT16,
    )
    if "CUDAExecutionProvider" not in session.get_providers():
        raise ProviderError("cuda was chosen, but ONNX Runtime could not start it; see its message above")
    return session
