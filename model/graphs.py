"""Graphs: an `Encoder` as two ONNX graphs over one set of weights.

`encode` yields the last hidden state and every pooling of it; `inspect` also yields each layer's
hidden states and attention weights. The graphs are traced without weights and refer to one external
file, written once, 4 KiB aligned so that runtimes can map it into memory.
May import: encoder, pooling, torch, onnx.
"""

import io
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from tqdm import tqdm

from model.encoder import Encoder
from model.pooling import POOLINGS

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
WEIGHTS_FILE = "weights.bin"
OPSET = 20  # the last that the tracing exporter writes; has Gelu and LayerNormalization as operators
_ALIGNMENT_BYTES = 4096
_TRANSPOSED = ".T"


class EncoderGraph(nn.Module):
    """An encoder with its poolings, as a function from three input tensors to named outputs."""

    def __init__(self, encoder: Encoder, *, inspect: bool) -> None:
        """Wrap an encoder; `inspect` adds all hidden states and attention weights."""
        super().__init__()
        self.encoder = encoder
        self.inspect = inspect

    @property
    def outputs(self) -> list[str]:
        """Names of what `forward` returns, in its order."""
        names = ["last_hidden_state", *(f"pooled_{pooling}" for pooling in POOLINGS)]
        if self.inspect:
            layers = self.encoder.config.num_hidden_layers
            names += [f"hidden_states_{layer}" for layer in range(layers + 1)]
            names += [f"attentions_{layer}" for layer in range(layers)]
        return names

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, ...]:
        """Run a padded batch, all inputs (batch, seq) int64."""
        output = self.encoder(
            input_ids,
            attention_mask,
            token_type_ids,
            output_hidden_states=self.inspect,
            output_attentions=self.inspect,
        )
        pooled = (pool(output.last_hidden_state, attention_mask) for pool in POOLINGS.values())
        # An output may not be the same tensor as another one, so the last layer's state is copied.
        hidden_states = (state.clone() for state in output.hidden_states)
        return (output.last_hidden_state, *pooled, *hidden_states, *output.attentions)


def trace(graph: EncoderGraph) -> onnx.ModelProto:
    """Trace a graph with dynamic batch and length; its weights stay named inputs."""
    axes = {name: {0: "batch", 1: "seq"} for name in INPUTS}
    axes |= {name: _axes(name) for name in graph.outputs}
    example = torch.ones(2, 3, dtype=torch.int64)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # ONNX Runtime's fusions know the attention that the tracing exporter writes, and do not know
        # the one that torch.export writes, so the older exporter is kept, deprecated as it is.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            (example, example, torch.zeros_like(example)),
            buffer,  # type: ignore[arg-type] # the tracing exporter takes open files too
            input_names=list(INPUTS),
            output_names=graph.outputs,
            dynamic_axes=axes,
            opset_version=OPSET,
            export_params=False,
            do_constant_folding=False,
            dynamo=False,
        )
    return onnx.load_model_from_string(buffer.getvalue())


def _axes(output: str) -> dict[int, str]:
    if output.startswith("pooled_"):
        return {0: "batch"}
    if output.startswith("attentions_"):
        return {0: "batch", 2: "seq", 3: "seq"}
    return {0: "batch", 1: "seq"}


def write_weights(path: Path, encoder: Encoder) -> dict[str, onnx.TensorProto]:
    """Write every weight once, with a progress bar.

    Matrices of linear maps are written transposed, as ONNX's MatMul takes them.

    Args:
        path: The external-data file, made anew.
        encoder: Its state's names, under `encoder.`, are the graphs' weight inputs.

    Returns:
        For each weight the initializer that refers to its place in the file.
    """
    total = sum(tensor.nbytes for tensor in encoder.state_dict().values())
    references = {}
    with path.open("wb") as file, tqdm(total=total, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
        for name, array in _arrays(encoder):
            file.write(b"\0" * (-file.tell() % _ALIGNMENT_BYTES))
            references[name] = _reference(name, array, path.name, file.tell())
            file.write(array.data)
            bar.update(array.nbytes)
    return references


def _arrays(encoder: Encoder) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights as the graphs take them: linear maps transposed, the rest as they are."""
    linear = {f"{name}.weight" for name, module in encoder.named_modules() if isinstance(module, nn.Linear)}
    for name, tensor in encoder.state_dict().items():
        if name in linear:
            yield f"encoder.{name}{_TRANSPOSED}", np.ascontiguousarray(tensor.numpy().T)
        else:
            yield f"encoder.{name}", np.ascontiguousarray(tensor.numpy())


def _reference(name: str, array: np.ndarray, location: str, offset: int) -> onnx.TensorProto:
    """Describe a weight that lies in an external file."""
    tensor = onnx.TensorProto(
        name=name,
        dims=array.shape,
        data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(array.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def attach_weights(model: onnx.ModelProto, references: dict[str, onnx.TensorProto]) -> None:
    """Turn a traced graph's weight inputs into references to the weights file, in place."""
    graph = model.graph
    aliases: dict[str, str] = {}
    nodes = []
    weights = {value.name for value in graph.input} - set(INPUTS)
    for node in graph.node:
        node.input[:] = [aliases.get(name, name) for name in node.input]
        source = node.input[0] if node.input else ""
        if node.op_type == "Identity" and source in weights:  # the tracer's merging of equal weights
            aliases[node.output[0]] = source
        elif node.op_type == "Transpose" and source + _TRANSPOSED in references:
            aliases[node.output[0]] = source + _TRANSPOSED
        else:
            nodes.append(node)
    used = {name for node in nodes for name in node.input}
    inputs = [value for value in graph.input if value.name in INPUTS]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    graph.initializer.extend(reference for name, reference in references.items() if name in used)
