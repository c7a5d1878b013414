"""What a caller asks for and what it gets: plain frozen data, the same on both sides of the wire.

The server turns messages into these and back, and so does the client, whose users meet them.
May import: numpy.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Truncation = Literal["right", "left", "off"]
Pooling = Literal["cls", "mean", "max", "last"]
DataType = Literal["float32", "float16"]

ALL: tuple[int, ...] = ()
"""A choice of layers or heads that takes all of them."""


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
class Attention:
    """Attention weights of layers and heads, each `ALL` or numbers, negative ones from the end."""

    layers: tuple[int, ...] = ALL
    heads: tuple[int, ...] = ALL


@dataclass(frozen=True, slots=True)
class Outputs:
    """What an answer holds.

    Attributes:
        pooled: Pooled vectors; None for none.
        token_embeddings: The last hidden state of every token.
        hidden_states: Layers, `ALL` or numbers; None for none.
        attention: Attention weights; None for none.
        tokens: Describe the tokens; always so with one of the three above.
        data_type: Element type of all tensors.
    """

    pooled: Pooled | None = None
    token_embeddings: bool = False
    hidden_states: tuple[int, ...] | None = None
    attention: Attention | None = None
    tokens: bool = False
    data_type: DataType = "float32"

    @property
    def by_token(self) -> bool:
        """Whether the answer speaks of tokens at all."""
        per_token = self.token_embeddings or self.hidden_states is not None or self.attention is not None
        return self.tokens or per_token


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
        attention: (layers, heads, query, key).
    """

    num_tokens: int
    original_num_tokens: int
    tokens: Tokens | None = None
    token_embeddings: NDArray[np.floating] | None = None
    hidden_states: NDArray[np.floating] | None = None
    attention: NDArray[np.floating] | None = None

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
