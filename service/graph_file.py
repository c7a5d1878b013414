"""Graph file: what an ONNX file refers to and declares, held to its artifact before ONNX Runtime opens it.

ONNX Runtime trusts a graph: it maps whatever file, or place in memory, an external tensor names, loads blobs that
operators name by path, and sets aside what a shape declares. So of a graph there may be: tensors in the artifact's own
weights file and within its size, operators that compute and touch nothing else, and the inputs and outputs that the
artifact speaks of. The digests of an artifact do not show who made it.
May import: errors, google.protobuf.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from service.errors import ArtifactError

MOST_BYTES = 8 << 20
"""Of a graph's file, its weights left out; 100 layers have about 2 MB."""
FLOAT, INT64 = 1, 7
"""Element types, as onnx.proto numbers them (TensorProto.DataType)."""

_MOST_NODES = 100_000  # 100 layers have about 15,000; ONNX Runtime works through them several times
_MOST_DIMS = 8
_WIDTHS = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}  # bytes of a number
_EXTERNAL = 1  # TensorProto.DataLocation
_OWN_DOMAINS = (b"", b"ai.onnx")
# ONNX Runtime's own operators that the graphs for CUDA have. Others of that domain read files, EPContext for one.
_RUNTIME_DOMAIN = b"com.microsoft"
_RUNTIME_OPERATORS = {b"Attention", b"BiasGelu", b"FastGelu", b"SkipLayerNormalization"}
_BRANCH = b"If"  # the one operator whose graphs within are taken: without loops a run comes to its end

# The part of onnx.proto that is looked at: message -> field -> number and type, `*` for a list.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "Model": {"graph": (7, "Graph"), "opsets": (8, "Opset*"), "training": (20, "Any*"), "functions": (25, "Any*")},
    "Opset": {"domain": (1, "bytes")},
    "Graph": {
        "nodes": (1, "Node*"),
        "initializers": (5, "Tensor*"),
        "inputs": (11, "Value*"),
        "outputs": (12, "Value*"),
        "sparse": (15, "Any*"),
    },
    "Node": {"operator": (4, "bytes"), "attributes": (5, "Attribute*"), "domain": (7, "bytes")},
    "Attribute": {
        "tensor": (5, "Tensor"),
        "graph": (6, "Graph"),
        "tensors": (10, "Tensor*"),
        "graphs": (11, "Any*"),
        "sparse": (22, "Any"),
        "sparses": (23, "Any*"),
    },
    "Tensor": {
        "dims": (1, "int64*"),
        "data_type": (2, "int32"),
        "name": (8, "bytes"),
        "external": (13, "Entry*"),
        "location": (14, "int32"),
    },
    "Entry": {"key": (1, "bytes"), "value": (2, "bytes")},
    "Value": {"name": (1, "bytes"), "type": (2, "Type")},
    "Type": {"tensor": (1, "TensorType")},
    "TensorType": {"data_type": (1, "int32"), "shape": (2, "Shape")},
    "Shape": {"dims": (1, "Dim*")},
    "Dim": {"value": (1, "int64")},
    "Any": {},
}


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output.

    Attributes:
        data_type: `FLOAT` or `INT64`.
        dims: Its sizes; None where a run decides.
    """

    data_type: int
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the artifact says of a graph.

    Attributes:
        inputs: By name.
        outputs: By name.
        weights: Name of the file in which its weights lie.
        weights_bytes: That file's size.
    """

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    weights: str
    weights_bytes: int


def check_graph(path: Path, content: bytes, expected: Expected) -> None:
    """Refuse a graph that is not of the kind that an export writes.

    Args:
        path: For messages.
        content: The file's bytes.
        expected: What the artifact says of it.

    Raises:
        ArtifactError: It refers to what it must not, or is at odds with the artifact.
    """
    try:
        model = _model_class().FromString(content)
        fault = next(_faults(model, len(content), expected), None)
    except message.DecodeError as error:
        raise ArtifactError(f"{path} is no ONNX graph: {error}; export the model again") from error
    if fault:
        raise ArtifactError(f"{path} is no graph that an export writes: {fault}; export the model again yourself")


@cache
def _model_class() -> Any:
    """Make the class that reads a ModelProto; the package `onnx` is not there where an artifact is served."""
    field = descriptor_pb2.FieldDescriptorProto
    scalars = {"bytes": field.TYPE_BYTES, "int64": field.TYPE_INT64, "int32": field.TYPE_INT32}
    file = descriptor_pb2.FileDescriptorProto(name="graph_file.proto", package="graph_file", syntax="proto2")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            added = described.field.add(name=key, number=number, label=label)
            if kind.rstrip("*") in scalars:
                added.type = scalars[kind.rstrip("*")]
            else:
                added.type, added.type_name = field.TYPE_MESSAGE, f".graph_file.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("graph_file.Model"))


