"""Servicer: the RPC methods. The only place where an error becomes a status.

Messages come in and go out as bytes: what cannot be parsed is the caller's fault and is told so.
May import: pb (through codec), calls, codec, chunks, served, stream, outputs, tokenization, metrics, tracing, request,
errors, grpc.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from service import codec, metrics
from service.calls import abort, check_metadata, counted, deadline_s, received
from service.chunks import CHUNK_BYTES, StreamAnswer, cut
from service.errors import (
    AnswerTooLarge,
    AttencodeError,
    InvalidRequest,
    Outdated,
    Stalled,
    Unavailable,
)
from service.outputs import check_answer_size
from service.pb import encoder_pb2 as pb
from service.request import (
    EncodeRequest,
    EncodeResult,
    InputResult,
    Timings,
    TokenIdsInput,
    TokenizeRequest,
    TokenizeResult,
)
from service.served import Models, ServedModel
from service.stream import ByteBudget, ServerBudget, Share, in_order, off_loop
from service.tokenization import Sequence
from service.tracing import Tracing, note, stage

_LOG = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Encoder"].full_name
# Texts and answers beyond these sizes are worked on beside the event loop, which they would hold up for
# longer than a thread switch costs (tokenizing runs at some 4 bytes a microsecond).
_INLINE_TEXT_BYTES = 16_384
_ID_CHARS = 2  # what a token id that is given costs, in characters of text
_INLINE_ANSWER_BYTES = 1_000_000
_INLINE_PLACES = 2048  # tokens, and named tokens and spans, of which each takes about a microsecond
# Of a unary answer's tensors at most at one time: as arrays, as a message, as its bytes, and one tensor on the way from
# the one to the other; once it is sent, as these bytes and as gRPC's own. With 3, ten unread answers of 57 MB took 321
# to 408 MB where 400 were allowed.
_UNARY_COPIES = 4
_NO_SPAN = nullcontext()

Context: TypeAlias = grpc.aio.ServicerContext
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may be.

    Attributes:
        max_inputs: Inputs.
        max_message_bytes: Bytes of an answer's tensors; on a stream, of any one message.
        max_answer_bytes: Bytes of a stream's answer, of all unsent large answers, and of all unsent small ones.
        max_stream_requests: Unanswered requests of one stream.
        stalled_after_s: How long each MiB of a stream's message may wait to be read.
    """

    max_inputs: int
    max_message_bytes: int
    max_answer_bytes: int
    max_stream_requests: int
    stalled_after_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    """One request on its way.

    Attributes:
        request: What is asked.
        origin: The address that it came from.
        deadline_s: On the clock of `time.monotonic`; None for none.
        started: On the same clock.
        share: Holds it back, in its turn, while too many bytes of other answers are unsent.
        most_bytes: Of its answer's tensors.
    """

    request: EncodeRequest
    origin: str
    deadline_s: float | None
    started: float
    share: Share
    most_bytes: int


