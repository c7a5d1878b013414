"""Graphs: an `Encoder` as ONNX graphs over one set of weights.

`encode` yields the last hidden state, every pooling of it, and every layer's hidden state of the rows that are named;
`attention` what one layer's heads look at, given that layer's input and its weights: attention costs only the layers
and the texts that it is asked of, and one graph serves all layers. `decoder`, of an encoder-decoder, yields what each
layer of the decoder looks at in the source, given the encoder's last hidden state. The graphs are traced without
weights and refer to one external file, written once, 4 KiB aligned so that runtimes can map it into memory. Of a
`FusedEncoder` there is `encode` alone, for CUDA, without inner states and with weights of its own.
May import: disentangled, encoder, decoder, fused, head, pooling, torch, onnx.
"""

import copy
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from tqdm import tqdm

from model.decoder import Decoder, DecoderOutput
from model.disentangled import RelativePositions
from model.encoder import Encoder, EncoderLayer
from model.fused import FusedEncoder
from model.head import SentenceHead
from model.pooling import POOLINGS

WEIGHTS_FILE = "weights.bin"
CUDA_WEIGHTS_FILE = "weights.cuda.bin"
CUDA_POOLED_FILE = "pooled.cuda.onnx"
OPSET = 20  # the last that the tracing exporter writes; has Gelu and LayerNormalization as operators
_ALIGNMENT_BYTES = 4096
_TRANSPOSED = ".T"
_OWN = "layer."
_CROSS = "cross_attention."


