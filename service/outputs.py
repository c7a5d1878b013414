"""Outputs: what a request may ask for, which graph outputs that takes, and the answer cut from them.

Pure numpy. May import: artifact, attention, batching, reduce, request, spans, tokenization, errors.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.artifact import Artifact
from service.attention import MOST_PLACES, Attention, QueryKeyVectors
from service.batching import HIDDEN_STATES
from service.errors import AnswerTooLarge, InvalidRequest
from service.reduce import ITEM_BYTES, Look, look_at
from service.request import DataType, InputResult, Outputs, Pooled
from service.spans import Uncovered, check_span, why_uncovered
from service.tokenization import Sequence

Row = Mapping[str, NDArray[Any]]
"""One sequence's part of every output that was fetched, by name, without padding, and what was looked at."""

_FLOAT16_MAX = 65504.0

_MOST_WEIGHTS_BYTES = 1 << 29  # of one text and layer: two to three times as much is held while a layer is computed


@dataclass(frozen=True)
class Selection:
    """A request's outputs, held against one model: every number resolved, every default filled in.

    Attributes:
        pooling: Which pooling, or None.
        normalize: Whether pooled vectors get length 1.
        dimensions: Leading dimensions that are kept.
        token_embeddings: Whether the last hidden state is wanted.
        hidden_states: Layers, 0 to layers, or None.
        attention: Options with layers from 0 to layers - 1 and heads from 0 to heads - 1, or None.
        vectors: Query and key vectors, likewise.
        data_type: Element type of the answer.
        model_hidden_size: Width of a hidden state.
        num_heads: Heads of each layer.
        head_dim: Width of a query or key vector.
        last_layer: Number of the layer whose output is the last hidden state.
    """

    pooling: str | None
    normalize: bool
    dimensions: int
    token_embeddings: bool
    hidden_states: tuple[int, ...] | None
    attention: Attention | None
    vectors: QueryKeyVectors | None
    data_type: DataType
    model_hidden_size: int
    num_heads: int
    head_dim: int
    last_layer: int

    @property
    def looks_inside(self) -> bool:
        """Whether anything of the attention itself is wanted."""
        return self.attention is not None or self.vectors is not None

    @property
    def places(self) -> int:
        """How many tokens and spans are named of each input."""
        return 0 if self.attention is None else self.attention.places

    @property
    def runs(self) -> bool:
        """Whether the model must run at all."""
        return bool(self.graph_outputs) or self.looks_inside

    @property
    def by_token(self) -> bool:
        """Whether the answer grows with its inputs' lengths."""
        return self.token_embeddings or self.hidden_states is not None or self.looks_inside

    @cached_property
    def graph_outputs(self) -> frozenset[str]:
        """Name what it takes of a batch's outputs."""
        names = {self._state_name(layer) for layer in self.hidden_states or ()}
        if self.pooling is not None:
            names.add(f"pooled_{self.pooling}")
        if self.token_embeddings:
            names.add("last_hidden_state")
        return frozenset(names)

    def looks(self, sequences: SequenceOf[Sequence]) -> tuple[Look, ...]:
        """Say what is wanted of each sequence's attention; empty where nothing is.

        Raises:
            InvalidRequest: A token or a span that a sequence does not have, or one too long to look at.
        """
        if not self.looks_inside:
            return ()
        longest = max(sequence.length for sequence in sequences)
        if (size := self.num_heads * longest**2 * ITEM_BYTES["float32"]) > _MOST_WEIGHTS_BYTES:
            raise InvalidRequest(
                f"attention over {longest:,} tokens takes {size:,} bytes a layer while it is computed, more than the "
                f"{_MOST_WEIGHTS_BYTES:,} of this server; ask it of a shorter text, or for other outputs"
            )
        check_places(self.places, len(sequences), "inputs")
        looks = []
        for number, sequence in enumerate(sequences):
            assert sequence.tokens is not None, "attention was asked of a sequence whose tokens were not described"
            try:
                looks.append(
                    look_at(
                        self.attention,
                        self.vectors,
                        sequence.tokens,
                        head_dim=self.head_dim,
                        data_type=self.data_type,
                    )
                )
            except Uncovered as error:
                cut = sequence.original_length > sequence.length
                reason = why_uncovered(error, sequence.texts, sequence.tokens, truncated=cut)
                raise InvalidRequest(f"input {number}: {reason}") from error
            except InvalidRequest as error:
                raise InvalidRequest(f"input {number}: {error}") from error
        return tuple(looks)

    def answer_bytes(self, lengths: SequenceOf[int], looks: SequenceOf[Look] = ()) -> int:
        """Count the bytes of an answer's tensors for sequences of these lengths, and what is wanted of them."""
        states = int(self.token_embeddings) + len(self.hidden_states or ())
        numbers = len(lengths) * self.dimensions if self.pooling is not None else 0
        numbers += states * self.model_hidden_size * sum(lengths)
        return numbers * ITEM_BYTES[self.data_type] + sum(look.bytes for look in looks)

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

    def result(self, sequence: Sequence, row: Row, look: Look | None = None) -> InputResult:
        """Cut one input's tensors out of its row."""
        states = self.hidden_states
        embeddings = self._cast(row["last_hidden_state"]) if self.token_embeddings else None
        hidden = None if states is None else np.stack([self._cast(row[self._state_name(layer)]) for layer in states])
        plain = InputResult(sequence.length, sequence.original_length, sequence.tokens, embeddings, hidden)
        if look is None:
            return plain
        weights = self.attention is not None
        return replace(
            plain,
            attention=row.get("attention"),
            attention_keys=row.get("attention_keys"),
            query_axis=look.axis(look.queries) if weights else None,
            key_axis=look.axis(look.keys) if weights else None,
            query_vectors=self._cast(row["query_vectors"]) if self.vectors else None,
            key_vectors=self._cast(row["key_vectors"]) if self.vectors else None,
        )

    def _state_name(self, layer: int) -> str:
        return "last_hidden_state" if layer == self.last_layer else f"{HIDDEN_STATES}{layer}"

    def _cast(self, array: NDArray[np.float32]) -> NDArray[np.floating]:
        if self.data_type == "float32":
            return array
        if array.size and float(np.abs(array).max()) > _FLOAT16_MAX:
            raise InvalidRequest("a value exceeds float16's 65504; ask for data_type float32")
        return array.astype(np.float16)


