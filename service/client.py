"""Client: the contract as Python calls, numpy out. Needs grpcio, protobuf and numpy, nothing else.

`Client` blocks, `AsyncClient` awaits; both have one method for each RPC, a default deadline, and retry
UNAVAILABLE by themselves. May import: pb, aligned, answers, codec, codec_align, codec_model, chunks, credentials,
resumption, attended, attention, plain, plain_align, request, statuses, tracing, values, errors, grpc.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from typing import Any, Self

import grpc

from service import codec
from service.aligned import Aligned
from service.answers import aligned, attended, encoded, raised, streamed, tokenized
from service.attended import Attended
from service.attention import ALL
from service.chunks import Joiner
from service.codec_align import encode_align_request
from service.codec_model import decode_model_info, encode_get_model_request
from service.credentials import Tls, authorization, channel
from service.errors import AnswerTooLarge, AttencodeError, InvalidRequest
from service.pb.encoder_pb2_grpc import EncoderStub
from service.plain import InputLike, Layers, attend_request, encode_request, read_inputs
from service.plain_align import align_request
from service.request import EncodeRequest, EncodeResult, ModelInfo, TokenizeRequest, TokenizeResult
from service.resumption import Resumption, Unanswered
from service.statuses import Callee, Closed, reached
from service.tracing import outgoing_metadata
from service.values import shown

DEFAULT_TIMEOUT_S = 30.0
_LONGEST_S = 1e8  # three years; beyond some 9e9, nanoseconds in 64 bits, gRPC takes a deadline for one that is over

# gRPC retries by itself what a server refused without having begun it (gRFC A6).
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "attencode.v1.Encoder"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2.0,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.max_receive_message_length", -1),  # the server bounds its answers
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # else a second, soon twenty, after a server came back
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


class Client:
    """A blocking client of one server; also a context manager.

    Every method raises the server's own errors: `InvalidRequest`, `QueueFull`, `DeadlineExceeded`, `Unauthenticated`,
    `Unavailable`, `InternalFault`, or `RemoteError` for any other status.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        wait_for_ready: bool = False,
        tls: Tls | bool = False,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        options: SequenceOf[tuple[str, Any]] = (),
    ) -> None:
        """Open a channel, which connects when it is first used.

        Args:
            address: Host and port, or any gRPC target.
            timeout_s: Deadline of each call, in seconds; None to wait for ever.
            wait_for_ready: Wait, within the deadline, for a server that cannot be reached, as while it is
                started anew; else such a call fails at once.
            tls: True for a server with a certificate of a public CA, or a `Tls` with the files of the CA and of the
                client's own certificate; False for plaintext.
            api_key: Shown with every call, where the server wants one.
            credentials: gRPC's own, instead of `tls`.
            options: gRPC channel options beside the client's own.

        Raises:
            InvalidRequest: An argument is not what it must be, or a file of `tls` cannot be used.
        """
        every, wanted = _channel_options(address, timeout_s, options), channel(tls, credentials)
        self._channel: Any = wanted.open(grpc, address, every)
        self._stub: Any = EncoderStub(self._channel)
        self._timeout_s = timeout_s
        encrypted = wanted.credentials is not None
        self._callee = Callee(address, timeout_s, encrypted, wanted.shows_certificate)
        shown = authorization(api_key, address, encrypted=encrypted)
        self._options = _call_options(shown, wait_for_ready=wait_for_ready)
        self._closed = False

    def encode(self, inputs: InputLike | Iterable[InputLike], **options: Any) -> EncodeResult:
        """Encode inputs in one request; the options are those of `encode_request`.

        An answer that is too large for one message is asked for again over a stream, where the server takes it there.
        """
        request, left_s = encode_request(inputs, **options), _left(self._timeout_s)
        try:
            message = codec.encode_encode_request(request)
            return encoded(request, self._call(self._stub.Encode, message))
        except AnswerTooLarge:
            (answer,) = self._streamed([request], left_s())
            return raised(answer)

    def attend(
        self, text: InputLike, *, layers: Layers = True, heads: int | SequenceOf[int] = ALL, **options: Any
    ) -> Attended:
        """Give one input's attention weights (layers, heads, query, key) and its tokens; of any size."""
        request = attend_request(text, layers, heads, options)
        (answer,) = self._streamed([request], self._timeout_s)
        return attended(request, answer)

    def align(self, source: InputLike, target: InputLike, **options: Any) -> Aligned:
        """Give one target's attention to its source (layers, heads, target, source), and with it word pairs.

        The model must have a decoder. The options are those of `align_request`.
        """
        return (self.align_pairs([(source, target)], **options))[0]

    def align_pairs(self, pairs: Iterable[tuple[InputLike, InputLike]], **options: Any) -> list[Aligned]:
        """Do so for many pairs in one request; the options are those of `align_request`."""
        request = align_request(pairs, **options)
        return aligned(request, self._call(self._stub.Align, encode_align_request(request)))

    def encode_stream(self, requests: Iterable[EncodeRequest]) -> Iterator[EncodeResult | AttencodeError]:
        """Send many requests over one stream; yields each one's answer or error, in their order.

        The whole stream has no deadline. Leaving the loop early ends it. One that the server leaves (UNAVAILABLE), or
        ends because the loop stood still for too long, is begun anew, a few times in a row, with what is unanswered.
        Answers may be larger than `encode`'s.
        """
        return self._streamed(requests, None)

    def _streamed(
        self, requests: Iterable[EncodeRequest], timeout_s: float | None
    ) -> Iterator[EncodeResult | AttencodeError]:
        items, left_s = Resumption(requests), _left(timeout_s)
        try:
            while True:
                joiner = Joiner()
                self._check_open()
                call = self._stub.EncodeStream(items.messages(), **self._options(left_s()))
                try:
                    for message in call:
                        answer = streamed(message, joiner, items, self._callee)
                        if answer is not None:
                            yield answer
                except grpc.RpcError as error:
                    pause_s = items.pause_s(self._callee.error(error), reached=reached(error))
                except Unanswered as error:
                    pause_s = items.pause_s(error.error)
                else:
                    items.end()
                    return
                finally:
                    call.cancel()
                time.sleep(pause_s)
        finally:
            items.close()

    def tokenize(
        self,
        inputs: InputLike | Iterable[InputLike],
        *,
        truncation: str = "right",
        prompt_name: str | None = None,
        model: str = "",
    ) -> TokenizeResult:
        """Split inputs into tokens as `encode` would."""
        request = TokenizeRequest(read_inputs(inputs), model, truncation, prompt_name)  # type: ignore[arg-type]
        message = codec.encode_tokenize_request(request)
        return tokenized(request, self._call(self._stub.Tokenize, message))

    def get_model(self, model: str = "") -> ModelInfo:
        """Describe a served model."""
        return decode_model_info(self._call(self._stub.GetModel, encode_get_model_request(model)))

    def close(self) -> None:
        """Close the channel."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        """Give the client itself."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close the channel."""
        self.close()

    def _call(self, method: Any, message: Any) -> Any:
        self._check_open()
        try:
            return method(message, **self._options(self._timeout_s))
        except grpc.RpcError as error:
            raise self._callee.error(error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Closed


class AsyncClient:
    """The same for asyncio; each method of `Client`, awaited."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        wait_for_ready: bool = False,
        tls: Tls | bool = False,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        options: SequenceOf[tuple[str, Any]] = (),
    ) -> None:
        """Open a channel; the arguments are those of `Client`."""
        every, wanted = _channel_options(address, timeout_s, options), channel(tls, credentials)
        self._channel: Any = wanted.open(grpc.aio, address, every)
        self._stub: Any = EncoderStub(self._channel)
        self._timeout_s = timeout_s
        encrypted = wanted.credentials is not None
        self._callee = Callee(address, timeout_s, encrypted, wanted.shows_certificate)
        shown = authorization(api_key, address, encrypted=encrypted)
        self._options = _call_options(shown, wait_for_ready=wait_for_ready)
        self._closed = False

    async def encode(self, inputs: InputLike | Iterable[InputLike], **options: Any) -> EncodeResult:
        """Encode inputs in one request, as `Client.encode` does."""
        request, left_s = encode_request(inputs, **options), _left(self._timeout_s)
        try:
            message = codec.encode_encode_request(request)
            return encoded(request, await self._call(self._stub.Encode, message))
        except AnswerTooLarge:
            (answer,) = [answer async for answer in self._streamed([request], left_s())]
            return raised(answer)

    async def attend(
        self, text: InputLike, *, layers: Layers = True, heads: int | SequenceOf[int] = ALL, **options: Any
    ) -> Attended:
        """Give one input's attention weights (layers, heads, query, key) and its tokens."""
        request = attend_request(text, layers, heads, options)
        (answer,) = [answer async for answer in self._streamed([request], self._timeout_s)]
        return attended(request, answer)

    async def align(self, source: InputLike, target: InputLike, **options: Any) -> Aligned:
        """Give one target's attention to its source, as `Client.align` does."""
        return (await self.align_pairs([(source, target)], **options))[0]

    async def align_pairs(self, pairs: Iterable[tuple[InputLike, InputLike]], **options: Any) -> list[Aligned]:
        """Do so for many pairs in one request."""
        request = align_request(pairs, **options)
        return aligned(request, await self._call(self._stub.Align, encode_align_request(request)))

    async def encode_stream(
        self, requests: Iterable[EncodeRequest] | AsyncIterable[EncodeRequest]
    ) -> AsyncIterator[EncodeResult | AttencodeError]:
        """Send many requests over one stream; yields each one's answer or error, in their order."""
        async with aclosing(self._streamed(requests, None)) as answers:
            async for answer in answers:
                yield answer

    async def _streamed(
        self, requests: Iterable[EncodeRequest] | AsyncIterable[EncodeRequest], timeout_s: float | None
    ) -> AsyncGenerator[EncodeResult | AttencodeError, None]:
        items, left_s = Resumption(requests), _left(timeout_s)
        try:
            while True:
                joiner = Joiner()
                self._check_open()
                call = self._stub.EncodeStream(items.amessages(), **self._options(left_s()))
                try:
                    async for message in call:
                        answer = streamed(message, joiner, items, self._callee)
                        if answer is not None:
                            yield answer
                except grpc.RpcError as error:
                    pause_s = items.pause_s(self._callee.error(error), reached=reached(error))
                except Unanswered as error:
                    pause_s = items.pause_s(error.error)
                else:
                    items.end()
                    return
                finally:
                    call.cancel()
                await asyncio.sleep(pause_s)
        finally:
            items.close()

    async def tokenize(
        self,
        inputs: InputLike | Iterable[InputLike],
        *,
        truncation: str = "right",
        prompt_name: str | None = None,
        model: str = "",
    ) -> TokenizeResult:
        """Split inputs into tokens as `encode` would."""
        request = TokenizeRequest(read_inputs(inputs), model, truncation, prompt_name)  # type: ignore[arg-type]
        message = codec.encode_tokenize_request(request)
        return tokenized(request, await self._call(self._stub.Tokenize, message))

    async def get_model(self, model: str = "") -> ModelInfo:
        """Describe a served model."""
        return decode_model_info(await self._call(self._stub.GetModel, encode_get_model_request(model)))

    async def close(self) -> None:
        """Close the channel."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        """Give the client itself."""
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close the channel."""
        await self.close()

    async def _call(self, method: Any, message: Any) -> Any:
        self._check_open()
        try:
            return await method(message, **self._options(self._timeout_s))
        except grpc.RpcError as error:
            raise self._callee.error(error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Closed


def _channel_options(
    address: str, timeout_s: float | None, options: SequenceOf[tuple[str, Any]]
) -> list[tuple[str, Any]]:
    """Give a channel's options, once they, the address and the deadline are such.

    Raises:
        InvalidRequest: They are not.
    """
    if not isinstance(address, str) or not address:
        raise InvalidRequest(
            f"the server's address must be host and port, for instance 127.0.0.1:50051, got {shown(address)}"
        )
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s <= _LONGEST_S):
        raise InvalidRequest(
            f"timeout_s must be seconds above 0 and up to {_LONGEST_S:g}, or None to wait for ever, "
            f"got {shown(timeout_s)}"
        )
    if not isinstance(options, list | tuple) or not all(
        isinstance(option, tuple) and len(option) == 2 and isinstance(option[0], str) for option in options
    ):
        raise InvalidRequest(
            "options must be a list of gRPC's channel options, each a name and a value, for instance "
            f'[("grpc.keepalive_time_ms", 30000)], got {shown(options)}'
        )
    return [*CHANNEL_OPTIONS, *options]


def _call_options(
    shown: tuple[tuple[str, str], ...], *, wait_for_ready: bool
) -> Callable[[float | None], dict[str, Any]]:
    """Give what makes the options of a call from its deadline: in a function, so that no `repr` shows a key."""

    def options(timeout_s: float | None) -> dict[str, Any]:
        metadata = (*(outgoing_metadata() or ()), *shown)  # the span of the caller as it is when the call begins
        return {"timeout": timeout_s, "wait_for_ready": wait_for_ready, "metadata": metadata or None}

    return options


def _left(timeout_s: float | None) -> Callable[[], float | None]:
    """Give what says how much of a time is left."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if end_s is None else max(0.0, end_s - time.monotonic())
