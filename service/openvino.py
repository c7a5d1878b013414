"""OpenVINO: the provider for x86 processors, in either of the two forms in which ONNX Runtime offers it.

The plugin (onnxruntime-ep-openvino) goes with any build of ONNX Runtime, but offers a device on Intel processors
alone. A build of ONNX Runtime with OpenVINO inside (onnxruntime-openvino) runs on AMD's as well, with bfloat16
where they have AVX-512 bf16.
May import: errors, onnxruntime.
"""

import json
import tempfile
from typing import Any

from service.errors import ProviderError

NAME = "OpenVINOExecutionProvider"
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
"""What it computes in, by our name for it: OpenVINO's."""
# OpenVINO keeps compiled code for every shape that it has seen, and compiles anew what it has dropped. Unbounded, 600
# shapes cost 1.2 GB; over random shapes 64 cost 88 MB, 192 cost 110, and mixed texts gained 7 % from 64 to 256
# (MiniLM-L6, two cores).
_CACHED_SHAPES = "256"


def absence() -> str | None:
    """Say why it cannot run here; None when it can.

    Raises:
        ProviderError: The plugin is there and cannot be loaded.
    """
    if _is_built_in():
        return None
    try:
        _register()
    except ImportError:
        return "neither onnxruntime-ep-openvino nor onnxruntime-openvino is installed; install attencode[openvino]"
    return None if _devices() else "its plugin offers no device on this processor; on AMD's install attencode[amd]"


def create(path: str, options: Any, precision: str, threads: int, streams: int) -> Any:
    """Open a graph.

    Args:
        path: Of the graph.
        options: `onnxruntime.SessionOptions`, to which the plugin's device is added.
        precision: One of `PRECISIONS`.
        threads: Of all streams together.
        streams: Runs that go on side by side.

    Raises:
        ProviderError: ONNX Runtime would have run the graph elsewhere.
    """
    import onnxruntime  # noqa: PLC0415

    properties = {
        "CPU": {
            "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
            "INFERENCE_NUM_THREADS": str(threads),
            "NUM_STREAMS": str(streams),
            "CPU_RUNTIME_CACHE_CAPACITY": _CACHED_SHAPES,
        }
    }
    if _is_built_in():
        settings = {"device_type": "CPU", "load_config": json.dumps(properties)}
        session = onnxruntime.InferenceSession(path, options, providers=[(NAME, settings)])
        if NAME not in session.get_providers():
            raise ProviderError("openvino was chosen, but ONNX Runtime could not start it; see its message above")
        return session
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="ascii") as file:  # the plugin's only way in
        json.dump(properties, file)
        file.flush()
        options.add_provider_for_devices(_devices()[:1], {"load_config": file.name})
        return onnxruntime.InferenceSession(path, options)


def _is_built_in() -> bool:
    import onnxruntime  # noqa: PLC0415

    return NAME in onnxruntime.get_available_providers()


def _register() -> None:
    import onnxruntime  # noqa: PLC0415
    import onnxruntime_ep_openvino as plugin  # noqa: PLC0415

    if not _devices():
        try:
            onnxruntime.register_execution_provider_library(NAME, plugin.get_library_path())
        except Exception as error:  # ONNX Runtime raises its own kinds; registering twice is one of them
            if "already registered" not in str(error):
                raise ProviderError(f"OpenVINO's plugin cannot be loaded: {error}") from error


def _devices() -> list[Any]:
    import onnxruntime  # noqa: PLC0415

    cpu = onnxruntime.OrtHardwareDeviceType.CPU
    offered = onnxruntime.get_ep_devices()
    return [device for device in offered if device.ep_name == NAME and device.device.type == cpu]
