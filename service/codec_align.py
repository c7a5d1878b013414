"""Codec of Align: its messages to dataclasses and numpy, and back.

May import: pb, codec, codec_enums, codec_outputs, attention, request, values, errors.
"""

from service import codec
from service.attention import Attention
from service.codec_enums import DATA_TYPES, TRUNCATIONS, lookup, number
from service.codec_outputs import decode_attention, encode_attention
from service.errors import InvalidRequest
from service.pb import encoder_pb2 as pb
from service.request import AlignRequest, AlignResult, PairResult
from service.values import shown, text

# ---------------------------------------------------------------- requests


def decode_align_request(message: pb.AlignRequest) -> AlignRequest:
    """Read an AlignRequest.

    Raises:
        InvalidRequest: An enum value that does not exist, or a source or target without content.
    """
    return AlignRequest(
        pairs=tuple(
            (
                codec.decode_input(f"the source of pair {place}", pair.source),
                codec.decode_input(f"the target of pair {place}", pair.target),
            )
            for place, pair in enumerate(message.pairs)
        ),
        model=message.model,
        truncation=lookup("truncation", TRUNCATIONS, message.truncation),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
        attention=decode_attention(message.attention),
        data_type=lookup("data_type", DATA_TYPES, message.data_type),
    )


def encode_align_request(request: AlignRequest) -> pb.AlignRequest:
    """Write an AlignRequest.

    Raises:
        InvalidRequest: A name, a number or a text that the wire cannot carry.
    """
    if not isinstance(request.attention, Attention):
        raise InvalidRequest(f"attention must be Attention(...), got {shown(request.attention)}")
    return pb.AlignRequest(
        model=text("model", request.model),
        pairs=[
            pb.SourceTarget(
                source=codec.encode_input(f"the source of pair {place}", source),
                target=codec.encode_input(f"the target of pair {place}", target),
            )
            for place, (source, target) in enumerate(request.pairs)
        ],
        truncation=number("truncation", TRUNCATIONS, request.truncation),
        prompt_name=None if request.prompt_name is None else text("prompt_name", request.prompt_name),
        attention=encode_attention(request.attention),
        data_type=number("data_type", DATA_TYPES, request.data_type),
    )


# ---------------------------------------------------------------- answers


def encode_align_result(result: AlignResult) -> pb.AlignResponse:
    """Write an AlignResponse."""
    return pb.AlignResponse(
        results=[
            pb.AlignResult(
                source=codec.encode_input_result(item.source, place, codec.inline),
                target=codec.encode_input_result(item.target, place, codec.inline),
                attention=codec.inline(place, "attention", item.attention),
                attention_keys=codec.inline(place, "attention_keys", item.attention_keys),
                query_axis=codec.encode_axis(item.query_axis),
                key_axis=codec.encode_axis(item.key_axis),
            )
            for place, item in enumerate(result.results)
        ],
        timings=codec.encode_timings(result.timings),
        model=result.model,
        model_digest=result.model_digest,
    )


def decode_align_response(message: pb.AlignResponse, pairs: int) -> AlignResult:
    """Read the answer to so many pairs.

    Raises:
        InternalFault: It is not what the contract has in this place.
    """
    result = AlignResult(
        [_decode_pair(item, place) for place, item in enumerate(message.results)],
        codec.decode_timings(message.timings),
        message.model,
        message.model_digest,
    )
    codec.check_answered(result, pairs)
    return result


def _decode_pair(message: pb.AlignResult, place: int) -> PairResult:
    return PairResult(
        source=codec.decode_input_result(message.source, place, codec.from_message),
        target=codec.decode_input_result(message.target, place, codec.from_message),
        attention=codec.decode_tensor(message.attention) if message.HasField("attention") else None,
        attention_keys=codec.decode_tensor(message.attention_keys) if message.HasField("attention_keys") else None,
        query_axis=codec.decode_axis(message.query_axis) if message.HasField("query_axis") else None,
        key_axis=codec.decode_axis(message.key_axis) if message.HasField("key_axis") else None,
    )
