"""Codec: messages to dataclasses and numpy, and back. Tensors travel as raw little-endian bytes.

Both directions of both sides live here, so the wire is defined once. Nothing is decided here beyond
whether a message means anything. May import: pb, codec_enums, codec_outputs, attention, request, values, errors, numpy.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from service.attention import Axis
from service.codec_enums import DTYPES, TRUNCATIONS, lookup, number
from service.codec_outputs import decode_outputs, encode_outputs
from service.errors import AttencodeError, InternalFault, InvalidRequest, QueueFull, caller_message
from service.pb import encoder_pb2 as pb
from service.request import (
    AlignResult,
    EncodeRequest,
    EncodeResult,
    Input,
    InputResult,
    TextInput,
    Timings,
    TokenIdsInput,
    TokenizeRequest,
    TokenizeResult,
    Tokens,
)
from service.values import MOST_UNSIGNED, shown, text, whole

AnyMessage = TypeVar("AnyMessage", bound=Message)
TensorWriter = Callable[[int, str, NDArray[Any] | None], pb.Tensor | None]
"""Writes the tensor of an input's number (0 for pooled) that has a name."""
TensorReader = Callable[[int, str, pb.Tensor], NDArray[Any]]
"""Reads such a tensor."""

# ---------------------------------------------------------------- requests, on the server


def parse(message_type: type[AnyMessage], data: bytes) -> AnyMessage:
    """Parse a message's bytes.

    Raises:
        InvalidRequest: They are not such a message; text that is not UTF-8 is one cause.
    """
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        raise InvalidRequest(
            f"the bytes sent are not a {name}: they are damaged, of another type, or hold text that is not UTF-8"
        ) from error


def decode_encode_request(message: pb.EncodeRequest) -> EncodeRequest:
    """Read an EncodeRequest.

    Raises:
        InvalidRequest: An enum value that does not exist, or an input without content.
    """
    return EncodeRequest(
        inputs=_decode_inputs(message.inputs),
        model=message.model,
        truncation=lookup("truncation", TRUNCATIONS, message.truncation),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
        outputs=decode_outputs(message),
    )


def decode_tokenize_request(message: pb.TokenizeRequest) -> TokenizeRequest:
    """Read a TokenizeRequest.

    Raises:
        InvalidRequest: An enum value that does not exist, or an input without content.
    """
    return TokenizeRequest(
        inputs=_decode_inputs(message.inputs),
        model=message.model,
        truncation=lookup("truncation", TRUNCATIONS, message.truncation),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
    )


def _decode_inputs(messages: Iterable[pb.Input]) -> tuple[Input, ...]:
    return tuple(decode_input(f"input {place}", message) for place, message in enumerate(messages))


def decode_input(name: str, message: pb.Input) -> Input:
    """Read an Input, which messages call by a name.

    Raises:
        InvalidRequest: It is without content.
    """
    kind = message.WhichOneof("kind")
    if kind == "text":
        return TextInput(message.text)
    if kind == "pair":
        return TextInput(message.pair.first, message.pair.second)
    if kind == "token_ids":
        types = tuple(message.token_ids.token_type_ids)
        return TokenIdsInput(tuple(message.token_ids.ids), types or None)
    raise InvalidRequest(f"{name} has no content; set text, pair or token_ids")


# ---------------------------------------------------------------- requests, on the client


def encode_encode_request(request: EncodeRequest) -> pb.EncodeRequest:
    """Write an EncodeRequest.

    Raises:
        InvalidRequest: A name or a text that the wire cannot carry.
    """
    message = pb.EncodeRequest(
        model=text("model", request.model),
        inputs=_encode_inputs(request.inputs),
        truncation=number("truncation", TRUNCATIONS, request.truncation),
        prompt_name=None if request.prompt_name is None else text("prompt_name", request.prompt_name),
    )
    encode_outputs(request.outputs, message)
    return message


def encode_tokenize_request(request: TokenizeRequest) -> pb.TokenizeRequest:
    """Write a TokenizeRequest.

    Raises:
        InvalidRequest: A name or a text that the wire cannot carry.
    """
    return pb.TokenizeRequest(
        model=text("model", request.model),
        inputs=_encode_inputs(request.inputs),
        truncation=number("truncation", TRUNCATIONS, request.truncation),
        prompt_name=None if request.prompt_name is None else text("prompt_name", request.prompt_name),
    )


def _encode_inputs(inputs: Iterable[Input]) -> list[pb.Input]:
    return [encode_input(f"input {place}", item) for place, item in enumerate(inputs)]


