"""CUDA: how ONNX Runtime's provider for NVIDIA GPUs is set up and fed.

In float16 the plain graph is `encode.cuda.onnx`, whose operators are already the provider's own; `inspect` has
no such form and stays in float32. A run computes what leads to the outputs that are asked for and nothing else.
May import: artifact, errors, onnxruntime, numpy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.artifact import CUDA_GRAPH, Artifact
from service.errors import ProviderError

STREAMS = 2
"""Batches in flight: each has a CUDA stream of its own, so that one is copied while the other is computed."""

# Bits of the provider's `sdpa_kernel` (onnxruntime, AttentionBackend). The graph's masks are laid out for
# these two kernels, so no variable of the environment may bring in another one.
_EFFICIENT_ATTENTION, _MATH = 2, 16

# ONNX Runtime fuses these by itself into kernels that sum in the precision of their inputs.
_SUMMING_IN_FLOAT16 = ["EmbedLayerNormFusion"]


def cuda_precision(artifact: Artifact | None, precision: str) -> str:
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
    """One graph on the GPU, with the `run` of an `InferenceSession`; runs may come from several threads."""

    def __init__(self, session: Any) -> None:
        """Store the session."""
        import onnxruntime  # noqa: PLC0415 - only after it is known to be installed once

        self._session = session
        self._options = onnxruntime.RunOptions()
        self._options.only_execute_path_to_fetches = True  # else every pooling is computed each time

    def run(self, outputs: Sequence[str], feeds: Mapping[str, NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        """Run a batch: its inputs are copied once, its named outputs come back, nothing else does."""
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding, self._options)
        arrays: list[NDArray[np.float32]] = binding.copy_outputs_to_cpu()
        return arrays


def open_graph(artifact: Artifact, graph: str, precision: str, options: Any) -> CudaGraph:
    """Load a graph of an artifact.

    Args:
        artifact: The model.
        graph: `encode` or `inspect`.
        precision: `float32` or `float16`.
        options: ONNX Runtime's session options.

    Raises:
        ProviderError: CUDA does not start.
    """
    import onnxruntime  # noqa: PLC0415

    onnxruntime.preload_dlls()
    float16 = precision == "float16" and graph == "encode"
    session = onnxruntime.InferenceSession(
        artifact.folder / (CUDA_GRAPH if float16 else f"{graph}.onnx"),
        options,
        providers=[
            ("CUDAExecutionProvider", provider_options("float16" if float16 else "float32")),
            "CPUExecutionProvider",
        ],
        disabled_optimizers=_SUMMING_IN_FLOAT16,
    )
    if "CUDAExecutionProvider" not in session.get_providers():
        raise ProviderError("cuda was chosen, but ONNX Runtime could not start it; see its message above")
    return CudaGraph(session)
