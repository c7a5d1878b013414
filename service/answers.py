"""Answers: what a server sent, as results for a user; held against what was asked.

May import: pb, aligned, attended, chunks, codec, codec_align, resumption, statuses, request, errors, grpc.
"""

import grpc

from service import codec
from service.aligned import Aligned
from service.attended import Attended
from service.chunks import Joiner
from service.codec_align import decode_align_response
from service.errors import AttencodeError
from service.pb import encoder_pb2 as pb
from service.request import AlignRequest, EncodeRequest, EncodeResult, Input, TextInput, TokenizeRequest, TokenizeResult
from service.resumption import Resumption
from service.statuses import Callee


def encoded(request: EncodeRequest, message: pb.EncodeResponse) -> EncodeResult:
    """Read the answer to Encode.

    Raises:
        InternalFault: It is not what the contract has in this place.
    """
    result = codec.decode_encode_response(message)
    codec.check_answered(result, len(request.inputs))
    return result


def tokenized(request: TokenizeRequest, message: pb.TokenizeResponse) -> TokenizeResult:
    """Read the answer to Tokenize.

    Raises:
        InternalFault: It is not what the contract has in this place.
    """
    result = codec.decode_tokenize_response(message)
    codec.check_answered(result, len(request.inputs))
    return result


def streamed(
    message: pb.EncodeStreamResponse, joiner: Joiner, items: Resumption, callee: Callee
) -> EncodeResult | AttencodeError | None:
    """Take a stream's next message; gives the answer that it is or completes.

    Raises:
        Unanswered: Another stream may have an answer.
        InternalFault: It is not what the contract has in this place.
    """
    if message.id != items.due:
        raise codec.broken(f"item {message.id} came where item {items.due} was due")
    if message.WhichOneof("outcome") != "error":
        answer = joiner.add(message)
        return None if answer is None else items.answer(answer)
    joiner.check_complete(f"an error of item {message.id} came")
    failure = message.error
    code = next((code for code in grpc.StatusCode if code.value[0] == failure.code), grpc.StatusCode.UNKNOWN)
    return items.answer(callee.typed(code, failure.message, failure.retry_delay_seconds))


def raised(answer: EncodeResult | AttencodeError) -> EncodeResult:
    """Give an answer.

    Raises:
        AttencodeError: It is one.
    """
    if isinstance(answer, AttencodeError):
        raise answer
    return answer


def attended(request: EncodeRequest, answer: EncodeResult | AttencodeError) -> Attended:
    """Give the one input's answer with its labels.

    Raises:
        AttencodeError: The answer is one.
    """
    result = raised(answer)
    (asked,) = request.inputs
    return Attended(result.results[0], request.outputs.attention, _texts(asked))


def aligned(request: AlignRequest, message: pb.AlignResponse) -> list[Aligned]:
    """Give each pair's answer with its labels.

    Raises:
        InternalFault: It is not what the contract has in this place.
    """
    results = decode_align_response(message, len(request.pairs)).results
    return [
        Aligned(result, request.attention, _texts(source), _texts(target))
        for result, (source, target) in zip(results, request.pairs, strict=True)
    ]


def _texts(asked: Input) -> list[str]:
    return [asked.text, asked.pair or ""] if isinstance(asked, TextInput) else []
