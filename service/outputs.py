"""Outputs: what a request may ask for, which graph outputs that takes, and the answer cut from them.

Pure numpy. May import: artifact, batching, request, tokenization, errors.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from service.artifact import Artifact
from service.attention import ALL
from service.batching import Graph
from service.errors import InvalidRequest
from service.request import DataType, EncodeRequest, InputResult, Outputs, Pooled
from service.tokenization import Sequence

Row = Mapping[str, NDArray[np.float32]]
"""One sequence's part of every graph output that was fetched, by name, without padding."""

_ITEM_BYTES: Mapping[DataType, int] = {"float32": 4, "float16": 2}
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class Selection:
    """A request's outputs, held against one model: every number resolved, every default filled in.

    Attributes:
        pooling: Which pooling, or None.
        normalize: Whether pooled vectors get length 1.
        dimensions: Leading dimensions that are kept.
        token_embeddings: Whether the last hidden state is wanted.
        hidden_states: Layers, 0 to layers, or None.
        attention_layers: Layers, 0 to layers - 1, or None.
        attention_heads: Heads, 0 to heads - 1.
        data_type: Element type of the answer.
        model_hidden_size: Width of a hidden state.
        last_layer: Number of the layer whose output is the last hidden state.
    """

    pooling: str | None
    normalize: bool
    dimensions: int
    token_embeddings: bool
    hidden_states: tuple[int, ...] | None
    attention_layers: tuple[int, ...] | None
    attention_heads: tuple[int, ...]
    data_type: DataType
    model_hidden_size: int
    last_layer: int

    @cached_property
    def graph(self) -> Graph:
        """Name the cheapest graph that yields all of it."""
        inner_states = any(layer != self.last_layer for layer in self.hidden_states or ())
        return "inspect" if inner_states or self.attention_layers is not None else "encode"

    @property
    def by_token(self) -> bool:
        """Whether the answer grows with its inputs' lengths."""
        return self.token_embeddings or self.hidden_states is not None or self.attention_layers is not None

    @cached_property
    def graph_outputs(self) -> frozenset[str]:
        """Name the graph outputs that it takes."""
        names = {self._state_name(layer) for layer in self.hidden_states or ()}
        names |= {f"attentions_{layer}" for layer in self.attention_layers or ()}
        if self.pooling is not None:
            names.add(f"pooled_{self.pooling}")
        if self.token_embeddings:
            names.add("last_hidden_state")
        return frozenset(names)

    def answer_bytes(self, lengths: SequenceOf[int]) -> int:
        """Count the bytes of an answer's tensors for sequences of these lengths."""
        states = int(self.token_embeddings) + len(self.hidden_states or ())
        maps = len(self.attention_layers or ()) * len(self.attention_heads)
        numbers = len(lengths) * self.dimensions if self.pooling is not None else 0
        numbers += sum(states * length * self.model_hidden_size + maps * length * length for length in lengths)
        return numbers * _ITEM_BYTES[self.data_type]

    def pooled(self, rows: SequenceOf[Row]) -> NDArray[np.floating] | None:
        """Stack the pooled vectors of a request's rows: (inputs, dim)."""
        if self.pooling is None:
            return None
        name = f"pooled_{self.pooling}"
        vectors = np.stack([row[name] for row in rows])[:, : self.dimensions]  # (inputs, dim)
        if self.normalize:
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(norms, 1e-12)
        return self._cast(vectors)

    def result(self, sequence: Sequence, row: Row) -> InputResult:
        """Cut one input's tensors out of its row."""
        states = self.hidden_states
        layers, heads = self.attention_layers, list(self.attention_heads)
        embeddings = self._cast(row["last_hidden_state"]) if self.token_embeddings else None
        hidden = None if states is None else np.stack([self._cast(row[self._state_name(layer)]) for layer in states])
        attention = None
        if layers is not None:
            attention = np.stack([self._cast(row[f"attentions_{layer}"][heads]) for layer in layers])
        return InputResult(sequence.length, sequence.original_length, sequence.tokens, embeddings, hidden, attention)

    def _state_name(self, layer: int) -> str:
        return "last_hidden_state" if layer == self.last_layer else f"hidden_states_{layer}"

    def _cast(self, array: NDArray[np.float32]) -> NDArray[np.floating]:
        if self.data_type == "float32":
            return array
        if array.size and float(np.abs(array).max()) > _FLOAT16_MAX:
            raise InvalidRequest("a value exceeds float16's 65504; ask for data_type float32")
        return array.astype(np.float16)


