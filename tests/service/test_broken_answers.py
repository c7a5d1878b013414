"""Answers that break the contract: the client says so, and what of it, in an error of its own."""

import math
from typing import Any

import grpc
import pytest
from fuzz.targets import Status

from attencode import InternalFault, InvalidRequest, QueueFull, Unavailable
from service import codec
from service.answers import encoded, tokenized
from service.chunks import Joiner
from service.pb import encoder_pb2 as pb
from service.request import EncodeRequest, EncodeResult, TextInput
from service.resumption import Resumption
from service.statuses import Callee, RemoteError

FLOAT = pb.DATA_TYPE_FLOAT32
CALLEE = Callee("127.0.0.1:1", 1.0)


@pytest.mark.parametrize(
    "tensor",
    [
        pb.Tensor(shape=[2], data_type=9, data=bytes(8)),
        pb.Tensor(shape=[3], data_type=FLOAT, data=bytes(8)),
        pb.Tensor(shape=[2], data_type=FLOAT, data=bytes(7)),
        pb.Tensor(shape=[2**64 - 1], data_type=FLOAT, data=bytes(8)),
        pb.Tensor(shape=[2**63, 0], data_type=FLOAT),
        pb.Tensor(shape=[1] * 100, data_type=FLOAT, data=bytes(4)),
        pb.Tensor(),
    ],
)
def test_a_tensor_that_is_none(tensor: pb.Tensor) -> None:
    """Data that are not what shape and type say are refused."""
    with pytest.raises(InternalFault, match="broke the contract: a tensor does not have the shape or type"):
        codec.decode_encode_response(pb.EncodeResponse(pooled=tensor))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (pb.InputResult(tokens=pb.Tokens(ids=[1, 2], texts=["a"])), "tells of 0 to 2 of them"),
        (pb.InputResult(query_axis=pb.Axis(starts=[1], ends=[])), "an axis has 1 starts and 0 ends"),
        (pb.InputResult(key_axis=pb.Axis(starts=[], ends=[1, 2])), "an axis has 0 starts and 2 ends"),
    ],
)
def test_lists_of_unequal_length(result: pb.InputResult, message: str) -> None:
    """So are lists of which one entry each belongs together, and are not as many."""
    with pytest.raises(InternalFault, match=message):
        codec.decode_tokenize_response(pb.TokenizeResponse(results=[result]))


def test_results_of_other_inputs() -> None:
    """An answer has one result an input, by a call or on a stream."""
    request = EncodeRequest((TextInput("a"), TextInput("b")))
    for read, kind in ((encoded, pb.EncodeResponse), (tokenized, pb.TokenizeResponse)):
        with pytest.raises(InternalFault, match="2 inputs have 1 results"):
            read(request, kind(results=[pb.InputResult()]))  # type: ignore[operator]
    items = Resumption([request])
    next(items.messages())
    with pytest.raises(InternalFault, match="2 inputs have 0 results"):
        items.answer(EncodeResult(None, []))


def test_an_answer_before_its_question() -> None:
    """What was not sent yet cannot be answered."""
    items = Resumption([EncodeRequest((TextInput("a"),))])
    with pytest.raises(InternalFault, match="item 0 was answered before it was sent"):
        items.answer(InvalidRequest("no"))


def test_a_message_of_nothing() -> None:
    """A message of a stream that is neither answer nor error nor chunk is refused."""
    with pytest.raises(InternalFault, match="item 7 has neither an answer nor an error nor a chunk"):
        Joiner().add(pb.EncodeStreamResponse(id=7))


@pytest.mark.parametrize("shape", [[2**60], [1] * 99 + [2**40]])
def test_more_than_can_be_held(shape: list[int]) -> None:
    """A tensor in chunks for which there is no memory here is told so."""
    size = 4 * math.prod(shape)
    head = pb.EncodeResponse(pooled=pb.Tensor(shape=shape, data_type=FLOAT, chunked_bytes=size))
    with pytest.raises(InternalFault, match=r"pooled of input 0 has [\d,]+ bytes, which cannot be held here"):
        Joiner().add(pb.EncodeStreamResponse(id=1, response=head))


@pytest.mark.parametrize("delay", ["nan", "inf", "-1", "abc", "", "1e999", b"\xff"])
def test_a_delay_that_is_none(delay: Any) -> None:
    """Nobody is told to try again after no time that there is."""
    ended = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("attencode-retry-delay-seconds", delay)])
    assert isinstance(CALLEE.error(ended), RemoteError)


def test_a_delay() -> None:
    """A delay that is one is kept."""
    ended = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("attencode-retry-delay-seconds", "0.25")])
    error = CALLEE.error(ended)
    assert isinstance(error, QueueFull)
    assert error.retry_delay_s == 0.25


@pytest.mark.parametrize(
    ("sent", "kept"), [("queue_full", "queue_full"), ("Full <b>", ""), ("a" * 99, ""), (b"\xff", "")]
)
def test_a_reason(sent: Any, kept: str) -> None:
    """A refusal's reason is one word; what is none is left out."""
    delay = ("attencode-retry-delay-seconds", "1")
    ended = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [delay, ("attencode-refused-reason", sent)])
    error = CALLEE.error(ended)
    assert isinstance(error, QueueFull)
    assert error.reason == kept


def test_a_size_beyond_reason() -> None:
    """Words like gRPC's own, with a number of thousands of digits, are repeated, not read."""
    words = f"Received message larger than max ({'9' * 6000} vs. 4)"
    assert words in str(CALLEE.error(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, words, ())))


def test_a_call_that_nobody_saw() -> None:
    """CANCELLED of a call that its caller did not cancel is a server that is too busy."""
    error = CALLEE.error(Status(grpc.StatusCode.CANCELLED, "CANCELLED", ()))
    assert isinstance(error, Unavailable)
    assert "so much to do" in str(error)


def test_a_status_that_the_client_lost() -> None:
    """Of a stream that the server ended while it was written to gRPC may not know why; it may be asked again."""
    error = CALLEE.error(Status(grpc.StatusCode.INTERNAL, "Internal error from Core", ()))
    assert isinstance(error, Unavailable)
    assert "ask again" in str(error)
