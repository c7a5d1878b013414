"""Chunks: large tensors of a stream's answers in parts, cut on the server and joined on the client.

Neither side ever holds a large tensor twice: the server makes each chunk when it is sent and lets go of a tensor
after its last one; the client writes each into the array that it hands out.
May import: pb, codec, codec_enums, request, errors, numpy.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import codec
from service.codec_enums import DTYPES
from service.errors import InternalFault
from service.pb import encoder_pb2 as pb
from service.request import EncodeResult, InputResult

CHUNK_BYTES = 2**20

FIELDS: Mapping[str, pb.TensorField] = {
    "pooled": pb.TENSOR_FIELD_POOLED,
    "token_embeddings": pb.TENSOR_FIELD_TOKEN_EMBEDDINGS,
    "hidden_states": pb.TENSOR_FIELD_HIDDEN_STATES,
    "attention": pb.TENSOR_FIELD_ATTENTION,
    "attention_keys": pb.TENSOR_FIELD_ATTENTION_KEYS,
    "query_vectors": pb.TENSOR_FIELD_QUERY_VECTORS,
    "key_vectors": pb.TENSOR_FIELD_KEY_VECTORS,
}
"""Every tensor's name in a result, in the order of the chunks."""

_CHUNK_FIELD = pb.EncodeStreamResponse.CHUNK_FIELD_NUMBER
_DATA_FIELD = pb.TensorChunk.DATA_FIELD_NUMBER
_LENGTH_DELIMITED = 2  # https://protobuf.dev/programming-guides/encoding/#structure

# ---------------------------------------------------------------- on the server


@dataclass(slots=True)
class StreamAnswer:
    """One item's answer on its way: the message that goes first, and the tensors that follow in chunks.

    Attributes:
        number: The item's id on its stream.
        head: An EncodeStreamResponse.
        parts: Input number, name and array of each tensor that follows, in their order.
    """

    number: int
    head: bytes
    parts: deque[tuple[int, str, NDArray[Any]]] = field(default_factory=deque)

    def messages(self) -> Iterator[bytes]:
        """Make message after message; a tensor is let go of with its last chunk."""
        head, self.head = self.head, b""
        yield head
        del head
        while self.parts:
            place, name, array = self.parts.popleft()
            view = array.reshape(-1).view(np.uint8).data
            del array
            for offset in range(0, len(view), CHUNK_BYTES):
                chunk = pb.TensorChunk(result=place, field=FIELDS[name], offset=offset)
                yield _message(self.number, chunk, view[offset : offset + CHUNK_BYTES])
            del view


def cut(number: int, result: EncodeResult, most_bytes: int) -> StreamAnswer:
    """Part an answer into its first message and its large tensors.

    Args:
        number: The item's id on its stream.
        result: The answer; the caller lets go of it.
        most_bytes: Where the smaller tensors are more than this together, they follow in chunks as well.
    """
    most_inline = CHUNK_BYTES if _small_bytes(result, most_bytes) <= most_bytes else 0
    parts: deque[tuple[int, str, NDArray[Any]]] = deque()

    def write(place: int, name: str, array: NDArray[Any] | None) -> pb.Tensor | None:
        if array is None:
            return None
        if array.nbytes <= most_inline or not array.nbytes:
            return codec.encode_tensor(array)
        parts.append((place, name, _alone(codec.wire_order(array))))
        return pb.Tensor(shape=array.shape, data_type=codec.data_type_of(array), chunked_bytes=array.nbytes)

    head = pb.EncodeStreamResponse(id=number, response=codec.encode_encode_result(result, write))
    return StreamAnswer(number, head.SerializeToString(), parts)


def _small_bytes(result: EncodeResult, most_bytes: int) -> int:
    """Count the bytes of an answer's smaller tensors; 0 where there are too few to be more than `most_bytes`."""
    items: list[EncodeResult | InputResult] = [result, *result.results]
    if len(items) * len(FIELDS) * CHUNK_BYTES <= most_bytes:
        return 0
    arrays = (getattr(item, name, None) for item in items for name in FIELDS)
    return sum(array.nbytes for array in arrays if array is not None and array.nbytes <= CHUNK_BYTES)


def _alone(array: NDArray[Any]) -> NDArray[Any]:
    """Copy an array that would keep a much larger one alive, such as its whole batch's, for as long as it is unsent."""
    return array.copy() if getattr(array.base, "nbytes", 0) > 2 * array.nbytes else array


