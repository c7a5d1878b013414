"""Plain: builds requests from plain Python values, as a user writes them.

May import: attention, request, values, errors, numpy.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from difflib import get_close_matches
from operator import index
from typing import Any, TypedDict, Unpack

import numpy as np

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
from service.values import LEAST_SIGNED, MOST_SIGNED, MOST_UNSIGNED, flag, is_whole, shown, whole

# A text, two texts, token ids, or the input itself.
InputLike = str | tuple[str, str] | SequenceOf[int] | Input
Layers = bool | int | SequenceOf[int]
# Token numbers and spans, alone or in a list.
PlacesLike = int | tuple[int, ...] | SequenceOf[int | tuple[int, ...]] | Places

_INPUT = "a text, a pair of texts (a tuple), or token ids"


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
        InvalidRequest: An option that there is not, or a value of a kind that no input or option has.
    """
    states = read_numbers("hidden_states", hidden_states)
    weights, vectors = _read_attention(attention, query_key_vectors, of_attention)
    chosen = any(numbers is not None for numbers in (states, weights, vectors))
    others = flag("token_embeddings", token_embeddings) or flag("tokens", tokens) or chosen
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
    return EncodeRequest(read_inputs(inputs), model, truncation, prompt_name, outputs)  # type: ignore[arg-type]


def _read_attention(
    attention: Layers, vectors: Layers, options: OfAttention
) -> tuple[Attention | None, QueryKeyVectors | None]:
    """Read what is asked of attention weights, and of the vectors behind them."""
    check_known("encode", options, _encode_options(), {"layers": "attention"})
    layers, vector_layers = read_numbers("attention", attention), read_numbers("query_key_vectors", vectors)
    heads = read_numbers("heads", options.get("heads", ALL))
    if heads is None:
        raise InvalidRequest("heads must be True for all, a number or a list of numbers, got False")
    if heads and layers is None and vector_layers is None:
        raise InvalidRequest("heads goes with attention or query_key_vectors; say which layers' are wanted")
    weights = read_weights(layers or ALL, heads, options)
    if layers is None and weights != Attention(heads=heads):
        raise InvalidRequest(
            "selections and reductions go with attention; say which layers' is wanted, or True for all"
        )
    return (
        None if layers is None else weights,
        None if vector_layers is None else QueryKeyVectors(vector_layers, heads),
    )


def read_weights(layers: tuple[int, ...], heads: tuple[int, ...], options: OfAttention) -> Attention:
    """Read what is asked of attention weights of these layers and heads.

    Raises:
        InvalidRequest: A value of a kind that its option has not.
    """
    return Attention(
        layers=layers,
        heads=heads,
        reduce_heads=options.get("reduce_heads"),
        reduce_layers=options.get("reduce_layers"),
        rollout=flag("rollout", options.get("rollout", False)),
        queries=read_places("queries", options.get("queries", EVERYWHERE)),
        keys=read_places("keys", options.get("keys", EVERYWHERE)),
        top_k=whole("top_k", options.get("top_k", 0), 0, MOST_UNSIGNED),
        special_tokens=options.get("special_tokens", "keep"),
        words=flag("words", options.get("words", False)),
    )


def read_places(name: str, chosen: PlacesLike) -> Places:
    """Read a choice of rows or columns.

    Raises:
        InvalidRequest: Something that is neither a number nor a span.
    """
    if isinstance(chosen, Places):
        return chosen
    items: Any = [chosen] if isinstance(chosen, Span) or is_whole(chosen) else chosen
    expected = f"{name} must be token numbers, or spans (start, end) or (start, end, sequence), each a tuple"
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InvalidRequest(f"{expected}, got {shown(chosen)}")
    tokens: list[int] = []
    spans: list[Span] = []
    for item in items:
        if isinstance(item, tuple) and len(item) in (2, 3) and all(map(is_whole, item)):
            spans.append(Span(*(whole(f"{name}: each number of a span", part, 0, MOST_UNSIGNED) for part in item)))
        elif is_whole(item):
            tokens.append(whole(f"{name}: each token number", item, LEAST_SIGNED, MOST_SIGNED))
        else:
            raise InvalidRequest(f"{expected}, got {shown(item)}")
    return Places(tuple(tokens), tuple(spans))