def encode_input(name: str, item: Input) -> pb.Input:
    """Write an Input, which messages call by a name."""
    if isinstance(item, TokenIdsInput):
        return pb.Input(token_ids=_encode_ids(name, item))
    if not isinstance(item, TextInput):
        raise InvalidRequest(
            f"{name} must be a TextInput or a TokenIdsInput, as encode_request makes of plain values, got {shown(item)}"
        )
    first = text(name, item.text)
    if item.pair is None:
        return pb.Input(text=first)
    return pb.Input(pair=pb.TextPair(first=first, second=text(f"{name}: the second text", item.pair)))


def _encode_ids(name: str, item: TokenIdsInput) -> pb.TokenIds:
    try:
        return pb.TokenIds(ids=item.ids, token_type_ids=item.token_type_ids)
    except (TypeError, ValueError) as error:
        for part, values in (("token ids", item.ids), ("token type ids", item.token_type_ids)):
            for value in values if isinstance(values, Iterable) else ():  # which of them it is
                whole(f"{name}: each of its {part}", value, 0, MOST_UNSIGNED)
        raise InvalidRequest(f"{name} must hold token ids as a list of whole numbers, got {shown(item.ids)}") from error


# ---------------------------------------------------------------- answers, on the server


def encode_encode_result(result: EncodeResult, write: TensorWriter | None = None) -> pb.EncodeResponse:
    """Write an EncodeResponse; `write` is called for tensor after tensor in the order of the contract's chunks."""
    write = write or inline
    return pb.EncodeResponse(
        pooled=write(0, "pooled", result.pooled),
        results=[encode_input_result(item, place, write) for place, item in enumerate(result.results)],
        timings=encode_timings(result.timings),
        model=result.model,
        model_digest=result.model_digest,
    )


def encode_timings(timings: Timings) -> pb.Timings:
    """Write an answer's Timings."""
    return pb.Timings(
        tokenize_seconds=timings.tokenize_s,
        queue_seconds=timings.queue_s,
        inference_seconds=timings.inference_s,
        total_seconds=timings.total_s,
    )


def encode_tokenize_result(result: TokenizeResult) -> pb.TokenizeResponse:
    """Write a TokenizeResponse."""
    return pb.TokenizeResponse(
        results=[encode_input_result(item, place, inline) for place, item in enumerate(result.results)],
        model=result.model,
        model_digest=result.model_digest,
    )


def encode_error(error: AttencodeError) -> pb.Error:
    """Write an error of one item of a stream."""
    delay_s = error.retry_delay_s if isinstance(error, QueueFull) else 0.0
    return pb.Error(code=error.status.value[0], message=caller_message(error), retry_delay_seconds=delay_s)


def encode_tensor(array: NDArray[Any]) -> pb.Tensor:
    """Write an array of float32, float16 or int32."""
    return pb.Tensor(shape=array.shape, data_type=data_type_of(array), data=wire_order(array).tobytes())


def data_type_of(array: NDArray[Any]) -> pb.DataType:
    """Give the wire's number of an array's element type."""
    return next(number for number, dtype in DTYPES.items() if dtype.name == array.dtype.name)


def wire_order(array: NDArray[Any]) -> NDArray[Any]:
    """Lay an array out as the wire has it, row-major and little-endian; copies only what is not so already."""
    return np.ascontiguousarray(array, dtype=DTYPES[data_type_of(array)])


def inline(_place: int, _name: str, array: NDArray[Any] | None) -> pb.Tensor | None:
    """Write a tensor, if there is one, into its message."""
    return None if array is None else encode_tensor(array)


def encode_input_result(result: InputResult, place: int, write: TensorWriter) -> pb.InputResult:
    """Write an InputResult; `place` is the input's number."""
    tensor: Callable[[str], pb.Tensor | None] = lambda name: write(place, name, getattr(result, name))  # noqa: E731
    return pb.InputResult(
        num_tokens=result.num_tokens,
        original_num_tokens=result.original_num_tokens,
        truncated=result.truncated,
        tokens=None if result.tokens is None else _encode_tokens(result.tokens),
        token_embeddings=tensor("token_embeddings"),
        hidden_states=tensor("hidden_states"),
        attention=tensor("attention"),
        attention_keys=tensor("attention_keys"),
        query_axis=encode_axis(result.query_axis),
        key_axis=encode_axis(result.key_axis),
        query_vectors=tensor("query_vectors"),
        key_vectors=tensor("key_vectors"),
    )


def encode_axis(axis: Axis | None) -> pb.Axis | None:
    """Write an Axis, if there is one."""
    return None if axis is None else pb.Axis(starts=[start for start, _ in axis], ends=[end for _, end in axis])


