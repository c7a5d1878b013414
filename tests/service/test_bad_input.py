"""Bad input: the documented status, a message that says what to change, and nobody else notices."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import attencode
from attencode import Client, InvalidRequest
from service.codec import encode_encode_request
from service.pb import encoder_pb2 as pb

ENCODE = "/attencode.v1.Encoder/Encode"


@contextmanager
def others(client: Client) -> Iterator[None]:
    """Keep another caller busy meanwhile, and check that all its answers are right."""
    expected = client.encode("abc").pooled
    faults: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            while not done.is_set():
                np.testing.assert_allclose(client.encode("abc").pooled, expected, atol=1e-5)
        except BaseException as error:  # noqa: BLE001 - told to the test below
            faults.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not faults


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([], {}, "no inputs; send at least one"),
        ([""], {}, "input 0 is empty"),
        (["ok", ""], {}, "input 1 is empty"),
        ([" \t\n"], {}, "input 0 has no token"),
        (["\x00\x01\x7f"], {}, "input 0 has no token"),
        (["abc"] * 65, {}, "65 inputs, more than this server's 64"),
        (["abc"], {"prompt_name": "nope"}, "prompt_name 'nope' is unknown; this model's prompts: none"),
        (["abc"], {"model": "nope"}, "model 'nope' is not served here; served: "),
        ([("a", "")], {}, "input 0: the second text is empty; send some text, or leave the input out"),
        (["ok", ("", "b")], {}, "input 1: the first text is empty"),
        ([("a", " ")], {}, "input 0: the second text has no token"),
        ([("\t", "b")], {}, "input 0: the first text has no token"),
        (["abc"], {"dimensions": 25}, "dimensions 25 must be from 1 to the model's 24"),
        (["abc"], {"attention": [2]}, "attention layer 2 does not exist; it must be from -2 to 1"),
        (["abc"], {"attention": [-3]}, "attention layer -3 does not exist"),
        (["abc"], {"query_key_vectors": [9]}, "query_key_vectors layer 9 does not exist; it must be from -2 to 1"),
        (["abc"], {"attention": True, "heads": [3]}, "head 3 does not exist; it must be from -3 to 2"),
        (["abc"], {"hidden_states": [3]}, "hidden state layer 3 does not exist; it must be from -3 to 2"),
        (["abc"], {"hidden_states": [0, -3]}, "name one twice"),
        (["abc"], {"hidden_states": [0] * 20_000}, "20,000 hidden state layer numbers are too many: there are 3; name"),
        (["abc"], {"attention": True, "heads": [1] * 4}, "4 head numbers are too many: there are 3; name each once"),
        (["a " * 50], {"truncation": "off"}, "sequence of 52 tokens exceeds the model's 40; set truncation"),
        (["abc"], {"attention": True, "queries": [1] * 65_537}, "name 65,537 tokens and spans, and may name 65,536"),
        (["abc"], {"attention": True, "keys": [(0, 1)] * 70_000}, "name 70,000 tokens and spans"),
        (["abc"] * 64, {"attention": True, "keys": [1] * 1025}, r"name 1,025 tokens and spans of each of 64 inputs"),
        ([[2, 9999, 3]], {}, "token id 9999 is outside the vocabulary of 41"),
        (
            [[2, *[3] * 60, 5, 3]],
            {},
            "62 of its 63 tokens are special ones, which are never cut, and the model's 40",
        ),
        ([[2, 5, *[3] * 38, 6, 3]], {"truncation": "left"}, "40 of its 42 tokens are special ones"),
        ([[5, 6]], {}, r"must begin with 2 \(\[CLS\]\) and end with 3 \(\[SEP\]\)"),
    ],
)
def test_refused_by_the_server(tiny: Client, inputs: Any, options: dict[str, Any], message: str) -> None:
    """What the caller can mend is INVALID_ARGUMENT and says how."""
    with others(tiny), pytest.raises(InvalidRequest, match=message):
        tiny.encode(inputs, **options)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["abc"], {"pooling": "median"}, "pooling 'median' is unknown; known: cls, last, max, mean, sentence"),
        (["abc"], {"truncation": "middle"}, "truncation 'middle' is unknown"),
        (["abc"], {"data_type": "int8"}, "data_type 'int8' is unknown"),
        (["abc"], {"attention": "all"}, "attention must be True, a number or a list of numbers"),
        (["a\ud800b"], {}, "input 0 cannot be written as UTF-8"),
        ([3.5], {}, "input 0 must be a text"),
        ([None], {}, "input 0 must be a text"),
        ([[2, -1, 3]], {}, "input 0: each of its token ids must be a whole number from 0 to 4294967295, got -1"),
        ([[2.0, 5.5, 3.0]], {}, "input 0 must be a text"),
        (b"abc", {}, "inputs must be a text or a list of inputs, got bytes"),
        ([b"abc"], {}, "input 0 must be a text, a pair of texts .a tuple., or token ids, got bytes"),
        (None, {}, "inputs must be a text or a list of inputs, got NoneType"),
        (["abc"], {"normalize": "no"}, "normalize must be True or False"),
        (["abc"], {"prompt_name": 3}, "prompt_name must be text, got 3"),
        (["abc"], {"heads": [1]}, "heads goes with attention"),
        (["abc"], {"pooled": False}, "no output is asked for"),
        (["abc"], {"pooled": False, "normalize": True}, "go with pooled vectors"),
        (["abc"], {"attention": [1.7]}, "attention must be True, a number or a list of numbers"),
    ],
)
def test_refused_by_the_client(tiny: Client, inputs: Any, options: dict[str, Any], message: str) -> None:
    """What the wire cannot carry is the same kind of error, raised before anything is sent."""
    with pytest.raises(InvalidRequest, match=message):
        tiny.encode(inputs, **options)


def test_an_answer_too_large_says_what_fits(tiny: Client) -> None:
    """An answer above the message limit is refused before it is computed, with options that fit."""
    texts = ["a " * 38] * 40
    message = encode_encode_request(attencode.encode_request(texts, attention=True))
    limit = r"1,536,000 bytes of tensors, more than .* 1,048,576"
    with others(tiny), pytest.raises(grpc.RpcError, match=limit) as caught:
        tiny._stub.Encode(message)  # the client itself would go on to a stream
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert tiny.encode(texts, attention=True, data_type="float16").results[0].attention is not None
    assert tiny.encode(texts, attention=[0]).results[0].attention is not None


def test_too_many_inputs_are_not_read(tiny: Client) -> None:
    """Their number alone is looked at: what is wrong with one of them is not."""
    many = [pb.Input(text="a")] * 64 + [pb.Input()]
    for call, kind in ((tiny._stub.Encode, pb.EncodeRequest), (tiny._stub.Tokenize, pb.TokenizeRequest)):
        with pytest.raises(grpc.RpcError, match="65 inputs, more than this server's 64"):
            call(kind(inputs=many))


def test_long_words_of_the_caller_keep_the_status(tiny: Client) -> None:
    """An error that repeats what the caller sent is cut, and is still INVALID_ARGUMENT."""
    for options in ({"prompt_name": "p" * 50_000}, {"model": "注" * 50_000}):
        with others(tiny), pytest.raises(InvalidRequest, match=r"\.\.\. \(\d+ characters\)"):
            tiny.encode("x", **options)
    (answer,) = tiny.encode_stream([attencode.encode_request("x", model="x" * 100_000)])
    assert isinstance(answer, InvalidRequest)
    assert len(str(answer)) < 600


def test_descriptions_count_as_well(serve: Callable[..., str], tiny_artifact: Path) -> None:
    """An answer whose tokens alone exceed the limit is refused, on a stream without ending it."""
    with Client(serve(tiny_artifact, max_message_bytes=20_000)) as client:
        large, small = ["a b c d e f g h"] * 300, "a"
        with pytest.raises(InvalidRequest, match=r"would hold [\d,]+ bytes, more than this server's 20,000"):
            client.tokenize(large)
        requests = [attencode.encode_request(inputs, tokens=True) for inputs in (small, large, small)]
        answers = list(client.encode_stream(requests))
        assert [type(answer).__name__ for answer in answers] == ["EncodeResult", "InvalidRequest", "EncodeResult"]


def test_a_reader_that_stops_costs_bounded_memory(spawn: Callable[..., Any], minilm_artifact: Path) -> None:
    """Unread answers of a stream hold its further requests back; other callers go on."""
    server = spawn(minilm_artifact, "--provider", "cpu", "--max-message-bytes", str(2**25))
    text = "hello world " * 130  # 19 MB of attention an answer
    with Client(server.address) as client:
        client.encode(text, attention=True)
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        answers = client.encode_stream(attencode.encode_request(text, attention=True) for _ in range(64))
        next(answers)
        most = 0
        for _ in range(30):
            time.sleep(0.1)
            client.encode("hello")
            most = max(most, process.memory_info().rss)
        assert most - before < 10 * 2**25
        assert sum(1 for _ in answers) == 63, "once it reads again, it gets the rest"


def test_a_megabyte_of_text(tiny: Client) -> None:
    """A text of 1 MB is cut to the model's length, and refused with truncation off."""
    text = "a bc " * 200_000
    with others(tiny):
        (item,) = tiny.encode(text).results
        assert (item.truncated, item.num_tokens) == (True, 40)
        with pytest.raises(InvalidRequest, match="sequence of 600002 tokens"):
            tiny.encode(text, truncation="off")


