"""Resumption: the requests of a client's stream, kept until they are answered, so that a new stream can go on.

The same for either client: one hands requests out to gRPC's own thread, the other to its task.
May import: pb, codec, request, statuses, values, errors.
"""

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from service import codec
from service.errors import AttencodeError, InvalidRequest, QueueFull, Unavailable
from service.pb import encoder_pb2 as pb
from service.request import EncodeRequest, EncodeResult
from service.statuses import RequestTooLarge
from service.values import shown

_MAKE = "make requests with attencode.encode_request(...) and give encode_stream an iterable of them"
_MOST_IN_A_ROW = 6
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Unanswered(Exception):
    """Ask for a new stream: this one says UNAVAILABLE to an item."""

    def __init__(self, error: Unavailable) -> None:
        """Keep what was said."""
        super().__init__()
        self.error = error


class Resumption:
    """A stream's requests as numbered messages, and how often their stream may be begun anew.

    gRPC reads them where an exception would be lost, so the first one ends the stream and is kept. Encoding has no
    effect but its answer, so that whatever is unanswered may be asked again.
    """

    def __init__(self, requests: Iterable[EncodeRequest] | AsyncIterable[EncodeRequest]) -> None:
        """Store the requests; they are read as the server takes them."""
        self._requests = requests
        self._source: Iterator[EncodeRequest] | None = None
        self._asource: AsyncIterator[EncodeRequest] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._reading = threading.Lock()
        self._unanswered: dict[int, pb.EncodeStreamRequest] = {}
        self._read = 0
        self._answered = 0
        self._ended = False
        self._fault: Exception | None = None
        self._stream = 0  # number of the present one; what an earlier one still reads is sent by its successor
        self._failures = 0  # in a row

    @property
    def due(self) -> int:
        """Number of the request whose answer comes next."""
        return self._answered

    def messages(self) -> Iterator[pb.EncodeStreamRequest]:
        """Give what a new stream sends: what is unanswered, then what was not read yet.

        Raises:
            InvalidRequest: The requests are nothing that can be read one by one.
        """
        if not isinstance(self._requests, Iterable):
            way = "; an async iterable goes with AsyncClient" if isinstance(self._requests, AsyncIterable) else ""
            raise InvalidRequest(f"{_MAKE}{way}; got {shown(self._requests)}")
        self._stream += 1
        return self._send(self._stream, self._answered)

    def amessages(self) -> AsyncIterator[pb.EncodeStreamRequest]:
        """Give the same for asyncio, where the requests may be an async iterable too."""
        if not isinstance(self._requests, Iterable | AsyncIterable):
            raise InvalidRequest(f"{_MAKE}; got {shown(self._requests)}")
        self._stream += 1
        return self._asend(self._stream, self._answered)

    def answer(self, answer: EncodeResult | AttencodeError) -> EncodeResult | AttencodeError:
        """Take the answer that is due.

        Raises:
            Unanswered: It is none, and another stream may have one.
            InternalFault: It is to another question.
        """
        asked = self._unanswered.get(self._answered)
        if asked is None:
            raise codec.broken(f"item {self._answered} was answered before it was sent")
        if isinstance(answer, EncodeResult):
            codec.check_answered(answer, len(asked.request.inputs))
        if isinstance(answer, Unavailable) and self._failures < _MOST_IN_A_ROW:
            raise Unanswered(answer)
        if not isinstance(answer, Unavailable):
            self._failures = 0
        self._unanswered.pop(self._answered, None)
        self._answered += 1
        return answer

    def pause_s(self, error: AttencodeError, *, reached: bool = True) -> float:
        """Give the seconds to wait before a new stream.

        Args:
            error: How the last one ended.
            reached: Whether it found a server at all.

        Raises:
            AttencodeError: The error itself: another stream would not help, so many did not, or there never was a
                server.
        """
        if isinstance(error, RequestTooLarge) and self._read > 1:
            sizes = {message.ByteSize(): number for number, message in self._unanswered.items()}
            if error.size in sizes:
                raise InvalidRequest(f"item {sizes[error.size]} of the stream: {error}") from error
        if not isinstance(error, (Unavailable, QueueFull)) or self._failures >= _MOST_IN_A_ROW:
            raise error
        if not (reached or self._failures or self._answered):
            raise error
        self._failures += 1
        return min(_FIRST_PAUSE_S * 2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)

    def end(self) -> None:
        """Note that the stream ended well.

        Raises:
            Exception: What the caller's own requests raised.
            InternalFault: Some are unanswered.
        """
        if self._fault is not None:
            raise self._fault
        if self._unanswered or not self._ended:
            raise codec.broken(f"the stream ended before item {self._answered}'s answer")

    def close(self) -> None:
        """Read no more requests."""
        self._stream += 1
        if self._fetching is not None:
            self._fetching.cancel()

    def _send(self, stream: int, number: int) -> Iterator[pb.EncodeStreamRequest]:
        while stream == self._stream:
            message = self._unanswered.get(number) or self._next(number)
            if message is None:
                return
            yield message
            number += 1

    def _next(self, number: int) -> pb.EncodeStreamRequest | None:
        """Give a message, read now unless an earlier stream's reader has done so meanwhile."""
        with self._reading:
            if number == self._read and not self._ended:
                try:
                    if self._source is None:
                        self._source = iter(self._requests)  # type: ignore[arg-type]
                    self._add(next(self._source))
                except StopIteration:
                    self._ended = True
                except Exception as error:  # noqa: BLE001 - raised again by end
                    self._fault, self._ended = error, True
            return self._unanswered.get(number)

    async def _asend(self, stream: int, number: int) -> AsyncIterator[pb.EncodeStreamRequest]:
        while stream == self._stream:
            message = self._unanswered.get(number) or await self._anext(number)
            if message is None:
                return
            yield message
            number += 1

    async def _anext(self, number: int) -> pb.EncodeStreamRequest | None:
        """Give a message; the reading outlives a stream that ends during it."""
        if not isinstance(self._requests, AsyncIterable):
            return self._next(number)
        while number >= self._read and not self._ended:
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch())
            await asyncio.shield(self._fetching)
        return self._unanswered.get(number)

    async def _fetch(self) -> None:
        try:
            if self._asource is None:
                self._asource = aiter(self._requests)  # type: ignore[arg-type]
            self._add(await anext(self._asource))
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:  # noqa: BLE001 - raised again by end
            self._fault, self._ended = error, True
        finally:
            self._fetching = None

    def _add(self, request: EncodeRequest) -> None:
        if not isinstance(request, EncodeRequest):
            raise InvalidRequest(f"item {self._read} of the stream is no request; {_MAKE}; got {shown(request)}")
        message = pb.EncodeStreamRequest(id=self._read, request=codec.encode_encode_request(request))
        self._unanswered[self._read] = message
        self._read += 1