class EncoderGraph(nn.Module):
    """An encoder with its poolings, as a function from named input tensors to named outputs."""

    def __init__(self, encoder: Encoder | FusedEncoder, head: SentenceHead, *, pool_prompt: bool = True) -> None:
        """Wrap an encoder and its head.

        Args:
            encoder: The encoder; a fused one has no hidden states but the last.
            head: Makes the model's own sentence vector.
            pool_prompt: Whether poolings take all tokens; else a `pooling_mask` input says which.
        """
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.states = isinstance(encoder, Encoder)
        optional = {
            "token_type_ids": encoder.config.type_vocab_size > 0,
            "pooling_mask": not pool_prompt,
            "state_rows": self.states,
        }
        self.inputs = ["input_ids", "attention_mask", *(name for name, there in optional.items() if there)]

    @property
    def file(self) -> str:
        """Name of the graph's file in an artifact."""
        return "encode.onnx" if self.states else "encode.cuda.onnx"

    @property
    def poolings(self) -> list[str]:
        """Names of the poolings: the plain ones, and `sentence` where the head is more than one of them."""
        return [*POOLINGS, *(["sentence"] if self.head.pooling == "sentence" else [])]

    @property
    def outputs(self) -> list[str]:
        """Names of what `forward` returns, in its order."""
        poolings = (f"pooled_{pooling}" for pooling in self.poolings)
        return ["last_hidden_state", *poolings, *(["hidden_states"] if self.states else [])]

    def example(self) -> tuple[Tensor, ...]:
        """Give tensors to trace with."""
        ones = torch.ones(2, 3, dtype=torch.int64)
        others = {"token_type_ids": torch.zeros_like(ones), "state_rows": torch.tensor([1, 0, 1, 0])}
        return tuple(others.get(name, ones) for name in self.inputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run a padded batch; the tensors are those of `inputs`, all int64.

        Shape:
            state_rows: (rows,), each a row of the batch whose hidden states are wanted; none is allowed
            others: (batch, seq)
            hidden_states: (layers + 1, rows, seq, hidden)
        """
        fed = dict(zip(self.inputs, tensors, strict=True))
        output = self.encoder(
            fed["input_ids"],
            fed["attention_mask"],
            fed.get("token_type_ids"),
            output_hidden_states=self.states,
        )
        last, mask = output.last_hidden_state, fed.get("pooling_mask", fed["attention_mask"])
        pooled = [POOLINGS[name](last, mask) if name in POOLINGS else self.head(last, mask) for name in self.poolings]
        if not self.states:
            return (last, *pooled)
        rows = [state.index_select(0, fed["state_rows"]) for state in output.hidden_states]
        return (last, *pooled, torch.stack(rows))


class AttentionGraph(nn.Module):
    """One layer's attention, as a function from the layer's input, the mask and its weights to named outputs."""

    file = "attention.onnx"
    inputs = ("hidden_state", "attention_mask")
    outputs = ("attention", "query_vectors", "key_vectors")

    def __init__(self, encoder: Encoder, number: int) -> None:
        """Wrap a layer of an encoder, counted from 0."""
        super().__init__()
        self.encoder = encoder
        self.number = number
        layer = encoder.layers[number]
        assert isinstance(layer, EncoderLayer)
        self.layer = layer

    def example(self) -> tuple[Tensor, ...]:
        """Give tensors to trace with."""
        return torch.zeros(2, 3, self.encoder.config.hidden_size), torch.ones(2, 3, dtype=torch.int64)

    def forward(self, hidden_state: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inspect the layer; shapes as `EncoderLayer.inspect` has them."""
        mask, position_bias = self.encoder.terms(attention_mask, hidden_state.dtype)
        if isinstance(position_bias, RelativePositions):
            position_bias = position_bias.narrowed()  # their projections are inputs and cannot be made beforehand
        return self.layer.inspect(hidden_state, mask, position_bias)


class DecoderGraph(nn.Module):
    """A decoder, as a function from a target, the encoder's last hidden state and its mask to named outputs."""

    file = "decoder.onnx"
    inputs = ("decoder_input_ids", "encoder_hidden_states", "attention_mask")

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        """Wrap a decoder; its encoder makes what it looks at, and is no part of the graph."""
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    @property
    def outputs(self) -> list[str]:
        """Names of what `forward` returns, in its order."""
        return [f"{_CROSS}{layer}" for layer in range(self.decoder.config.stack.num_hidden_layers)]

    def example(self) -> tuple[Tensor, ...]:
        """Give tensors to trace with."""
        states = torch.zeros(2, 3, self.decoder.config.stack.hidden_size)
        return torch.zeros(2, 4, dtype=torch.int64), states, torch.ones(2, 3, dtype=torch.int64)

    def forward(
        self, decoder_input_ids: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, ...]:
        """Give each layer's weights, (batch, heads, target, seq); shapes as `Decoder.forward` has them."""
        output: DecoderOutput = self.decoder(decoder_input_ids, encoder_hidden_states, attention_mask)
        return output.cross_attentions


def trace_attention(encoder: Encoder) -> tuple[onnx.ModelProto, set[str], set[str]]:
    """Trace the graph that serves every layer.

    Returns:
        The graph; names of the weights that are the layer's own, without what says which layer; names of the others.
    """
    graph = AttentionGraph(encoder, 0)
    graph.layer = copy.deepcopy(graph.layer)
    with torch.no_grad():  # the tracer would merge weights that are equal in this layer and need not be in others
        for parameter in graph.layer.parameters():
            parameter.normal_()
    model = trace(graph)
    names = fold_weights(model, graph)
    own = {name for name in names if name.startswith(_OWN)}
    return model, {name.removeprefix(_OWN) for name in own}, names - own


def weight_of(layer: int, name: str) -> str:
    """Name a layer's own weight among the encoder's."""
    return f"encoder.layers.{layer}.{name}"


Graph = EncoderGraph | AttentionGraph | DecoderGraph


def trace(graph: Graph) -> onnx.ModelProto:
    """Trace a graph with dynamic batch and length; its weights stay named inputs."""
    axes = {name: _axes(name) for name in (*graph.inputs, *graph.outputs)}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # ONNX Runtime's fusions know the attention that the tracing exporter writes, and do not know
        # the one that torch.export writes, so the older exporter is kept, deprecated as it is.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            graph.example(),
            buffer,  # type: ignore[arg-type] # the tracing exporter takes open files too
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_axes=axes,
            opset_version=OPSET,
            export_params=False,
            do_constant_folding=False,
            dynamo=False,
        )
    model = onnx.load_model_from_string(buffer.getvalue())
    if isinstance(graph, DecoderGraph):
        for value in model.graph.output:  # which the tracer cannot tell
            value.type.tensor_type.shape.dim[1].dim_value = graph.decoder.config.stack.num_attention_heads
    return model


def _axes(name: str) -> dict[int, str]:
    """Say which axes of an input or output a run decides."""
    if name.startswith(_CROSS):
        return {0: "batch", 2: "target", 3: "seq"}
    if name.startswith("pooled_"):
        return {0: "batch"}
    if name in AttentionGraph.outputs:
        return {0: "batch", 2: "seq", **({3: "seq"} if name == "attention" else {})}
    special = {"state_rows": {0: "rows"}, "hidden_states": {1: "rows", 2: "seq"}}
    return special.get(name, {0: "batch", 1: "target" if name == "decoder_input_ids" else "seq"})