def test_a_request_above_the_size_limit(tiny: Client) -> None:
    """A request above the server's size limit says both sizes and what to change, and the server goes on."""
    told = (
        r"the request has 5,000,012 bytes, more than this server's 4,194,304; send fewer or shorter inputs in one "
        r"request, or start the server with a larger --max-request-bytes"
    )
    assert tiny.get_model().max_request_bytes == 4_194_304
    with others(tiny):
        with pytest.raises(InvalidRequest, match=told):
            tiny.encode("a" * 5_000_000)
        with pytest.raises(InvalidRequest, match=r"^the request has 5,000,0\d\d bytes"):
            tiny.attend("a" * 5_000_000)
        requests = [attencode.encode_request(text) for text in ("a", "a" * 5_000_000, "b")]
        with pytest.raises(InvalidRequest, match=r"^item 1 of the stream: the request has 5,000,0\d\d bytes"):
            list(tiny.encode_stream(requests))


def test_control_characters_are_dropped(tiny: Client) -> None:
    """NUL and control characters inside a text change nothing but the spans."""
    np.testing.assert_allclose(tiny.encode("a\x00b\x01c").pooled, tiny.encode("abc").pooled, atol=1e-6)


def raw(tiny: Client, data: bytes) -> Any:
    return tiny._channel.unary_unary(ENCODE)(data, timeout=10)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff", "not a attencode.v1.EncodeRequest"),
        (pb.EncodeRequest(inputs=[pb.Input(text="abc")]).SerializeToString().replace(b"abc", b"a\xff\xff"), "UTF-8"),
        (pb.EncodeRequest(inputs=[pb.Input()]).SerializeToString(), "input 0 has no content"),
        (pb.EncodeRequest(inputs=[pb.Input(text="a")], truncation=9).SerializeToString(), "truncation 9 is unknown"),
        (pb.EncodeRequest(inputs=[pb.Input(text="a")], data_type=7).SerializeToString(), "data_type 7 is unknown"),
        (
            pb.EncodeRequest(inputs=[pb.Input(text="a")], pooled=pb.PooledOptions(pooling=8)).SerializeToString(),
            "pooling 8 is unknown; known: 1 .cls., 2 .mean., 3 .max., 4 .last., 5 .sentence.",
        ),
    ],
)
def test_raw_nonsense(tiny: Client, data: bytes, message: str) -> None:
    """Bytes that are no message, and enum values that do not exist, are the caller's error."""
    with others(tiny), pytest.raises(grpc.RpcError, match=message) as caught:
        raw(tiny, data)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_nonsense_on_a_stream(tiny: Client) -> None:
    """Bytes that are no message are that item's answer; the stream goes on."""
    good = pb.EncodeStreamRequest(id=5, request=pb.EncodeRequest(inputs=[pb.Input(text="abc")])).SerializeToString()
    call = tiny._channel.stream_stream("/attencode.v1.Encoder/EncodeStream")
    answers = [pb.EncodeStreamResponse.FromString(data) for data in call(iter([b"\xff\xff", good]), timeout=10)]
    assert [answer.WhichOneof("outcome") for answer in answers] == ["error", "response"]
    assert answers[0].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert answers[1].id == 5