def _encode_tokens(tokens: Tokens) -> pb.Tokens:
    return pb.Tokens(
        ids=tokens.ids,
        texts=tokens.texts,
        char_starts=[start for start, _ in tokens.char_spans],
        char_ends=[end for _, end in tokens.char_spans],
        byte_starts=[start for start, _ in tokens.byte_spans],
        byte_ends=[end for _, end in tokens.byte_spans],
        words=tokens.words,
        sequences=tokens.sequences,
        special=tokens.special,
    )


# ---------------------------------------------------------------- answers, on the client


def broken(what: str) -> InternalFault:
    """Give the error for an answer that the contract does not allow."""
    return InternalFault(f"the server broke the contract: {what}")


def check_answered(result: EncodeResult | TokenizeResult | AlignResult, inputs: int) -> None:
    """Do nothing where an answer speaks of every input.

    Raises:
        InternalFault: It does not.
    """
    if len(result.results) != inputs:
        raise broken(f"{inputs:,} inputs have {len(result.results):,} results")


def decode_encode_response(message: pb.EncodeResponse, read: TensorReader | None = None) -> EncodeResult:
    """Read an EncodeResponse; `read` reads its tensors, from their messages alone if it is None.

    Raises:
        InternalFault: A tensor or a list is not as long as others say.
    """
    read = read or from_message
    return EncodeResult(
        pooled=read(0, "pooled", message.pooled) if message.HasField("pooled") else None,
        results=[decode_input_result(item, place, read) for place, item in enumerate(message.results)],
        timings=decode_timings(message.timings),
        model=message.model,
        model_digest=message.model_digest,
    )


def decode_timings(message: pb.Timings) -> Timings:
    """Read an answer's Timings."""
    return Timings(message.tokenize_seconds, message.queue_seconds, message.inference_seconds, message.total_seconds)


def decode_tokenize_response(message: pb.TokenizeResponse) -> TokenizeResult:
    """Read a TokenizeResponse.

    Raises:
        InternalFault: Lists of one input's tokens differ in length.
    """
    results = [decode_input_result(item, place, from_message) for place, item in enumerate(message.results)]
    return TokenizeResult(results, message.model, message.model_digest)


def decode_tensor(message: pb.Tensor) -> NDArray[Any]:
    """Read a tensor without copying; the array is read-only.

    Raises:
        InternalFault: Its data are not what its shape and type say.
    """
    try:
        return np.frombuffer(message.data, DTYPES[message.data_type]).reshape(tuple(message.shape))
    except (KeyError, ValueError, OverflowError) as error:
        raise broken("a tensor does not have the shape or type that it says") from error


def from_message(_place: int, _name: str, message: pb.Tensor) -> NDArray[Any]:
    """Read a tensor from its message alone."""
    return decode_tensor(message)


def decode_input_result(message: pb.InputResult, place: int, read: TensorReader) -> InputResult:
    """Read an InputResult; `place` is the input's number."""
    tensor: Callable[[str], NDArray[Any] | None] = lambda name: (  # noqa: E731
        read(place, name, getattr(message, name)) if message.HasField(name) else None
    )
    return InputResult(
        num_tokens=message.num_tokens,
        original_num_tokens=message.original_num_tokens,
        tokens=_decode_tokens(message.tokens) if message.HasField("tokens") else None,
        token_embeddings=tensor("token_embeddings"),
        hidden_states=tensor("hidden_states"),
        attention=tensor("attention"),
        attention_keys=tensor("attention_keys"),
        query_axis=decode_axis(message.query_axis) if message.HasField("query_axis") else None,
        key_axis=decode_axis(message.key_axis) if message.HasField("key_axis") else None,
        query_vectors=tensor("query_vectors"),
        key_vectors=tensor("key_vectors"),
    )


def decode_axis(message: pb.Axis) -> Axis:
    """Read an Axis."""
    if len(message.starts) != len(message.ends):
        raise broken(f"an axis has {len(message.starts):,} starts and {len(message.ends):,} ends")
    return list(zip(message.starts, message.ends, strict=True))


def _decode_tokens(message: pb.Tokens) -> Tokens:
    if len(lengths := {len(getattr(message, field.name)) for field in pb.Tokens.DESCRIPTOR.fields}) > 1:
        raise broken(f"what is told of one input's tokens tells of {min(lengths):,} to {max(lengths):,} of them")
    return Tokens(
        ids=list(message.ids),
        texts=list(message.texts),
        char_spans=list(zip(message.char_starts, message.char_ends, strict=True)),
        byte_spans=list(zip(message.byte_starts, message.byte_ends, strict=True)),
        words=list(message.words),
        sequences=list(message.sequences),
        special=list(message.special),
    )
