"""Servicer: the RPC methods. The only place where an error becomes a status.

Messages come in and go out as bytes: what cannot be parsed is the caller's fault and is told so.
May import: pb (through codec), access, admission, aligning, callers, calls, codec, codec_align, codec_model, chunks,
encoding, intake, served, stream, metrics, tracing, request, errors, grpc.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from service import codec, metrics
from service.access import Access, Session
from service.admission import Door, WorkLimits
from service.aligning import Aligning
from service.callers import Caller
from service.calls import abort, bare, check_metadata, counted, deadline_s, turned_away, veiled
from service.chunks import CHUNK_BYTES, StreamAnswer, cut
from service.codec_align import decode_align_request, encode_align_result
from service.codec_model import encode_model_info
from service.encoding import Call, Encoding, Request, RequestLimits
from service.errors import (
    AnswerTooLarge,
    AttencodeError,
    InvalidRequest,
    Stalled,
    Unavailable,
)
from service.intake import Intake, Place
from service.pb import encoder_pb2 as pb
from service.request import AlignResult, EncodeRequest, EncodeResult
from service.served import Models
from service.stream import ByteBudget, ServerBudget, Share, in_order
from service.tracing import Tracing

_LOG = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Encoder"].full_name
_TINY_ANSWER_BYTES = 16_384  # ten vectors; others' answers that nobody reads never hold these up
# Of a unary answer's tensors at most at one time: as arrays, as a message, as its bytes, and one tensor on the way from
# the one to the other; once it is sent, as these bytes and as gRPC's own. With 3, ten unread answers of 57 MB took 321
# to 408 MB where 400 were allowed.
_UNARY_COPIES = 4
_NO_SPAN = nullcontext()
_TOKENIZE_COPIES = 2  # of a Tokenize answer once it is sent: its bytes and gRPC's own

Context: TypeAlias = grpc.aio.ServicerContext
Answer = TypeVar("Answer")


class EncoderServicer:
    """Answers the contract's methods for the served models."""

    def __init__(
        self, models: Models, limits: RequestLimits, work: WorkLimits, access: Access, tracing: Tracing | None = None
    ) -> None:
        """Store the parts; without `tracing` no request has a span."""
        self._models = models
        self._access = access
        self._tracing = tracing
        self._limits = limits
        self._intake = Intake(Door(work), limits.max_request_bytes, limits.max_deadline_s)
        self._encoding = Encoding(models, limits)
        self._aligning = Aligning(models, self._encoding, limits)
        self._unsent = ServerBudget(limits.max_answer_bytes, CHUNK_BYTES, tiny_bytes=_TINY_ANSWER_BYTES)
        metrics.watch_unsent(lambda: self._unsent.held, limits.max_answer_bytes)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Give the handlers to add to a server."""
        # Said to be streams of requests, calls come here before their message has, and are refused without it.
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods = {
            "Encode": unary(self._unary("Encode", self._encode)),
            "Align": unary(self._unary("Align", self._align)),
            "Tokenize": unary(self._unary("Tokenize", self._tokenize)),
            "GetModel": unary(self._unary("GetModel", self._get_model)),
            "EncodeStream": stream(self._stream),
        }
        metrics.prepare_requests(methods)
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def _unary(
        self, method: str, answer: Callable[[bytes, Context, Caller, Place], Awaitable[bytes]]
    ) -> Callable[[object, Context], Awaitable[bytes]]:
        """Wrap a method: let it in, time it, count it, and turn its errors into statuses."""

        async def answered(context: Context, caller: Caller) -> bytes:
            check_metadata(context)
            with self._intake.request() as place:
                return await answer(await place.receive(context), context, caller, place)

        async def handle(_messages: object, context: Context) -> bytes:
            try:
                with self._access.session(method, context) as caller, self._span(method, context):
                    return await counted(method, context, answered(context, caller))
            except AttencodeError as error:
                refusal = bare(error)
            await abort(context, refusal)
            raise refusal

        return handle

    async def _encode(self, data: bytes, context: Context, caller: Caller, place: Place) -> bytes:
        started = time.monotonic()
        request = self._read(codec.parse(pb.EncodeRequest, data))
        del data

        def finish(result: EncodeResult) -> bytes:
            return self._serialize(codec.encode_encode_result(result), fits_stream=True)

        return await self._encoding.encode(self._call(request, context, caller, place, started), finish)

    async def _align(self, data: bytes, context: Context, caller: Caller, place: Place) -> bytes:
        started = time.monotonic()
        message = codec.parse(pb.AlignRequest, data)
        self._encoding.check_inputs(len(message.pairs), "pairs")
        request = decode_align_request(message)
        del data, message

        def finish(result: AlignResult) -> bytes:
            return self._serialize(encode_align_result(result))

        return await self._aligning.align(self._call(request, context, caller, place, started), finish)

    def _call(self, request: Request, context: Context, caller: Caller, place: Place, started: float) -> Call[Request]:
        """Begin a request whose answer is one message."""
        most = self._limits.max_message_bytes
        share = Share(ByteBudget(most), self._unsent, copies=_UNARY_COPIES)
        context.add_done_callback(lambda _context: share.give_back())  # sent, or the caller is gone
        return Call(request, caller, place, share, most, deadline_s(context), started)

    async def _tokenize(self, data: bytes, context: Context, _caller: Caller, place: Place) -> bytes:
        asked = codec.parse(pb.TokenizeRequest, data)
        self._encoding.check_inputs(len(asked.inputs))
        request = codec.decode_tokenize_request(asked)
        del data, asked
        message: Message = codec.encode_tokenize_result(await self._encoding.tokenize(request, place))
        share = Share(ByteBudget(self._limits.max_message_bytes), self._unsent, copies=_TOKENIZE_COPIES)
        context.add_done_callback(lambda _context: share.give_back())
        size = message.ByteSize()
        self._check_size(size)
        await share.take(size)
        return bytes(message.SerializeToString())

    async def _get_model(self, data: bytes, _context: Context, _caller: Caller, _place: Place) -> bytes:
        request = codec.parse(pb.GetModelRequest, data)
        info = self._models.find(request.model).info(self._models.names)
        return self._serialize(encode_model_info(info))

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await veiled("EncodeStream", context, self._encode_stream(requests, context))

    async def _encode_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Let a stream in, and answer it."""
        try:
            session = self._access.session("EncodeStream", context)
            with session.stream():
                await self._stream_of(session, requests, context)
        except AttencodeError as error:
            await abort(context, bare(error))

    async def _stream_of(self, session: Session, requests: AsyncIterator[bytes], context: Context) -> None:
        """Let a stream of somebody who may call in, and answer it."""
        try:
            check_metadata(context)
            self._intake.door.open_stream()
        except AttencodeError as error:
            turned_away("EncodeStream", error)
            raise
        try:
            await self._answer_stream(requests, context, session)
        finally:
            self._intake.door.close_stream()

    async def _answer_stream(self, requests: AsyncIterator[bytes], context: Context, session: Session) -> None:
        """Answer a stream's items in order; an item's error is its own answer.

        Each write is awaited until gRPC has passed it on, so that the reader's pace is the stream's. Where nobody
        reads, all but the message that gRPC has already is let go of; the status comes behind that one.
        """
        budget = ByteBudget(self._limits.max_message_bytes)
        shares: set[Share] = set()

        async def answer(data: bytes) -> tuple[Share, StreamAnswer]:
            share = Share(budget, self._unsent)
            shares.add(share)
            return share, await self._stream_item(data, context, session, share)

        most, stopping = self._limits.max_stream_requests, self._models.stopping
        most = min(most, session.most_requests or most)  # of a key: held back, where it would else be refused
        metrics.record_stream(1)
        try:
            stuck = await self._send(in_order(requests, answer, most=most, stopping=stopping), context, shares)
            if stuck is not None:
                for share in shares - {stuck}:
                    share.give_back()
                metrics.record_stalled()
                await abort(context, Stalled(self._limits.stalled_after_s))
        finally:
            metrics.record_stream(-1)
            for share in shares:
                share.give_back()
        if stopping.is_set():
            await abort(context, Unavailable("the server is draining; try another one, or try again"))

    async def _send(
        self, answers: AsyncGenerator[tuple[Share, StreamAnswer]], context: Context, shares: set[Share]
    ) -> Share | None:
        """Send a stream's answers, and take those that are sent out of the shares.

        Returns:
            The share of an answer that nobody reads, which then holds one message alone; None if all were read.
        """
        begun = False
        async with aclosing(answers):
            async for share, item in answers:
                if not begun:  # within the first message it would keep a status from following that one
                    await context.send_initial_metadata(())
                    begun = True
                for message in item.messages():
                    patience_s = self._limits.stalled_after_s * max(1.0, len(message) / CHUNK_BYTES)
                    try:
                        async with asyncio.timeout(patience_s):
                            await context.write(message)
                    except TimeoutError:
                        share.keep(len(message))
                        return share
                    except grpc.aio.InternalError as error:  # gRPC's word for a deadline that passed under a write
                        raise asyncio.CancelledError from error
                    share.give_back(len(message))
                share.give_back()
                shares.discard(share)
        return None

    async def _stream_item(self, data: bytes, context: Context, session: Session, share: Share) -> StreamAnswer:
        """Answer one item of a stream."""
        number = 0

        def finish(result: EncodeResult) -> StreamAnswer:
            most = self._limits.max_message_bytes
            answer = cut(number, result, most)
            if len(answer.head) > most:  # by what it says of the tokens
                answer = cut(number, result, 0)
            self._check_size(len(answer.head))
            return answer

        async def answered(caller: Caller) -> StreamAnswer:
            started = time.monotonic()
            with self._intake.request() as place:
                request = self._read(message.request)
                place.hold(data, copies=3)
                call = Call(request, caller, place, share, most, deadline_s(context), started)
                return await self._encoding.encode(call, finish)

        most = self._limits.max_answer_bytes
        try:
            message = _parsed_item(data)
            number = message.id
            with session as caller, self._span("EncodeStream", context, item=number):
                return await counted("EncodeStream", context, answered(caller))
        except AttencodeError as error:
            share.give_back()
            told = pb.EncodeStreamResponse(id=number, error=codec.encode_error(error))
            return StreamAnswer(number, told.SerializeToString())

    def _read(self, message: pb.EncodeRequest) -> EncodeRequest:
        """Read a request once it is known to have no more inputs than it may."""
        self._encoding.check_inputs(len(message.inputs))
        return codec.decode_encode_request(message)

    def _span(self, method: str, context: Context, **attributes: int) -> AbstractContextManager[Any]:
        """Give the block that answers a request its span."""
        if self._tracing is None:
            return _NO_SPAN
        return self._tracing.request(SERVICE_NAME, method, context.invocation_metadata() or (), **attributes)

    def _check_size(self, size: int, *, fits_stream: bool = False) -> None:
        """Refuse what is larger than a message may be, descriptions of tokens included."""
        most = self._limits.max_message_bytes
        if size > most:
            way = ", or use EncodeStream" if fits_stream else ""
            raise AnswerTooLarge(
                f"the answer would hold {size:,} bytes, more than this server's {most:,}; "
                f"send fewer or shorter inputs, or ask for fewer outputs{way}",
                fits_stream=fits_stream,
            )

    def _serialize(self, message: Message, *, fits_stream: bool = False) -> bytes:
        self._check_size(message.ByteSize(), fits_stream=fits_stream)
        return message.SerializeToString()


def _parsed_item(data: bytes) -> pb.EncodeStreamRequest:
    """Read an item of a stream; one that cannot be read is counted here, since nothing of it is begun."""
    try:
        return codec.parse(pb.EncodeStreamRequest, data)
    except InvalidRequest as error:
        turned_away("EncodeStream", error)
        raise