def test_a_deadline_that_cannot_be_met(minilm_address: str) -> None:
    """A caller's deadline is DEADLINE_EXCEEDED, and the server goes on."""
    told = f"no answer came from '{minilm_address}' within the deadline of 0.05 s; give the client a longer timeout_s, "
    with Client(minilm_address, timeout_s=0.05) as hasty:
        with pytest.raises(attencode.DeadlineExceeded, match=told):
            hasty.encode(["word " * 300] * 64)
        with pytest.raises(attencode.DeadlineExceeded, match=told):
            hasty.attend("word " * 300, query_key_vectors=True)
    with Client(minilm_address) as client:
        assert client.encode("abc").pooled is not None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no server answers at '127.0.0.1:1'; start one there, or give another address"),
        ("nonsense::", r"no server answers: the address 'nonsense::' names no host; give HOST:PORT, for instance"),
        (":::", "the address ':::' names no host"),
        ("", "the server's address must be host and port, for instance 127.0.0.1:50051, got ''"),
        (50051, "the server's address must be host and port, for instance 127.0.0.1:50051, got 50051"),
    ],
)
def test_nobody_listens(address: Any, message: str) -> None:
    """A server that is not there is named by its address, as is an address that is none; on a stream too, at once."""
    with pytest.raises(attencode.AttencodeError, match=message), Client(address, timeout_s=5) as client:
        client.encode("abc")
    started = time.monotonic()
    with pytest.raises(attencode.AttencodeError, match=message), Client(address, timeout_s=5) as client:
        client.attend("abc")
    assert time.monotonic() - started < 4


@pytest.mark.parametrize("timeout_s", [0, -1, "3", float("nan"), 1e10, float("inf")])
def test_a_deadline_that_is_none(timeout_s: Any) -> None:
    """A deadline must be seconds above 0."""
    with pytest.raises(
        InvalidRequest, match="timeout_s must be seconds above 0 and up to 1e\\+08, or None to wait for ever, got"
    ):
        Client("127.0.0.1:1", timeout_s=timeout_s)


@pytest.mark.parametrize("options", [5, "grpc.x", [1], [("grpc.x",)], [(1, 2)]])
def test_options_that_are_none(options: Any) -> None:
    """Channel options must be pairs of a name and a value."""
    with pytest.raises(InvalidRequest, match="options must be a list of gRPC's channel options"):
        Client("127.0.0.1:1", options=options)
