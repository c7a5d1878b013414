"""Plain requests to align, from values as a user writes them.

May import: attention, plain, request, values, errors.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from service.attention import ALL
from service.errors import InvalidRequest
from service.plain import InputLike, Layers, OfAttention, check_known, read_inputs, read_numbers, read_weights
from service.request import AlignRequest, Input
from service.values import is_whole, shown


def align_request(
    pairs: Iterable[tuple[InputLike, InputLike]],
    *,
    layers: Layers = True,
    heads: int | SequenceOf[int] = ALL,
    truncation: str = "right",
    prompt_name: str | None = None,
    data_type: str = "float32",
    model: str = "",
    **of_attention: Any,
) -> AlignRequest:
    """Build a request from plain Python values.

    Args:
        pairs: Sources with their targets, each a text or token ids; a source may be two texts.
        layers: True for all of the decoder, or layer numbers.
        heads: `ALL` or head numbers.
        truncation: right, left or off, for both sides.
        prompt_name: Prompt of the model for the sources; unset for its default, empty for none.
        data_type: float32 or float16.
        model: Name of a served model; empty for the first.
        of_attention: Selections and reductions, see `OfAttention`; all but rollout. Queries are the target's tokens,
            keys the source's.

    Raises:
        InvalidRequest: An option that there is not, or a value of a kind that no input or option has.
    """
    options = {*(align_request.__kwdefaults__ or ()), *OfAttention.__annotations__} - {"rollout"}
    check_known("align", of_attention, options, {"attention": "layers"})
    chosen, some = read_numbers("layers", layers), read_numbers("heads", heads)
    if chosen is None or some is None:
        raise InvalidRequest("layers and heads must be True for all, a number or a list of numbers, got False")
    return AlignRequest(
        _pairs(pairs),
        model,
        truncation,  # type: ignore[arg-type]
        prompt_name,
        read_weights(chosen, some, of_attention),  # type: ignore[arg-type]
        data_type,  # type: ignore[arg-type]
    )


def _pairs(pairs: Any) -> tuple[tuple[Input, Input], ...]:
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise InvalidRequest(f"pairs must be a list of sources with their targets, got {shown(pairs)}")
    return tuple(_pair(place, pair) for place, pair in enumerate(pairs))


def _pair(place: int, pair: Any) -> tuple[Input, Input]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidRequest(f"pair {place} must be a source and its target, a tuple of two, got {shown(pair)}")
    return _one(f"the source of pair {place}", pair[0]), _one(f"the target of pair {place}", pair[1])


def _one(name: str, item: Any) -> Input:
    if is_whole(item):  # in a list it would be taken for token ids
        raise InvalidRequest(f"{name} must be a text, or a list of token ids, got {shown(item)}")
    try:
        (read,) = read_inputs([item])
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}; align_pairs takes several pairs") from error
    return read
