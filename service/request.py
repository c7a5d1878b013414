"""What a caller asks for and what it gets: plain frozen data, the same on both sides of the wire.

The server turns messages into these and back, and so does the client, whose users meet them.
May import: attention, numpy.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.attention import EVERYTHING, Attention, Axis, QueryKeyVectors

Truncation = Literal["right", "left", "off"]
Pooling = Literal["cls", "mean", "max", "last", "sentence"]
DataType = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class TextInput:
    """A text, or two texts in one sequence."""

    text: str
    pair: str | None = None


@dataclass(frozen=True, slots=True)
class TokenIdsInput:
    """A sequence that is tokenized already, special tokens included."""

    ids: tuple[int, ...]
    token_type_ids: tuple[int, ...] | None = None


Input = TextInput | TokenIdsInput


@dataclass(frozen=True, slots=True)
class Pooled:
    """One vector an input; None takes the model's own choice."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """What an answer holds.

    Attributes:
        pooled: Pooled vectors; None for none.
        token_embeddings: The last hidden state of every token.
        hidden_states: Layers, `ALL` or numbers; None for none.
        attention: Attention weights; None for none.
        query_key_vectors: Vectors whose products are the scores; None for none.
        tokens: Describe the tokens; always so with one of the four above.
        data_type: Element type of all tensors.
    """

    pooled: Pooled | None = None
    token_embeddings: bool = False
    hidden_states: tuple[int, ...] | None = None
    attention: Attention | None = None
    query_key_vectors: QueryKeyVectors | None = None
    tokens: bool = False
    data_type: DataType = "float32"

    @property
    def by_token(self) -> bool:
        """Whether the answer speaks of tokens at all."""
        others = (self.hidden_states, self.attention, self.query_key_vectors)
        return self.tokens or self.token_embeddings or any(output is not None for output in others)

    @property
    def places(self) -> int:
        """How many tokens and spans are named of each input."""
        return 0 if self.attention is None else self.attention.places


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Inputs to split into tokens.

    Attributes:
        inputs: At least one.
        model: Name of a served model; empty for the first.
        truncation: What happens to a sequence longer than the model takes.
        prompt_name: None for the model's default, empty for none.
    """

    inputs: tuple[Input, ...]
    model: str = ""
    truncation: Truncation = "right"
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class EncodeRequest(TokenizeRequest):
    """Inputs to encode, and what of them is wanted."""

    outputs: Outputs = Outputs(pooled=Pooled())


