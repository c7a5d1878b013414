"""Graphs: an `Encoder` as ONNX graphs over one set of weights.

`encode` yields the last hidden state, every pooling of it, and every layer's hidden state of the rows that are named;
`attention` what one layer's heads look at, given that layer's input and its weights: attention costs only the layers
and the texts that it is asked of, and one graph serves all layers. `long` is `encode` for texts beyond `LONG_TOKENS`,
of models that take so many: its attention needs no whole matrices (`model.long`). `decoder`, of an encoder-decoder,
yields what each layer of the decoder looks at in the source, given the encoder's last hidden state. The graphs are
traced without weights and refer to one external file, written once, 4 KiB aligned so that runtimes can map it into
memory. Of a `FusedEncoder` there is `encode` alone, for CUDA, without inner states and with weights of its own.
May import: attention_graph, encoder, decoder, fused, head, pooling, torch, onnx.
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

from model.attention_graph import OWN, AttentionGraph, kind_numbers, own_name, weight_of
from model.decoder import Decoder, DecoderOutput
from model.encoder import Encoder
from model.fused import FusedEncoder
from model.head import SentenceHead
from model.pooling import POOLINGS

WEIGHTS_FILE = "weights.bin"
CUDA_WEIGHTS_FILE = "weights.cuda.bin"
CUDA_POOLED_FILE = "pooled.cuda.onnx"
LONG_FILE = "long.onnx"
LONG_TOKENS = 1024
"""Padded length from which on the graph for long texts is taken; above it no part of `model.long` is empty."""
OPSET = 20  # the last that the tracing exporter writes; has Gelu and LayerNormalization as operators
_ALIGNMENT_BYTES = 4096
_TRANSPOSED = ".T"
_CROSS = "cross_attention."


class EncoderGraph(nn.Module):
    """An encoder with its poolings, as a function from named input tensors to named outputs."""

    def __init__(
        self, encoder: Encoder | FusedEncoder, head: SentenceHead, *, pool_prompt: bool = True, long: bool = False
    ) -> None:
        """Wrap an encoder and its head.

        Args:
            encoder: The encoder; a fused one has no hidden states but the last.
            head: Makes the model's own sentence vector.
            pool_prompt: Whether poolings take all tokens; else a `pooling_mask` input says which.
            long: Whether this is the graph for long texts.
        """
        super().__init__()
        self.long = long
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
        if self.long:
            return LONG_FILE
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
            **({"long": True} if self.long else {}),
        )
        last, mask = output.last_hidden_state, fed.get("pooling_mask", fed["attention_mask"])
        pooled = [POOLINGS[name](last, mask) if name in POOLINGS else self.head(last, mask) for name in self.poolings]
        if not self.states:
            return (last, *pooled)
        rows = [state.index_select(0, fed["state_rows"]) for state in output.hidden_states]
        return (last, *pooled, torch.stack(rows))


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
        The graph; names of the weights and numbers that are the layer's own, as `AttentionGraph` has them; names of
        the others.
    """
    graph = AttentionGraph(encoder, encoder.config.num_hidden_layers - 1)  # not the first, which may lack a norm
    graph.layer = copy.deepcopy(graph.layer)
    with torch.no_grad():  # the tracer would merge weights that are equal in this layer and need not be in others
        for parameter in (*graph.layer.parameters(), *graph.kind.buffers()):
            parameter.normal_()
    model = trace(graph)
    names = fold_weights(model, graph)
    own = {name for name in names if name.startswith(OWN)}
    return model, own, names - own


Graph = EncoderGraph | AttentionGraph | DecoderGraph
Places = list[dict[str, Any]]
"""For each layer, where its own weights lie, by their names within a layer."""


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
    model: onnx.ModelProto, own: Mapping[str, onnx.TensorProto], shared: Mapping[str, onnx.TensorProto]
) -> None:
    """Do so for the attention graph, in place; a layer's own weights stay inputs, by their names within a layer.

    Args:
        model: The graph.
        own: The references of one layer's weights, by the graph's names.
        shared: Those of the others.
    """
    for node in model.graph.node:
        node.input[:] = [own_name(name) if name in own else name for name in node.input]
    _keep_inputs(model, AttentionGraph.inputs)
    for name, tensor in own.items():
        model.graph.input.append(
            onnx.helper.make_tensor_value_info(own_name(name), tensor.data_type, list(tensor.dims))
        )
    model.graph.initializer.extend(shared.values())


def _keep_inputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    inputs = [value for value in model.graph.input if value.name in names]
    del model.graph.input[:]
    model.graph.input.extend(inputs)


def place_of(tensor: onnx.TensorProto) -> dict[str, Any]:
    """Say where in the weights file a referenced weight lies: `offset` in bytes, and its `shape`; float32."""
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    return {"offset": offset, "shape": list(tensor.dims)}


def write_graphs(
    folder: Path,
    graph: EncoderGraph,
    weights: str,
    inspected: Encoder | None = None,
    decoder: DecoderGraph | None = None,
) -> Places:
    """Write a graph and the file of its weights; of an encoder that is inspected also the graphs that share them.

    Returns:
        For each inspected layer, where its own weights lie.
    """
    plain: list[EncoderGraph | DecoderGraph] = [graph, *long_graphs(graph), *([decoder] if decoder is not None else [])]
    models = [trace(one) for one in plain]
    names = [fold_weights(model, one) for one, model in zip(plain, models, strict=True)]
    attention, own, shared = trace_attention(inspected) if inspected is not None else (None, set[str](), set[str]())
    layers = range(inspected.config.num_hidden_layers) if inspected is not None else ()
    of_layers = [{name: weight_of(inspected, layer, name) for name in sorted(own)} for layer in layers if inspected]
    state = graph.state_dict() | (decoder.state_dict() if decoder is not None else {})
    state |= kind_numbers(inspected, own) if inspected is not None else {}
    wanted = set[str]().union(*names, shared, *(layer.values() for layer in of_layers))
    references = write_weights(folder / weights, state, wanted)
    for one, model, used in zip(plain, models, names, strict=True):
        attach_weights(model, one, used, references)
        onnx.save_model(model, folder / one.file)
    if attention is not None:
        first = {name: references[ours] for name, ours in of_layers[0].items()}
        attach_attention_weights(attention, first, {name: references[name] for name in sorted(shared)})
        onnx.save_model(attention, folder / AttentionGraph.file)
    return [{own_name(name): place_of(references[ours]) for name, ours in layer.items()} for layer in of_layers]


def long_graphs(graph: EncoderGraph) -> list[EncoderGraph]:
    """Give the graph for long texts, of an encoder with rotary positions that takes them."""
    encoder = graph.encoder
    if not isinstance(encoder, Encoder) or encoder.config.max_rotary_positions <= LONG_TOKENS:
        return []
    return [EncoderGraph(encoder, graph.head, pool_prompt="pooling_mask" not in graph.inputs, long=True)]


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