def _message(number: int, chunk: pb.TensorChunk, data: memoryview) -> bytes:
    """Write an EncodeStreamResponse with a chunk and its data, which are copied once; protobuf would thrice."""
    inner = chunk.SerializeToString() + _delimited(_DATA_FIELD, len(data))
    outer = pb.EncodeStreamResponse(id=number).SerializeToString() + _delimited(_CHUNK_FIELD, len(inner) + len(data))
    return b"".join((outer, inner, data))


def _delimited(number: int, length: int) -> bytes:
    """Write what precedes a field's bytes: its number and kind, and their length, as varints."""
    written = bytearray()
    for value in (number << 3 | _LENGTH_DELIMITED, length):
        rest = value
        while rest > 0x7F:
            written.append(rest & 0x7F | 0x80)
            rest >>= 7
        written.append(rest)
    return bytes(written)


# ---------------------------------------------------------------- on the client


@dataclass(slots=True)
class _Filling:
    """A tensor whose chunks come."""

    place: int
    name: str
    array: NDArray[Any]
    room: memoryview
    filled: int = 0


class Joiner:
    """Joins the messages of one stream into answers; each tensor's array is made once and filled."""

    def __init__(self) -> None:
        """Start between two answers."""
        self._head: pb.EncodeStreamResponse | None = None
        self._due: deque[_Filling] = deque()
        self._joined: dict[tuple[int, str], NDArray[Any]] = {}

    def add(self, message: pb.EncodeStreamResponse) -> EncodeResult | None:
        """Take the stream's next message, if it is no error; gives the answer that it completes.

        Raises:
            InternalFault: It is not what the contract has in this place.
        """
        outcome = message.WhichOneof("outcome")
        if outcome == "chunk":
            self._fill(message)
        elif outcome is None:
            raise codec.broken(f"a message of item {message.id} has neither an answer nor an error nor a chunk")
        else:
            self.check_complete(f"an answer to item {message.id} came")
            self._begin(message)
        if self._due:
            return None
        assert self._head is not None
        head, self._head = self._head, None
        joined, self._joined = self._joined, {}
        return codec.decode_encode_response(
            head.response, lambda place, name, tensor: _read(joined.get((place, name)), tensor)
        )

    def check_complete(self, what: str) -> None:
        """Do nothing between two answers.

        Raises:
            InternalFault: Chunks are due.
        """
        if self._head is not None:
            due = self._due[0]
            where = f"{due.name} of input {due.place} of item {self._head.id}"
            raise codec.broken(
                f"{what} where chunks of {where} were due, {due.filled:,} of {due.array.nbytes:,} bytes in"
            )

    def _begin(self, message: pb.EncodeStreamResponse) -> None:
        self._head = message
        if message.response.pooled.chunked_bytes:
            self._expect(0, "pooled", message.response.pooled)
        for place, item in enumerate(message.response.results):
            for name in FIELDS:
                if name != "pooled" and item.HasField(name) and getattr(item, name).chunked_bytes:
                    self._expect(place, name, getattr(item, name))

    def _expect(self, place: int, name: str, tensor: pb.Tensor) -> None:
        dtype = DTYPES.get(tensor.data_type)
        if dtype is None or prod(tensor.shape) * dtype.itemsize != tensor.chunked_bytes or tensor.data:
            raise codec.broken(
                f"{name} of input {place} has {tensor.chunked_bytes:,} bytes in chunks, its shape says others"
            )
        try:
            array = np.empty(tuple(tensor.shape), dtype)
        except (MemoryError, ValueError, OverflowError) as error:
            raise InternalFault(
                f"{name} of input {place} has {tensor.chunked_bytes:,} bytes, which cannot be held here; ask for less"
            ) from error
        room = array.reshape(-1).view(np.uint8).data
        self._due.append(_Filling(place, name, array, room))

    def _fill(self, message: pb.EncodeStreamResponse) -> None:
        chunk, data = message.chunk, message.chunk.data
        if self._head is None or not self._due:
            raise codec.broken(f"a chunk of item {message.id} came where none was due")
        due = self._due[0]
        expected = (self._head.id, due.place, FIELDS[due.name], due.filled)
        if (message.id, chunk.result, chunk.field, chunk.offset) != expected:
            self.check_complete(
                f"a chunk of item {message.id}, input {chunk.result}, field {chunk.field}, offset {chunk.offset:,} came"
            )
        end = due.filled + len(data)
        if not data or end > due.array.nbytes:
            self.check_complete(f"a chunk of {len(data):,} bytes came")
        due.room[due.filled : end] = data
        due.filled = end
        if end == due.array.nbytes:
            due.array.flags.writeable = False
            self._joined[due.place, due.name] = due.array
            self._due.popleft()


def _read(joined: NDArray[Any] | None, tensor: pb.Tensor) -> NDArray[Any]:
    return codec.decode_tensor(tensor) if joined is None else joined