def select(outputs: Outputs, artifact: Artifact) -> Selection:
    """Resolve a request's outputs against a model.

    Raises:
        InvalidRequest: A pooling, dimension, layer or head that the model does not have, or a span that no text has.
    """
    if outputs.pooled is None and not outputs.by_token:
        raise InvalidRequest("no output is asked for; ask for pooled, token_embeddings, hidden_states or attention")
    if outputs.attention is not None and outputs.attention.rollout and outputs.attention.reduce_layers is not None:
        raise InvalidRequest("rollout goes through the layers itself; leave reduce_layers out")
    if outputs.attention is not None:
        check_spans(outputs.attention)
    pooled = outputs.pooled or Pooled()
    pooling = pooled.pooling or artifact.pooling
    if pooling not in artifact.poolings:
        raise InvalidRequest(f"pooling {pooling!r} is unknown; known poolings: {', '.join(artifact.poolings)}")
    size, layers = artifact.pooled_size(pooling), artifact.num_hidden_layers
    dimensions = size if pooled.dimensions is None else pooled.dimensions
    if not 1 <= dimensions <= size:
        raise InvalidRequest(f"dimensions {dimensions} must be from 1 to the model's {size}")
    states = outputs.hidden_states
    return Selection(
        pooling=pooling if outputs.pooled is not None else None,
        normalize=artifact.normalize if pooled.normalize is None else pooled.normalize,
        dimensions=dimensions,
        token_embeddings=outputs.token_embeddings,
        hidden_states=None if states is None else resolve("hidden state layer", states, layers + 1),
        attention=_resolved("attention", outputs.attention, artifact),
        vectors=_resolved("query_key_vectors", outputs.query_key_vectors, artifact),
        data_type=outputs.data_type,
        model_hidden_size=artifact.hidden_size,
        num_heads=artifact.num_attention_heads,
        head_dim=artifact.head_dim,
        last_layer=layers,
    )


