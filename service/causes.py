"""Causes: what a failed batch says of the device, read from its error.

ONNX Runtime has one kind of exception for nearly all that fails while a graph runs, so that the words decide. Pure: no
clock, no I/O. May import: nothing of the project.
"""

import re
from typing import Literal

Cause = Literal["memory", "device", "error"]
CAUSES: tuple[Cause, ...] = ("memory", "device", "error")

# The words of ONNX Runtime's arenas, of C++, of OpenVINO's oneDNN, of CUDA (error 2), cuBLAS and cuDNN.
_MEMORY = re.compile(
    r"out of memory|failed to allocate|bad[ _]alloc|cannot allocate memory|not enough memory|CUDA (failure|error) 2\b"
    r"|_ALLOC_FAILED|memory allocation|available memory of",
    re.IGNORECASE,
)
# CUDA's errors after which a process cannot use the device any more, by number and name (CUDA Runtime API, section
# Data types, cudaError): 46 devices unavailable, 100 and 101 no such device, 214 and 220 hardware, 700 to 720 faults
# of a kernel, 802 not initialized, 999 unknown.
_DEVICE = re.compile(
    r"CUDA (failure|error) (46|100|101|214|220|70[0-9]|71[0-9]|720|802|999)\b|unspecified launch failure"
    r"|illegal memory access|illegal instruction|no CUDA-capable device"
    r"|device[^.;]{0,30}\b(lost|unavailable|removed|hung)\b"
    r"|uncorrectable ECC|NVLink error|(CUBLAS|CUDNN)_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)",
    re.IGNORECASE,
)


def cause_of(error: BaseException) -> Cause:
    """Tell whether a batch failed for want of memory, because the device is gone, or for anything else."""
    words = str(error)
    if isinstance(error, MemoryError) or _MEMORY.search(words):
        return "memory"
    return "device" if _DEVICE.search(words) else "error"
