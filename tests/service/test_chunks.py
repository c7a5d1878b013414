"""Chunks: what the server cuts the client joins, and nothing else is taken for an answer."""

from typing import Any

import numpy as np
import pytest

from service import codec
from service.chunks import CHUNK_BYTES, FIELDS, Joiner, StreamAnswer, cut
from service.errors import InternalFault
from service.pb import encoder_pb2 as pb
from service.request import EncodeResult, InputResult

LIMIT = 64 * 2**20


def numbers(count: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1000, count).astype(dtype)


def result(*attentions: np.ndarray, pooled: np.ndarray | None = None, **others: np.ndarray) -> EncodeResult:
    items = [InputResult(3, 3, attention=array, **others) for array in attentions]
    return EncodeResult(pooled, items, model="m", model_digest="d")


def messages(answer: StreamAnswer) -> list[pb.EncodeStreamResponse]:
    return [pb.EncodeStreamResponse.FromString(data) for data in answer.messages()]


def joined(sent: list[pb.EncodeStreamResponse]) -> EncodeResult:
    joiner = Joiner()
    answers = [joiner.add(message) for message in sent]
    assert all(answer is None for answer in answers[:-1])
    assert answers[-1] is not None
    return answers[-1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("beyond", [-1, 0, 1, CHUNK_BYTES // 4, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_sizes_around_a_chunk(dtype: Any, beyond: int) -> None:
    """Up to 1 MiB a tensor is in the response, above it in chunks of 1 MiB, the last one shorter."""
    array = numbers(CHUNK_BYTES // np.dtype(dtype).itemsize + beyond, dtype)
    sent = messages(cut(7, result(array), LIMIT))
    assert len(sent) == 1 + (-(-array.nbytes // CHUNK_BYTES) if beyond > 0 else 0)
    assert {message.id for message in sent} == {7}
    assert [len(message.chunk.data) for message in sent[1:-1]] == [CHUNK_BYTES] * len(sent[1:-1])
    assert sent[0].response.results[0].attention.chunked_bytes == (array.nbytes if beyond > 0 else 0)
    got = joined(sent).results[0].attention
    assert got is not None
    assert got.dtype == dtype
    assert not got.flags.writeable
    np.testing.assert_array_equal(got, array)


def test_the_order_of_tensors() -> None:
    """Pooled vectors first, then input after input, and in each the tensors in the order of their numbers."""
    large = numbers(CHUNK_BYTES // 2).reshape(2, -1)
    others = {name: large + number for name, number in FIELDS.items() if name not in ("pooled", "attention")}
    whole = result(large, large + 9, pooled=large + 1, **others)
    sent = messages(cut(0, whole, LIMIT))
    places = [(message.chunk.result, message.chunk.field, message.chunk.offset) for message in sent[1:]]
    assert places == sorted(places)
    assert {field for _, field, _ in places} == set(FIELDS.values())
    again = joined(sent)
    np.testing.assert_array_equal(again.pooled, whole.pooled)
    for got, expected in zip(again.results, whole.results, strict=True):
        for name in others:
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


def test_many_small_tensors_do_not_make_a_large_message() -> None:
    """Where the small tensors exceed the limit on messages together, each follows in a chunk of its own."""
    whole = result(*(numbers(1000) + place for place in range(20)), pooled=numbers(0).reshape(0, 4))
    assert len(messages(cut(0, whole, 20 * 4000))) == 1
    sent = messages(cut(0, whole, 20 * 4000 - 1))
    assert len(sent) == 21
    for got, expected in zip(joined(sent).results, whole.results, strict=True):
        np.testing.assert_array_equal(got.attention, expected.attention)


def test_chunks_are_not_copied_until_they_are_sent() -> None:
    """A contiguous tensor is kept as it is, another laid out once, and one that pins a larger array leaves it."""
    array = numbers(CHUNK_BYTES)
    assert np.shares_memory(cut(0, result(array), LIMIT).parts[0][2], array)
    turned = array.reshape(-1, 4).T
    np.testing.assert_array_equal(joined(messages(cut(0, result(turned), LIMIT))).results[0].attention, turned)
    batch = numbers(8 * CHUNK_BYTES).reshape(8, -1)
    answer = cut(0, result(batch[3]), LIMIT)
    assert not np.shares_memory(answer.parts[0][2], batch)
    sent = answer.messages()
    next(sent)
    next(sent)
    assert not answer.parts, "what is being sent is held by nobody else"


def chunk(offset: int, data: bytes, number: int = 0, place: int = 0, name: str = "attention") -> Any:
    part = pb.TensorChunk(result=place, field=FIELDS[name], offset=offset, data=data)
    return pb.EncodeStreamResponse(id=number, chunk=part)


def head(*sizes: int, shape: tuple[int, ...] = (2, 2), data: bytes = b"", data_type: int = 1) -> Any:
    tensors = [
        pb.Tensor(shape=shape, data_type=data_type, chunked_bytes=size, data=data)  # type: ignore[arg-type]
        for size in sizes
    ]
    return pb.EncodeStreamResponse(
        response=pb.EncodeResponse(results=[pb.InputResult(attention=tensor) for tensor in tensors])
    )


MALFORMED: dict[str, tuple[list[Any], str]] = {
    "a chunk first": ([chunk(0, b"1234")], "where none was due"),
    "a chunk too many": ([head(16), chunk(0, b"x" * 16), chunk(16, b"x")], "where none was due"),
    "an answer between": ([head(16), chunk(0, b"x" * 8), head(0)], "8 of 16 bytes in"),
    "of another item": ([head(16), chunk(0, b"x" * 8, number=1)], "a chunk of item 1"),
    "of another input": ([head(16, 16), chunk(0, b"x" * 8, place=1)], "input 1, field 4"),
    "of another tensor": ([head(16), chunk(0, b"x" * 8, name="hidden_states")], "field 3"),
    "a gap": ([head(16), chunk(0, b"x" * 4), chunk(8, b"x" * 8)], "offset 8 came where"),
    "twice": ([head(16), chunk(0, b"x" * 4), chunk(0, b"x" * 4)], "offset 0 came where"),
    "too long": ([head(16), chunk(0, b"x" * 17)], "a chunk of 17 bytes"),
    "empty": ([head(16), chunk(0, b"")], "a chunk of 0 bytes"),
    "a wrong size": ([head(12)], "12 bytes in chunks, its shape says others"),
    "a huge shape": ([head(16, shape=(2**40, 2**40))], "its shape says others"),
    "an unknown type": ([head(16, data_type=9)], "its shape says others"),
    "data besides": ([head(16, data=b"x" * 16)], "its shape says others"),
    "a short tensor": ([head(0, data=b"x" * 12)], "does not have the shape"),
    "a tensor of no type": ([head(0, data=b"x" * 16, data_type=9)], "does not have the shape"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_sequences(kind: str) -> None:
    """What does not follow the contract is told as the server's fault, never taken for an answer."""
    sent, message = MALFORMED[kind]
    with pytest.raises(InternalFault, match=message):
        joined(sent)


def test_the_wire_is_protobufs_own() -> None:
    """Hand-made chunk messages are, byte for byte, what protobuf writes."""
    array = numbers(CHUNK_BYTES).reshape(2, -1)
    sent = list(cut(2**60, result(np.zeros(1, np.float32), array), LIMIT).messages())
    for data in sent:
        assert pb.EncodeStreamResponse.FromString(data).SerializeToString(deterministic=True) == data
    assert codec.encode_tensor(array).data == b"".join(
        pb.EncodeStreamResponse.FromString(data).chunk.data for data in sent
    )