def _pooled(wanted: bool | None, options: Pooled, *, others: bool) -> Pooled | None:  # noqa: FBT001
    """Decide whether pooled vectors are wanted: if asked for or spoken of, or if no other output is."""
    wanted = None if wanted is None else flag("pooled", wanted)
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
    if isinstance(inputs, bytes) or not isinstance(inputs, Iterable) or not getattr(inputs, "ndim", 1):
        raise InvalidRequest(f"inputs must be a text or a list of inputs, got {type(inputs).__name__}")
    items: list[Any] = list(inputs)
    if items and all(map(is_whole, items)):
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
    if isinstance(item, bytes) or not isinstance(item, Iterable) or not getattr(item, "ndim", 1):
        raise InvalidRequest(f"input {number} must be {_INPUT}, got {type(item).__name__}")
    tokens = list(item)
    if strange := [token for token in tokens if not is_whole(token)][:1]:
        raise InvalidRequest(
            f"input {number} must be {_INPUT}, got {type(item).__name__}, which holds {shown(strange[0])}"
        )
    return TokenIdsInput(tuple(map(index, tokens)))


def attend_request(
    item: InputLike, layers: Layers, heads: int | SequenceOf[int], options: Mapping[str, Any]
) -> EncodeRequest:
    """Build the request of `attend`: one input, and attention of the layers.

    Args:
        item: A text, a pair of texts, token ids, `TextInput` or `TokenIdsInput`.
        layers: True for all, or layer numbers.
        heads: `ALL` or head numbers.
        options: Others of `encode_request`.

    Raises:
        InvalidRequest: More or less than one input; an option that there is not, or a value of a kind that none has.
    """
    known = {*_encode_options(), "layers"} - {"attention"}
    check_known("attend", options, known, {"attention": "layers"})
    if is_whole(item) or isinstance(item, bool) or not isinstance(item, TextInput | TokenIdsInput | Iterable):
        raise InvalidRequest(f"attend takes {_INPUT}, got {shown(item)}")
    if isinstance(item, Iterable) and not isinstance(item, str | bytes | tuple):
        item = list(item)
        if any(not is_whole(part) for part in item):
            raise InvalidRequest(f"attend takes one input, {_INPUT}, got {shown(item)}; call it for each of several")
    chosen = read_numbers("layers", layers)
    if chosen is None:
        raise InvalidRequest(
            "layers must be True for all, a number or a list of numbers, got False; encode has the other outputs"
        )
    return encode_request([item], attention=chosen or True, heads=heads, **options)


def _encode_options() -> Collection[str]:
    """Name every option of `encode_request`."""
    return {*(encode_request.__kwdefaults__ or ()), *OfAttention.__annotations__}


def check_known(method: str, options: Iterable[str], known: Collection[str], instead: Mapping[str, str]) -> None:
    """Refuse an option that a method has not.

    Args:
        method: Its name.
        options: What it was given.
        known: What it takes.
        instead: Options that it has under another name.

    Raises:
        InvalidRequest: There is one.
    """
    for name in options:
        if name in known:
            continue
        if name in instead:
            raise InvalidRequest(
                f"{method} has no option {name}; it is called {instead[name]} here, use {instead[name]}="
            )
        nearest = get_close_matches(name, known, n=3)
        every = ", ".join([*nearest, *sorted({*known} - {*nearest})])
        raise InvalidRequest(f"{method} has no option {name}; it has {every}")


def read_numbers(name: str, chosen: Layers) -> tuple[int, ...] | None:
    """Read a choice of layers or heads: True for all, False for none, a number, or several.

    Raises:
        InvalidRequest: It is none.
    """
    if isinstance(chosen, bool | np.bool_):
        return ALL if chosen else None
    items: Any = (chosen,) if is_whole(chosen) else chosen
    expected = f"{name} must be True, a number or a list of numbers, got {shown(chosen)}"
    if isinstance(items, str | bytes) or not isinstance(items, Iterable) or not getattr(items, "ndim", 1):
        raise InvalidRequest(expected)
    numbers = tuple(items)
    if strange := [number for number in numbers if not is_whole(number)][:1]:
        raise InvalidRequest(f"{expected}, which holds {shown(strange[0])}" if len(numbers) > 1 else expected)
    return tuple(whole(f"{name}: each number", number, LEAST_SIGNED, MOST_SIGNED) for number in numbers)
