"""Answers that nobody reads yet: they wait for one another, are bounded, and end with their deadline or without."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import attencode
from attencode import Client
from service.pb import encoder_pb2 as pb
from tests.service.streams import LONG, LONGER, UNHURRIED, item, metric, open_stream, private_bytes


@pytest.fixture(scope="module")
def narrow(serve_for_module: Callable[..., str], minilm_artifact: Path) -> str:
    """Give a server that has room for one large answer and a half."""
    return serve_for_module(minilm_artifact, max_message_bytes=2**22, max_answer_bytes=28_000_000)


def test_large_answers_wait_for_each_other(narrow: str) -> None:
    """While an unread answer fills the server's room, another stream's waits, small ones do not."""
    with Client(narrow, options=UNHURRIED) as slow, Client(narrow) as other:
        unread = open_stream(slow, item(0, LONGER))
        assert next(unread).WhichOneof("outcome") == "response"
        waiting = open_stream(other, item(0, LONGER), timeout_s=2.0)
        with pytest.raises(grpc.RpcError) as caught:
            next(waiting)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        assert len(list(other.encode_stream([attencode.encode_request("small", attention=True)] * 20))) == 20
        waiting = open_stream(other, item(0, LONGER))
        assert sum(len(message.chunk.data) for message in unread) > 18_000_000
        assert sum(len(message.chunk.data) for message in waiting) > 18_000_000


def test_left_streams_give_their_room_back(narrow: str) -> None:
    """A stream that is cancelled, or whose deadline passes, frees what it held, in part sent or not at all."""
    with Client(narrow, options=UNHURRIED) as slow, Client(narrow, timeout_s=20) as other:
        for number in range(4):
            unread = open_stream(slow, *(item(place, LONGER) for place in range(4)), timeout_s=60 if number % 2 else 2)
            next(unread)
            if number % 2:
                unread.cancel()
            else:
                time.sleep(2.5)
                with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                    list(unread)
            assert other.attend(LONGER).attention is not None


def test_a_slow_reader_of_one_large_answer(spawn: Callable[..., Any], minilm_artifact: Path) -> None:
    """It costs its answers' bytes, others go on, and its deadline ends it and frees them, without a word in the log."""
    server = spawn(minilm_artifact, "--provider", "cpu", "--max-message-bytes", str(2**23))
    inputs = [LONGER] * 4  # 75 MB
    with Client(server.address) as client, Client(server.address) as slow:
        list(client.encode_stream([attencode.encode_request(inputs, attention=True)] * 3))
        before = private_bytes(server.process.pid)
        request = attencode.encode_request(inputs, attention=True)
        answers = slow._streamed(iter([request] * 20), 4.0)
        next(answers)
        most = 0
        for _ in range(35):
            time.sleep(0.1)
            client.encode("hello")
            most = max(most, private_bytes(server.process.pid))
        assert most - before < 3 * 76_000_000
        with pytest.raises(attencode.DeadlineExceeded):
            list(answers)
        end_s = time.monotonic() + 10
        while private_bytes(server.process.pid) - before > 60_000_000 and time.monotonic() < end_s:
            time.sleep(0.1)
        assert private_bytes(server.process.pid) - before <= 60_000_000
    server.terminate()
    assert "Traceback" not in server.process.stderr.read()


def test_a_reader_that_stalls_is_ended(spawn: Callable[..., Any], minilm_artifact: Path) -> None:
    """It needs no deadline for that: its memory is given back, and a status says why once it reads on."""
    server = spawn(minilm_artifact, "--provider", "cpu", "--stalled-after-s", "1.5")
    large = item(0, LONGER)
    large.request.inputs.extend([pb.Input(text=LONGER)] * 3)  # 75 MB
    with Client(server.address, options=UNHURRIED) as slow, Client(server.address) as other:
        for _ in range(2):
            list(open_stream(other, large, large))
        before = private_bytes(server.process.pid)
        unread = open_stream(slow, large, large, timeout_s=None)
        next(unread)
        end_s = time.monotonic() + 20
        while not metric(server, "attencode_stalled_streams_total") and time.monotonic() < end_s:
            assert other.encode("hello").pooled is not None
            time.sleep(0.1)
        assert metric(server, "attencode_stalled_streams_total") == 1
        while private_bytes(server.process.pid) - before > 40_000_000 and time.monotonic() < end_s:
            time.sleep(0.1)
        assert private_bytes(server.process.pid) - before <= 40_000_000
        with pytest.raises(grpc.RpcError, match=r"RESOURCE_EXHAUSTED[^/]*nothing .* was read for 1.5 s"):
            list(unread)


def test_who_reads_now_and_then_is_not_ended(serve: Callable[..., str], minilm_artifact: Path) -> None:
    """A reader that takes a little within each time that is allowed keeps its stream."""
    with Client(serve(minilm_artifact, stalled_after_s=1.0), options=UNHURRIED) as client:
        received = []
        for message in open_stream(client, item(0, LONG), item(1, LONG)):
            received.append(message.id)
            time.sleep(0.3)
        assert received == [0] * 6 + [1] * 6


def test_a_stream_that_stalled_goes_on(serve: Callable[..., str], minilm_artifact: Path) -> None:
    """A caller that was busy for too long between two answers still gets all, over a stream begun anew."""
    with Client(serve(minilm_artifact, stalled_after_s=0.5), options=UNHURRIED) as client:
        requests = [attencode.encode_request("a " * number, attention=True) for number in range(100, 108)]
        tokens = []
        for answer in client.encode_stream(requests):
            assert isinstance(answer, attencode.EncodeResult), answer
            tokens.append(answer.results[0].num_tokens)
            time.sleep(2.0 if len(tokens) in (1, 4) else 0.0)
        assert tokens == list(range(102, 110))


def test_large_unary_answers_are_bounded_together(spawn: Callable[..., Any], minilm_artifact: Path) -> None:
    """Many at once, unread, take no more memory than is allowed; small ones go on, all are answered once read."""
    budget = 400_000_000
    server = spawn(minilm_artifact, "--provider", "cpu", "--max-answer-bytes", str(budget))
    message = item(0, LONGER).request
    message.inputs.extend([pb.Input(text=LONGER)] * 2)  # 57 MB
    with Client(server.address, options=UNHURRIED) as slow, Client(server.address) as other:
        ask = slow._channel.unary_stream(  # so that it is not read before that is asked for
            "/attencode.v1.Encoder/Encode", request_serializer=pb.EncodeRequest.SerializeToString
        )
        other._stub.Encode(message)
        before = most = private_bytes(server.process.pid)
        calls = [ask(message, timeout=60) for _ in range(10)]
        for _ in range(50):
            time.sleep(0.1)
            assert other.encode("hello").pooled is not None
            most = max(most, private_bytes(server.process.pid))
        assert most - before < budget
        sizes = []
        readers = [threading.Thread(target=lambda call=call: sizes.extend(map(len, call))) for call in calls]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
            most = max(most, private_bytes(server.process.pid))
        assert len(sizes) == 10
        assert min(sizes) > 56_000_000
        assert most - before < budget