def fold_weights(model: onnx.ModelProto, graph: Graph) -> set[str]:
    """Let a traced graph's nodes take transposed weights as they will be stored, in place.

    Returns:
        Names of the weights that the nodes take; `.T` behind a name means its transpose.
    """
    weights = {value.name for value in model.graph.input} - set(graph.inputs)
    aliases: dict[str, str] = {}
    nodes = []
    for node in model.graph.node:
        node.input[:] = [aliases.get(name, name) for name in node.input]
        source = node.input[0] if node.input else ""
        if node.op_type == "Identity" and source in weights:  # the tracer's merging of equal weights
            aliases[node.output[0]] = source
        elif node.op_type == "Transpose" and source in weights:
            aliases[node.output[0]] = source + _TRANSPOSED
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return {name for node in nodes for name in node.input if name.removesuffix(_TRANSPOSED) in weights}


def write_weights(path: Path, state: Mapping[str, Tensor], names: set[str]) -> dict[str, onnx.TensorProto]:
    """Write weights once, with a progress bar; a tensor of two names too.

    Args:
        path: The external-data file, made anew.
        state: Holds the weights.
        names: Which of them, as `fold_weights` names them.

    Returns:
        For each name the initializer that refers to its place in the file.
    """
    tensors = {name: state[name.removesuffix(_TRANSPOSED)] for name in sorted(names)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    references: dict[str, onnx.TensorProto] = {}
    written: dict[tuple[object, ...], onnx.TensorProto] = {}
    with path.open("wb") as file, tqdm(total=total, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
        for name, tensor in tensors.items():
            bar.update(tensor.nbytes)
            one = tensor.data_ptr(), tensor.shape, name.endswith(_TRANSPOSED)
            if one in written:
                references[name] = copy.deepcopy(written[one])
                references[name].name = name
                continue
            array = np.ascontiguousarray(tensor.numpy().T if name.endswith(_TRANSPOSED) else tensor.numpy())
            file.write(b"\0" * (-file.tell() % _ALIGNMENT_BYTES))
            references[name] = written[one] = _reference(name, array, path.name, file.tell())
            file.write(array.data)
    return references


def attach_weights(
    model: onnx.ModelProto, graph: EncoderGraph | DecoderGraph, names: set[str], references: dict[str, onnx.TensorProto]
) -> None:
    """Turn a traced graph's weight inputs into references to the weights file, in place."""
    _keep_inputs(model, graph.inputs)
    model.graph.initializer.extend(references[name] for name in sorted(names))


def attach_attention_weights(
    model: onnx.ModelProto, own: set[str], shared: set[str], references: dict[str, onnx.TensorProto]
) -> None:
    """Do so for the attention graph, in place; a layer's own weights stay inputs, by their names within a layer."""
    for node in model.graph.node:
        node.input[:] = [name.removeprefix(_OWN) for name in node.input]
    _keep_inputs(model, AttentionGraph.inputs)
    for name in sorted(own):
        tensor = references[weight_of(0, name)]
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    model.graph.initializer.extend(references[name] for name in sorted(shared))


def _keep_inputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    inputs = [value for value in model.graph.input if value.name in names]
    del model.graph.input[:]
    model.graph.input.extend(inputs)


def place_of(tensor: onnx.TensorProto) -> dict[str, Any]:
    """Say where in the weights file a referenced weight lies: `offset` in bytes, and its `shape`; float32."""
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    return {"offset": offset, "shape": list(tensor.dims)}


def prune(model: onnx.ModelProto, outputs: list[str]) -> onnx.ModelProto:
    """Copy a graph without what leads to none of some outputs.

    ONNX Runtime computes every output of a graph, whichever are asked for.
    """
    pruned = onnx.ModelProto()
    pruned.CopyFrom(model)
    graph, needed = pruned.graph, set(outputs)
    nodes: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            nodes.insert(0, node)
    kept_outputs = [value for value in model.graph.output if value.name in outputs]
    kept_weights = [tensor for tensor in model.graph.initializer if tensor.name in needed]
    del graph.node[:], graph.output[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.output.extend(kept_outputs)
    graph.initializer.extend(kept_weights)
    return pruned


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