@dataclass(frozen=True, slots=True)
class AlignRequest:
    """Pairs of a source and a target, and what of the target's attention to its source is wanted.

    Attributes:
        pairs: Source and target of each; at least one.
        model: Name of a served model; empty for the first.
        truncation: What happens to a source or a target longer than the model takes.
        prompt_name: Of the sources; None for the model's default, empty for none.
        attention: Layers and heads are the decoder's, queries the target's tokens, keys the source's.
        data_type: Element type of all tensors.
    """

    pairs: tuple[tuple[Input, Input], ...]
    model: str = ""
    truncation: Truncation = "right"
    prompt_name: str | None = None
    attention: Attention = EVERYTHING
    data_type: DataType = "float32"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sequence; every list has one entry a token.

    Attributes:
        ids: Numbers in the vocabulary.
        texts: As the vocabulary writes them.
        char_spans: `text[start:end]` is what the token covers; (0, 0) where it covers no text.
        byte_spans: The same in bytes of UTF-8.
        words: Number of the word in its text; -1 where it belongs to none.
        sequences: Which text of a pair, 0 or 1; -1 for special tokens.
        special: Whether the token stands for no text ([CLS], [SEP]).
    """

    ids: list[int]
    texts: list[str]
    char_spans: list[tuple[int, int]]
    byte_spans: list[tuple[int, int]]
    words: list[int]
    sequences: list[int]
    special: list[bool]

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class InputResult:
    """What is known of one input; what was not asked for is None.

    Attributes:
        num_tokens: Tokens encoded, special ones included.
        original_num_tokens: Tokens before truncation, special ones included.
        tokens: The tokens themselves.
        token_embeddings: (tokens, hidden).
        hidden_states: (layers, tokens, hidden).
        attention: (layers, heads, query, key) without the axes that were reduced; key is top_k long if that was
            asked for.
        attention_keys: Which place of the key axis each weight has, int32 of the same shape; with top_k.
        query_axis: What the places of the query axis stand for; None where place i is token i.
        key_axis: The same of the key axis.
        query_vectors: (layers, heads, tokens, head_dim).
        key_vectors: Likewise.
    """

    num_tokens: int
    original_num_tokens: int
    tokens: Tokens | None = None
    token_embeddings: NDArray[np.floating] | None = None
    hidden_states: NDArray[np.floating] | None = None
    attention: NDArray[np.floating] | None = None
    attention_keys: NDArray[np.int32] | None = None
    query_axis: Axis | None = None
    key_axis: Axis | None = None
    query_vectors: NDArray[np.floating] | None = None
    key_vectors: NDArray[np.floating] | None = None

    @property
    def truncated(self) -> bool:
        """Whether tokens were dropped."""
        return self.original_num_tokens > self.num_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in seconds."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """The answer to one request.

    Attributes:
        pooled: (inputs, dim), or None.
        results: One for each input.
        timings: Where the time went.
        model: Name of the model that answered.
        model_digest: Its artifact's digest.
    """

    pooled: NDArray[np.floating] | None
    results: list[InputResult]
    timings: Timings = field(default_factory=Timings)
    model: str = ""
    model_digest: str = ""


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """The tokens of each input."""

    results: list[InputResult]
    model: str = ""
    model_digest: str = ""


@dataclass(frozen=True, slots=True)
class PairResult:
    """What is known of one pair.

    Attributes:
        source: The source's tokens, without tensors.
        target: The target's.
        attention: (layers, heads, target, source) without the axes that were reduced; source is top_k long if that was
            asked for.
        attention_keys: Which place of the source's axis each weight has, int32 of the same shape; with top_k.
        query_axis: What the places of the target's axis stand for; None where place i is token i.
        key_axis: The same of the source's axis.
    """

    source: InputResult
    target: InputResult
    attention: NDArray[np.floating] | None
    attention_keys: NDArray[np.int32] | None = None
    query_axis: Axis | None = None
    key_axis: Axis | None = None


@dataclass(frozen=True, slots=True)
class AlignResult:
    """The answer to one request of pairs.

    Attributes:
        results: One for each pair.
        timings: Where the time went.
        model: Name of the model that answered.
        model_digest: Its artifact's digest.
    """

    results: list[PairResult]
    timings: Timings = field(default_factory=Timings)
    model: str = ""
    model_digest: str = ""


@dataclass(frozen=True, slots=True)
class DecoderInfo:
    """A model's decoder, whose cross-attention can be asked for.

    Attributes:
        num_layers: Its layers.
        num_heads: Heads of each.
        max_tokens: Longest target in tokens, special tokens included.
    """

    num_layers: int
    num_heads: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One place where batches run.

    Attributes:
        id: Unique among a model's replicas.
        node: Host or cluster node.
        device: What computes there, for instance `cpu float32`; empty before its first batch.
        state: RUNNING once it answers.
        digest: Digest of the artifact that it serves; empty before its first batch.
    """

    id: str
    node: str
    device: str
    state: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server says of a model; the proto's GetModelResponse explains each field."""

    model: str
    model_digest: str
    model_id: str
    revision: str
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_parameters: int
    max_tokens: int
    default_pooling: str
    default_normalize: bool
    default_prompt_name: str
    prompts: dict[str, str]
    provider: str
    precision: str
    provider_reason: str
    max_inputs: int
    max_message_bytes: int
    server_version: str
    models: list[str]
    pooled_size: int
    replicas: list[ReplicaInfo]
    max_answer_bytes: int
    max_request_bytes: int
    decoder: DecoderInfo | None = None