class EncoderServicer:
    """Answers the contract's methods for the served models."""

    def __init__(self, models: Models, limits: RequestLimits, tracing: Tracing | None = None) -> None:
        """Store the parts; without `tracing` no request has a span."""
        self._models = models
        self._tracing = tracing
        self._limits = limits
        self._unsent = ServerBudget(limits.max_answer_bytes, CHUNK_BYTES)
        metrics.watch_unsent(lambda: self._unsent.held, limits.max_answer_bytes)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Give the handlers to add to a server."""
        # Said to be streams of requests: gRPC leaves a call without any message unanswered if it is to read it itself.
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods = {
            "Encode": unary(self._unary("Encode", self._encode)),
            "Tokenize": unary(self._unary("Tokenize", self._tokenize)),
            "GetModel": unary(self._unary("GetModel", self._get_model)),
            "EncodeStream": stream(self._encode_stream),
        }
        metrics.prepare_requests(methods)
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def _unary(
        self, method: str, answer: Callable[[bytes, Context], Awaitable[bytes]]
    ) -> Callable[[object, Context], Awaitable[bytes]]:
        """Wrap a method: time it, count it, and turn its errors into statuses."""

        async def answered(context: Context) -> bytes:
            check_metadata(context)
            return await answer(await received(context), context)

        async def handle(_messages: object, context: Context) -> bytes:
            try:
                with self._span(method, context):
                    return await counted(method, context, answered(context))
            except AttencodeError as error:
                await abort(context, error)
                raise

        return handle

    async def _encode(self, data: bytes, context: Context) -> bytes:
        started = time.monotonic()
        message = codec.parse(pb.EncodeRequest, data)
        most = self._limits.max_message_bytes
        share = Share(ByteBudget(most), self._unsent, copies=_UNARY_COPIES)
        context.add_done_callback(lambda _context: share.give_back())  # sent, or the caller is gone

        def finish(result: EncodeResult) -> bytes:
            return self._serialize(codec.encode_encode_result(result), fits_stream=True)

        return await self._encode_message(message, context, finish, started=started, share=share, most_bytes=most)

    async def _encode_message(
        self,
        message: pb.EncodeRequest,
        context: Context,
        finish: Callable[[EncodeResult], Answer],
        *,
        started: float,
        share: Share,
        most_bytes: int,
    ) -> Answer:
        """Answer one parsed request; `finish` turns the result into what is sent."""
        self._check_inputs(message)
        request = codec.decode_encode_request(message)
        call = _Call(request, context.peer(), deadline_s(context), started, share, most_bytes)
        while True:
            served = self._find(call.request)
            try:
                return await self._encode_with(served, call, finish)
            except Outdated:
                share.begin_anew()

    async def _encode_with(
        self,
        served: ServedModel,
        call: _Call,
        finish: Callable[[EncodeResult], Answer],
    ) -> Answer:
        """Answer a request by one version of its model from beginning to end."""
        request = call.request
        selection = served.select(request.outputs)
        if selection.runs:
            served.engine.check_room(len(request.inputs), call.deadline_s, call.origin)  # before work is put into it
        async with call.share.turn():
            sequences, tokenize_s = await _sequences(served, request, describe=request.outputs.by_token)
            lengths = [sequence.length for sequence in sequences]
            looks = await off_loop(
                lambda: selection.looks(sequences),
                when=selection.looks_inside and selection.places * len(lengths) + sum(lengths) > _INLINE_PLACES,
            )
            size = selection.answer_bytes(lengths, looks)
            check_answer_size(selection, size, len(lengths), call.most_bytes, self._limits.max_answer_bytes)
            await call.share.take(size)
        if selection.runs:
            encoded = await served.engine.submit(
                sequences, selection.graph_outputs, call.deadline_s, origin=call.origin, looks=looks
            )
            rows, queue_s, inference_s = encoded.rows, encoded.queue_s, encoded.inference_s
        else:
            rows, queue_s, inference_s = [{}] * len(sequences), 0.0, 0.0

        def build() -> Answer:
            pooled = selection.pooled(rows)
            results = []
            for place, sequence in enumerate(sequences):
                results.append(selection.result(sequence, rows[place], looks[place] if looks else None))
                rows[place] = {}  # frees what was copied out of it
            timings = Timings(tokenize_s, queue_s, inference_s, time.monotonic() - call.started)
            return finish(EncodeResult(pooled, results, timings, served.name, served.artifact.digest))

        answer = await off_loop(build, when=size > _INLINE_ANSWER_BYTES)
        metrics.record_stages(served.name, tokenize_s, queue_s, inference_s, time.monotonic() - call.started)
        return answer

    async def _tokenize(self, data: bytes, _context: Context) -> bytes:
        message = codec.parse(pb.TokenizeRequest, data)
        self._check_inputs(message)
        request = codec.decode_tokenize_request(message)
        served = self._find(request)
        sequences, _ = await _sequences(served, request, describe=True)
        results = [InputResult(item.length, item.original_length, item.tokens) for item in sequences]
        result = TokenizeResult(results, served.name, served.artifact.digest)
        return self._serialize(codec.encode_tokenize_result(result))

    async def _get_model(self, data: bytes, _context: Context) -> bytes:
        request = codec.parse(pb.GetModelRequest, data)
        info = self._models.find(request.model).info(self._models.names)
        return self._serialize(codec.encode_model_info(info))

    async def _encode_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer a stream's items in order; an item's error is its own answer.

        Each write is awaited until gRPC has passed it on, so that the reader's pace is the stream's. Where nobody
        reads, all but the message that gRPC has already is let go of; the status comes behind that one.
        """
        try:
            check_metadata(context)
        except InvalidRequest as error:
            await abort(context, error)
        budget = ByteBudget(self._limits.max_message_bytes)
        shares: set[Share] = set()

        async def answer(data: bytes) -> tuple[Share, StreamAnswer]:
            share = Share(budget, self._unsent)
            shares.add(share)
            return share, await self._stream_item(data, context, share)

        most, stopping = self._limits.max_stream_requests, self._models.stopping
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

    async def _stream_item(self, data: bytes, context: Context, share: Share) -> StreamAnswer:
        """Answer one item of a stream."""
        number = 0

        def finish(result: EncodeResult) -> StreamAnswer:
            most = self._limits.max_message_bytes
            answer = cut(number, result, most)
            if len(answer.head) > most:  # by what it says of the tokens
                answer = cut(number, result, 0)
            self._check_size(len(answer.head))
            return answer

        async def work() -> StreamAnswer:
            if unread is not None:
                raise unread
            most = self._limits.max_answer_bytes
            return await self._encode_message(
                message.request, context, finish, started=started, share=share, most_bytes=most
            )

        started, unread, message = time.monotonic(), None, pb.EncodeStreamRequest()
        try:
            message = codec.parse(pb.EncodeStreamRequest, data)
            number = message.id
        except InvalidRequest as error:  # counted as other items are
            unread = error
        try:
            with self._span("EncodeStream", context, item=number):
                return await counted("EncodeStream", context, work())
        except AttencodeError as error:
            share.give_back()
            told = pb.EncodeStreamResponse(id=number, error=codec.encode_error(error))
            return StreamAnswer(number, told.SerializeToString())

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

    def _find(self, request: TokenizeRequest) -> ServedModel:
        """Give the model that a request names, once the request may be worked on at all."""
        served = self._models.find(request.model)
        if not request.inputs:
            raise InvalidRequest("the request has no inputs; send at least one")
        return served

    def _check_inputs(self, request: pb.EncodeRequest | pb.TokenizeRequest) -> None:
        """Refuse more inputs than a request may have, before they are looked at: of 800,000 that takes seconds."""
        if len(request.inputs) > self._limits.max_inputs:
            raise InvalidRequest(
                f"the request has {len(request.inputs)} inputs, more than this server's {self._limits.max_inputs}; "
                "send several requests, for instance over EncodeStream"
            )


async def _sequences(served: ServedModel, request: TokenizeRequest, *, describe: bool) -> tuple[list[Sequence], float]:
    """Tokenize a request's inputs; returns the sequences and the seconds it took."""
    started = time.perf_counter()
    large = _text_bytes(request) > _INLINE_TEXT_BYTES
    with stage("tokenize"):
        sequences = await off_loop(lambda: served.tokenizer.tokenize(request, describe=describe), when=large)
    seconds = time.perf_counter() - started
    truncated = sum(sequence.original_length > sequence.length for sequence in sequences)
    tokens = sum(item.length for item in sequences)
    metrics.record_tokenized(served.name, len(sequences), tokens, truncated, seconds)
    note(served.name, served.placement.provider, inputs=len(sequences), tokens=tokens)
    return sequences, seconds


def _text_bytes(request: TokenizeRequest) -> int:
    """Estimate the size of a request's inputs in characters, of which a token id is worth some."""
    total = 0
    for item in request.inputs:
        if isinstance(item, TokenIdsInput):
            total += _ID_CHARS * len(item.ids)
        else:
            total += len(item.text) + len(item.pair or "")
    return total
