"""CUDA: how ONNX Runtime's provider for NVIDIA GPUs is set up and fed.

In float16 the encoder is `encode.cuda.onnx`, or its smaller form `pooled.cuda.onnx`, whose operators are already the
provider's own. They have no hidden states but the last; rows of which others are wanted also run through `encode.onnx`,
in float32.
May import: artifact, errors, onnxruntime, numpy.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.artifact import CUDA_GRAPH, CUDA_POOLED_GRAPH, CUDA_WEIGHTS, WEIGHTS_FILE, Artifact
from service.errors import ProviderError

PRECISIONS = ("float32", "float16")
STREAMS = 2
"""Batches in flight: each has a CUDA stream of its own, so that one is copied while the other is computed."""

_STATES, _STATE_ROWS = "hidden_states", "state_rows"

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
    the batches that it can; larger ones are loaded when they are first needed.
    """

    def __init__(self, *openers: Callable[[], Any]) -> None:
        """Store how sessions are opened, and open the first.

        Args:
            openers: Each opens a session of a graph that has more outputs than the one before.
        """
        self._openers = openers
        self._opened: list[tuple[Any, frozenset[str]]] = []  # each with the outputs that it has
        self._lock = Lock()
        self._with(set())

    def run(self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        """Run a batch: its inputs are copied once, its named outputs come back, nothing else does."""
        plain = [name for name in outputs if name != _STATES]
        session, there = self._with(set(plain))
        if there.issuperset(outputs):
            return _run(session, outputs, feeds)
        rows = feeds[_STATE_ROWS]  # of which the states are wanted, as a batch of their own
        own = {name: np.arange(len(rows)) if name == _STATE_ROWS else array[rows] for name, array in feeds.items()}
        (states,) = _run(self._with({_STATES})[0], [_STATES], own)
        arrays = dict(zip(plain, _run(session, plain, feeds), strict=True)) if plain else {}
        return [states if name == _STATES else arrays[name] for name in outputs]

    def _with(self, outputs: set[str]) -> tuple[Any, frozenset[str]]:
        """Give the first session that has these outputs, and all that it has; it is opened if it is not yet."""
        for place, opener in enumerate(self._openers):
            if place == len(self._opened):
                with self._lock:
                    if place == len(self._opened):
                        session = opener()
                        self._opened.append((session, frozenset(output.name for output in session.get_outputs())))
            if self._opened[place][1] >= outputs:
                return self._opened[place]
        raise ProviderError(f"no graph has the outputs {', '.join(sorted(outputs))}")


def _run(session: Any, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
    binding = session.io_binding()
    for put in session.get_inputs():
        array = feeds[put.name]
        if put.name == _STATE_ROWS and not len(array):
            array = np.zeros(1, np.int64)  # one row that nobody asked for, since an empty buffer has no address
        binding.bind_cpu_input(put.name, np.ascontiguousarray(array))
    for name in outputs:
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    arrays: list[NDArray[np.float32]] = binding.copy_outputs_to_cpu()
    return arrays


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
    exact = partial(_session, artifact, f"{graph}.onnx", "float32", options)
    if precision == "float16" and graph == "encode":
        return CudaGraph(
            partial(_session, artifact, CUDA_POOLED_GRAPH, "float16", options),
            partial(_session, artifact, CUDA_GRAPH, "float16", options),
            exact,
        )
    return CudaGraph(exact)


def _session(artifact: Artifact, name: str, precision: str, options: Any) -> Any:
    import onnxruntime  # noqa: PLC0415

    session = onnxruntime.InferenceSession(
        artifact.folder / name,
        options,
        providers=[("CUDAExecutionProvider", provider_options(precision)), "CPUExecutionProvider"],
        disabled_optimizers=_SUMMING_IN_FLOAT16,
    )
    if "CUDAExecutionProvider" not in session.get_providers():
        raise ProviderError("cuda was chosen, but ONNX Runtime could not start it; see its message above")
    artifact.check_unchanged(name, CUDA_WEIGHTS if precision == "float16" else WEIGHTS_FILE)  # some are opened late
    return session