def _faults(model: Any, size: int, expected: Expected) -> Iterator[str]:
    """Say what is wrong with a model of `size` bytes."""
    domains = {opset.domain for opset in model.opsets} - {*_OWN_DOMAINS, _RUNTIME_DOMAIN}
    if domains:
        yield f"it has operators of {_shown(min(domains))}"
    if model.functions or model.training:
        yield "it defines operators of its own"
    ports = ((model.graph.inputs, expected.inputs, "input"), (model.graph.outputs, expected.outputs, "output"))
    for values, wanted, what in ports:
        yield from _port_faults(values, wanted, what)
    graphs, nodes = [model.graph], 0
    while graphs:
        graph = graphs.pop()
        nodes += len(graph.nodes)
        if nodes > _MOST_NODES:
            yield f"it has more than {_MOST_NODES} nodes"
            return
        if graph.sparse:
            yield "it has sparse tensors"
        for tensor in graph.initializers:
            yield from _tensor_faults(tensor, size, expected)
        for node in graph.nodes:
            yield from _node_faults(node, size, expected)
            graphs += [attribute.graph for attribute in node.attributes if attribute.HasField("graph")]


def _port_faults(values: Any, wanted: Mapping[str, Port], what: str) -> Iterator[str]:
    found = {value.name.decode("utf-8", "replace"): value.type for value in values}
    if found.keys() != wanted.keys() or len(values) != len(wanted):
        yield f"its {what}s are {_listed(found)}, the artifact's {_listed(wanted)}"
        return
    for name, port in wanted.items():
        kind = found[name].tensor
        dims = [dim.value if dim.HasField("value") else None for dim in kind.shape.dims]
        fits = len(dims) == len(port.dims) and all(
            one is None or other is None or one == other for one, other in zip(dims, port.dims, strict=True)
        )
        if kind.data_type != port.data_type or not fits:
            yield f"its {what} {name} is of type {kind.data_type} and shape {dims}, not {port.data_type}, {port.dims}"


def _node_faults(node: Any, size: int, expected: Expected) -> Iterator[str]:
    own = node.domain in _OWN_DOMAINS
    if not own and (node.domain != _RUNTIME_DOMAIN or node.operator not in _RUNTIME_OPERATORS):
        yield f"it has the operator {_shown(node.domain)}.{_shown(node.operator)}"
    for attribute in node.attributes:
        if attribute.graphs or (attribute.HasField("graph") and not (own and node.operator == _BRANCH)):
            yield f"its operator {_shown(node.operator)} has graphs within"
        if attribute.HasField("sparse") or attribute.sparses:
            yield "it has sparse tensors"
        for tensor in [attribute.tensor] if attribute.HasField("tensor") else attribute.tensors:
            if tensor.external or tensor.location:
                yield f"a constant of {_shown(node.operator)} lies in another file"
            yield from _tensor_faults(tensor, size, expected)


def _tensor_faults(tensor: Any, size: int, expected: Expected) -> Iterator[str]:
    """Say what is wrong with a tensor of a file of `size` bytes."""
    name = _shown(tensor.name)
    if len(tensor.dims) > _MOST_DIMS or any(dim < 0 for dim in tensor.dims):
        yield f"its tensor {name} has a shape that none can have"
        return
    numbers = math.prod(tensor.dims)
    if not tensor.external and not tensor.location:
        if numbers > size:  # each takes a byte at least
            yield f"its tensor {name} declares {numbers} numbers, more than the file holds"
        return
    entries = [(entry.key, entry.value) for entry in tensor.external]
    place = dict(entries)
    if (
        tensor.location != _EXTERNAL
        or place.keys() != {b"location", b"offset", b"length"}
        or len(entries) != len(place)
    ):
        yield f"its tensor {name} does not say in one way where it lies"
        return
    if place[b"location"] != expected.weights.encode():
        yield f"its tensor {name} lies in {_shown(place[b'location'])}, not in {expected.weights}"
        return
    offset, length = (_decimal(place[key]) for key in (b"offset", b"length"))
    if offset is None or length is None or length != numbers * _WIDTHS.get(tensor.data_type, -1):
        yield f"its tensor {name} has not the length of its shape"
    elif (end := offset + length) > expected.weights_bytes:
        yield f"its tensor {name} ends at byte {end} of {expected.weights}, which has {expected.weights_bytes}"


def _decimal(digits: bytes) -> int | None:
    """Read a number that is written in digits alone, as every reader understands them."""
    return int(digits) if digits.isdigit() and len(digits) <= 19 else None


def _shown(name: bytes) -> str:
    """Give a name for a message: short and printable."""
    return repr(name[:60].decode("utf-8", "replace"))


def _listed(names: Mapping[str, Any]) -> str:
    shown = [ascii(name[:60]).strip("'") for name in sorted(names)[:12]]
    return ", ".join(shown) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "none"
