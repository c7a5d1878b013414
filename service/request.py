"""What a caller asks for and what it gets: plain frozen data, the same on both sides of the wire.

The server turns messages into these and back, and so does the client, whose users meet them; for those
users `encode_request` builds one from plain Python values. May import: errors, numpy.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidRequest

Truncation = Literal["right", "left", "off"]
Pooling = Literal["cls", "mean", "max", "last", "sentence"]
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


# A text, two texts, token ids, or the input itself.
InputLike = str | tuple[str, str] | SequenceOf[int] | Input
Layers = bool | int | SequenceOf[int]


def encode_request(
    inputs: InputLike | Iterable[InputLike],
    *,
    pooled: bool | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    token_embeddings: bool = False,
    hidden_states: Layers = False,
    attention: Layers = False,
    heads: int | SequenceOf[int] = ALL,
    tokens: bool = False,
    truncation: str = "right",
    prompt_name: str | None = None,
    data_type: str = "float32",
    model: str = "",
) -> EncodeRequest:
    """Build a request from plain Python values.

    Args:
        inputs: One input or several: a text, a pair of texts, token ids, `TextInput` or `TokenIdsInput`.
        pooled: Ask for pooled vectors; unset, they come when nothing else is asked for, or when one of the
            next three is given.
        pooling: cls, mean, max, last or sentence; unset for the model's own.
        normalize: Scale pooled vectors to length 1; unset for the model's own.
        dimensions: Keep the first so many dimensions of pooled vectors.
        token_embeddings: Ask for the last hidden state of every token.
        hidden_states: True for all layers, or layer numbers, 0 for the embeddings' output.
        attention: True for all layers, or layer numbers.
        heads: Heads of the attention; all when empty.
        tokens: Describe the tokens even if only pooled vectors are asked for.
        truncation: right, left or off.
        prompt_name: Prompt of the model; unset for its default, empty for none.
        data_type: float32 or float16, of all tensors in the answer.
        model: Name of a served model; empty for the first.

    Raises:
        InvalidRequest: A value of a kind that no input or option has.
    """
    states, layers = _numbers("hidden_states", hidden_states), _numbers("attention", attention)
    chosen_heads = _numbers("heads", heads)
    if layers is None and chosen_heads:
        raise InvalidRequest("heads goes with attention; say which layers' attention is wanted")
    others = token_embeddings or tokens or states is not None or layers is not None
    options = Pooled(pooling, normalize, dimensions)  # type: ignore[arg-type]
    outputs = Outputs(
        pooled=_pooled(pooled, options, others=others),
        token_embeddings=token_embeddings,
        hidden_states=states,
        attention=None if layers is None else Attention(layers, ALL if chosen_heads is None else chosen_heads),
        tokens=tokens,
        data_type=data_type,  # type: ignore[arg-type]
    )
    return EncodeRequest(
        inputs=read_inputs(inputs),
        model=model,
        truncation=truncation,  # type: ignore[arg-type]
        prompt_name=prompt_name,
        outputs=outputs,
    )


def _pooled(wanted: bool | None, options: Pooled, *, others: bool) -> Pooled | None:  # noqa: FBT001
    """Decide whether pooled vectors are wanted: if asked for or spoken of, or if no other output is."""
    spoken_of = options != Pooled()
    if wanted is False and spoken_of:
        raise InvalidRequest("pooling, normalize and dimensions go with pooled vectors; leave them or pooled=False out")
    if wanted is False and not others:
        raise InvalidRequest("no output is asked for; leave pooled=False out, or ask for another output")
    return options if wanted or (wanted is None and (spoken_of or not others)) else None


def read_inputs(inputs: InputLike | Iterable[InputLike]) -> tuple[Input, ...]:
    """Read one input or several: a tuple of two texts is a pair, a list of whole numbers is token ids.

    Raises:
        InvalidRequest: Something that is no input.
    """
    if isinstance(inputs, str | TextInput | TokenIdsInput) or _is_pair(inputs):
        return (_read_input(0, inputs),)
    if isinstance(inputs, bytes) or not isinstance(inputs, Iterable):
        raise InvalidRequest(f"inputs must be a text or a list of inputs, got {type(inputs).__name__}")
    items: list[Any] = list(inputs)
    if items and all(hasattr(item, "__index__") for item in items):
        items = [items]  # one list of token ids
    return tuple(_read_input(number, item) for number, item in enumerate(items))


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item)


def _read_input(number: int, item: Any) -> Input:
    if isinstance(item, TextInput | TokenIdsInput):
        return item
    if isinstance(item, str):
        return TextInput(item)
    if _is_pair(item):
        return TextInput(*item)
    try:
        if isinstance(item, bytes):
            raise TypeError
        return TokenIdsInput(tuple(index(token) for token in item))
    except TypeError as error:
        raise InvalidRequest(
            f"input {number} must be a text, a pair of texts (a tuple), or token ids, got {type(item).__name__}"
        ) from error


def _numbers(name: str, chosen: Layers) -> tuple[int, ...] | None:
    """Read a choice of layers or heads: True for all, False for none, a number, or several."""
    if isinstance(chosen, bool):
        return ALL if chosen else None
    try:
        return (index(chosen),) if hasattr(chosen, "__index__") else tuple(index(number) for number in chosen)
    except TypeError as error:
        raise InvalidRequest(f"{name} must be True, a number or a list of numbers, got {chosen!r}") from error
