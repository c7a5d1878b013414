"""Plain: builds requests from plain Python values, as a user writes them.

May import: attention, request, errors.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import index
from typing import Any, TypedDict, Unpack

from service.attention import (
    ALL,
    EVERYWHERE,
    Attention,
    Places,
    QueryKeyVectors,
    Reduction,
    Span,
    SpecialTokens,
)
from service.errors import InvalidRequest
from service.request import EncodeRequest, Input, Outputs, Pooled, TextInput, TokenIdsInput

# A text, two texts, token ids, or the input itself.
InputLike = str | tuple[str, str] | SequenceOf[int] | Input
Layers = bool | int | SequenceOf[int]
# Token numbers and spans, alone or in a list.
PlacesLike = int | tuple[int, ...] | SequenceOf[int | tuple[int, ...]] | Places


class OfAttention(TypedDict, total=False):
    """What may be asked of attention, in plain values; see `service.attention.Attention`.

    Attributes:
        heads: Heads of attention, and of query and key vectors; all when empty.
        reduce_heads: mean or max over the heads.
        reduce_layers: mean or max over the layers.
        rollout: Attention rollout through the layers.
        queries: Rows: token numbers, and spans of text as (start, end) or (start, end, sequence).
        keys: Columns, likewise.
        top_k: Only so many largest weights of each row; 0 for all.
        special_tokens: keep, drop or renormalize.
        words: Merge the tokens of each word.
    """

    heads: int | SequenceOf[int]
    reduce_heads: Reduction | None
    reduce_layers: Reduction | None
    rollout: bool
    queries: PlacesLike
    keys: PlacesLike
    top_k: int
    special_tokens: SpecialTokens
    words: bool


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
    query_key_vectors: Layers = False,
    tokens: bool = False,
    truncation: str = "right",
    prompt_name: str | None = None,
    data_type: str = "float32",
    model: str = "",
    **of_attention: Unpack[OfAttention],
) -> EncodeRequest:
    """Build a request from plain Python values.

    Args:
        inputs: One input or several: a text, a pair of texts, token ids, `TextInput` or `TokenIdsInput`.
        pooled: Ask for pooled vectors; unset, they come if nothing else is asked for, or one of the next three is.
        pooling: cls, mean, max, last or sentence; unset for the model's own.
        normalize: Scale pooled vectors to length 1; unset for the model's own.
        dimensions: Keep the first so many dimensions of pooled vectors.
        token_embeddings: Ask for the last hidden state of every token.
        hidden_states: True for all layers, or layer numbers, 0 for the embeddings' output.
        attention: True for all layers, or layer numbers.
        query_key_vectors: True for all layers, or layer numbers: the vectors whose products are the scores.
        tokens: Describe the tokens even if only pooled vectors are asked for.
        truncation: right, left or off.
        prompt_name: Prompt of the model; unset for its default, empty for none.
        data_type: float32 or float16, of all tensors in the answer.
        model: Name of a served model; empty for the first.
        of_attention: Selections and reductions, see `OfAttention`.

    Raises:
        InvalidRequest: A value of a kind that no input or option has.
    """
    states = _numbers("hidden_states", hidden_states)
    weights, vectors = _read_attention(attention, query_key_vectors, of_attention)
    others = token_embeddings or tokens or any(chosen is not None for chosen in (states, weights, vectors))
    options = Pooled(pooling, normalize, dimensions)  # type: ignore[arg-type]
    outputs = Outputs(
        pooled=_pooled(pooled, options, others=others),
        token_embeddings=token_embeddings,
        hidden_states=states,
        attention=weights,
        query_key_vectors=vectors,
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


def _read_attention(
    attention: Layers, vectors: Layers, options: OfAttention
) -> tuple[Attention | None, QueryKeyVectors | None]:
    """Read what is asked of attention weights, and of the vectors behind them."""
    if unknown := options.keys() - OfAttention.__annotations__.keys():
        raise TypeError(f"encode_request got unknown options {', '.join(sorted(unknown))}")
    layers, vector_layers = _numbers("attention", attention), _numbers("query_key_vectors", vectors)
    heads = _numbers("heads", options.get("heads", ALL)) or ALL
    if heads and layers is None and vector_layers is None:
        raise InvalidRequest("heads goes with attention or query_key_vectors; say which layers' are wanted")
    weights = Attention(
        layers=layers or ALL,
        heads=heads,
        reduce_heads=options.get("reduce_heads"),
        reduce_layers=options.get("reduce_layers"),
        rollout=options.get("rollout", False),
        queries=read_places("queries", options.get("queries", EVERYWHERE)),
        keys=read_places("keys", options.get("keys", EVERYWHERE)),
        top_k=options.get("top_k", 0),
        special_tokens=options.get("special_tokens", "keep"),
        words=options.get("words", False),
    )
    if layers is None and weights != Attention(heads=heads):
        raise InvalidRequest(
            "selections and reductions go with attention; say which layers' is wanted, or True for all"
        )
    return (
        None if layers is None else weights,
        None if vector_layers is None else QueryKeyVectors(vector_layers, heads),
    )


def read_places(name: str, chosen: PlacesLike) -> Places:
    """Read a choice of rows or columns.

    Raises:
        InvalidRequest: Something that is neither a number nor a span.
    """
    if isinstance(chosen, Places):
        return chosen
    items: Any = [chosen] if isinstance(chosen, Span) or hasattr(chosen, "__index__") else chosen
    try:
        spans = tuple(Span(*map(index, item)) for item in items if isinstance(item, tuple))
        tokens = tuple(index(item) for item in items if not isinstance(item, tuple))
    except TypeError as error:
        raise InvalidRequest(
            f"{name} must be token numbers, or spans (start, end) or (start, end, sequence), got {chosen!r}"
        ) from error
    return Places(tokens, spans)


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