def select(outputs: Outputs, artifact: Artifact) -> Selection:
    """Resolve a request's outputs against a model.

    Raises:
        InvalidRequest: A pooling, dimension, layer or head that the model does not have.
    """
    if outputs.pooled is None and not outputs.by_token:
        raise InvalidRequest("no output is asked for; ask for pooled, token_embeddings, hidden_states or attention")
    pooled = outputs.pooled or Pooled()
    pooling = pooled.pooling or artifact.pooling
    if pooling not in artifact.poolings:
        raise InvalidRequest(f"pooling {pooling!r} is unknown; known poolings: {', '.join(artifact.poolings)}")
    size, layers = artifact.pooled_size(pooling), artifact.num_hidden_layers
    dimensions = size if pooled.dimensions is None else pooled.dimensions
    if not 1 <= dimensions <= size:
        raise InvalidRequest(f"dimensions {dimensions} must be from 1 to the model's {size}")
    states, attention = outputs.hidden_states, outputs.attention
    return Selection(
        pooling=pooling if outputs.pooled is not None else None,
        normalize=artifact.normalize if pooled.normalize is None else pooled.normalize,
        dimensions=dimensions,
        token_embeddings=outputs.token_embeddings,
        hidden_states=None if states is None else _resolve("hidden state layer", states, layers + 1),
        attention_layers=None if attention is None else _resolve("attention layer", attention.layers, layers),
        attention_heads=_resolve("head", attention.heads if attention else ALL, artifact.num_attention_heads),
        data_type=outputs.data_type,
        model_hidden_size=artifact.hidden_size,
        last_layer=layers,
    )


def check_answer_size(
    selection: Selection, request: EncodeRequest, lengths: SequenceOf[int], most: int, most_streamed: int = 0
) -> None:
    """Refuse, before anything is computed, an answer that is larger than the way that it would go allows.

    Args:
        selection: The request's resolved outputs.
        request: The request itself.
        lengths: Tokens of each input.
        most: Largest answer of its kind in bytes.
        most_streamed: Largest answer on a stream, where that is another way; 0 where it is none.

    Raises:
        InvalidRequest: It would be larger; the message names the options that make it fit.
    """
    size = selection.answer_bytes(lengths)
    if size <= most:
        return
    advice = ["fewer inputs"] if len(request.inputs) > 1 else []
    if selection.attention_layers is not None and len(selection.attention_layers) * len(selection.attention_heads) > 1:
        advice.append("fewer attention layers or heads")
    if len(selection.hidden_states or ()) > 1:
        advice.append("fewer hidden state layers")
    if selection.pooling is not None and selection.dimensions > 1:
        advice.append("fewer dimensions")
    if selection.data_type == "float32":
        advice.append("data_type float16")
    if selection.by_token:
        advice.append("shorter inputs")
    raise InvalidRequest(
        f"the answer would hold {size:,} bytes of tensors, more than this server's {most:,}; "
        f"ask for {' or '.join(advice)}{', or use EncodeStream' if size <= most_streamed else ''}"
    )


def _resolve(what: str, numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Turn a choice into numbers from 0; negative ones count from the end, `ALL` takes all."""
    for number in numbers:
        if not -count <= number < count:
            raise InvalidRequest(f"{what} {number} does not exist; it must be from {-count} to {count - 1}")
    if len({number % count for number in numbers}) < len(numbers):
        raise InvalidRequest(f"{what} numbers {list(numbers)} name one twice; name each once")
    return tuple(number % count for number in numbers) if numbers else tuple(range(count))