def check_spans(asked: Attention) -> None:
    """Refuse spans that are none in any text.

    Raises:
        InvalidRequest: There is one.
    """
    for name in ("queries", "keys"):
        for span in getattr(asked, name).spans:
            check_span(name, span)


def check_places(places: int, inputs: int, what: str) -> None:
    """Refuse so many named tokens and spans, of each of so many inputs, as would take long to find.

    Raises:
        InvalidRequest: They are too many.
    """
    if places * inputs > MOST_PLACES:
        raise InvalidRequest(
            f"queries and keys name {places:,} tokens and spans of each of {inputs:,} {what}, and may name "
            f"{MOST_PLACES:,} in all; name fewer, join spans that adjoin, or send fewer {what}"
        )


def check_answer_size(selection: Selection, size: int, inputs: int, most: int, most_streamed: int) -> None:
    """Refuse, before anything is computed, an answer that is larger than the way that it would go allows.

    Args:
        selection: The request's resolved outputs.
        size: Bytes of the answer's tensors.
        inputs: How many inputs the request has.
        most: Largest answer of its kind in bytes.
        most_streamed: Largest answer on a stream.

    Raises:
        AnswerTooLarge: It would be larger; the message names the options that make it fit.
    """
    if size <= most:
        return
    advice = ["fewer inputs"] if inputs > 1 else []
    if selection.attention is not None:
        advice += smaller_attention(selection.attention)
    if selection.vectors is not None and _several(selection.vectors):
        advice.append("fewer layers or heads of query_key_vectors")
    if len(selection.hidden_states or ()) > 1:
        advice.append("fewer hidden state layers")
    if selection.pooling is not None and selection.dimensions > 1:
        advice.append("fewer dimensions")
    if selection.data_type == "float32":
        advice.append("data_type float16")
    if selection.by_token:
        advice.append("shorter inputs")
    fits_stream = size <= most_streamed
    limit = f"{most:,} for one message" if fits_stream else f"{most_streamed:,} for any answer (--max-answer-bytes)"
    raise AnswerTooLarge(
        f"the answer would hold {size:,} bytes of tensors, more than this server's {limit}; "
        f"ask for {' or '.join(advice)}{', or use EncodeStream' if fits_stream else ''}",
        fits_stream=fits_stream,
    )


def smaller_attention(asked: Attention) -> list[str]:
    """Name what makes an answer with attention smaller."""
    advice = []
    if not (asked.rollout or asked.reduce_layers or asked.reduce_heads):
        advice.append("fewer attention layers or heads or reduce_heads" if _several(asked) else "fewer queries")
    return advice if asked.top_k else [*advice, "top_k"]


def _several(asked: Attention | QueryKeyVectors) -> bool:
    return len(asked.layers) * len(asked.heads) > 1


Asked = TypeVar("Asked", Attention, QueryKeyVectors)


def _resolved(name: str, asked: Asked | None, artifact: Artifact) -> Asked | None:
    """Turn an output's choice of layers and heads into numbers from 0."""
    if asked is None:
        return None
    layers = resolve(f"{name} layer", asked.layers, artifact.num_hidden_layers)
    return replace(asked, layers=layers, heads=resolve("head", asked.heads, artifact.num_attention_heads))


def resolve(what: str, numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Turn a choice into numbers from 0; negative ones count from the end, `ALL` takes all.

    Raises:
        InvalidRequest: One does not exist, or is named twice.
    """
    for number in numbers[: count + 1]:  # there may be millions
        if not -count <= number < count:
            raise InvalidRequest(f"{what} {number} does not exist; it must be from {-count} to {count - 1}")
    if len(numbers) > count:
        raise InvalidRequest(f"{len(numbers):,} {what} numbers are too many: there are {count}; name each once")
    if len({number % count for number in numbers}) < len(numbers):
        raise InvalidRequest(f"{what} numbers {list(numbers)} name one twice; name each once")
    return tuple(number % count for number in numbers) if numbers else tuple(range(count))
