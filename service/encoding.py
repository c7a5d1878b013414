"""Encoding: the work of one request, from what is asked to what is answered, whatever way it came.

What holds memory is bounded on the way: texts that are tokenized at once, descriptions of tokens, answers.
May import: callers, intake, memory, served, stream, threads, outputs, tokenization, reduce, request, metrics, tracing,
errors.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from service import metrics
from service.callers import Caller
from service.errors import DeadlineExceeded, InvalidRequest, Outdated
from service.intake import Place
from service.memory import trim
from service.outputs import Row, Selection, check_answer_size
from service.reduce import Look
from service.request import (
    AlignRequest,
    EncodeRequest,
    EncodeResult,
    Input,
    InputResult,
    Timings,
    TokenIdsInput,
    TokenizeRequest,
    TokenizeResult,
)
from service.served import Models, ServedModel
from service.stream import Share
from service.threads import Threads
from service.tokenization import Sequence
from service.tracing import note, stage

# Texts and answers beyond these sizes are worked on beside the event loop, which they would hold up for
# longer than a thread switch costs (tokenizing runs at some 4 bytes a microsecond).
_INLINE_CHARS = 16_384
_ID_CHARS = 2  # of a token id that is given
INLINE_ANSWER_BYTES = 1_000_000
INLINE_PLACES = 2048  # tokens, and named tokens and spans, of which each takes about a microsecond
# Characters that are tokenized beside the loop at once: each takes some 100 bytes while it lasts, 180 with descriptions
# (measured on one text of 4.2 MB), of which Python's allocator and the tokenizer's keep the larger part.
_CHARS_AT_ONCE = 4 * 2**20
_TRIMMED_CHARS = 2**18  # from which that is given back at once; it takes 60 ms after 4 MB, beside the loop
_TEXT_THREADS = 4  # many inputs are tokenized on every core by one
_DESCRIBED_BYTES = 500  # of one described token's objects
DESCRIBED_MESSAGE_BYTES = 64  # of it in an answer

_NO_ROW: Row = {}

Request = TypeVar("Request", EncodeRequest, AlignRequest)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may be.

    Attributes:
        max_inputs: Inputs.
        max_tokens: Their tokens together, after truncation.
        max_deadline_s: How long it may take, whatever its caller allows.
        max_request_bytes: Bytes of its message.
        max_message_bytes: Bytes of an answer's tensors; on a stream, of any one message.
        max_answer_bytes: Bytes of a stream's answer, of all unsent large answers, and half of it of small ones.
        max_stream_requests: Unanswered requests of one stream.
        stalled_after_s: How long each MiB of a stream's message may wait to be read.
    """

    max_inputs: int
    max_tokens: int
    max_deadline_s: float
    max_request_bytes: int
    max_message_bytes: int
    max_answer_bytes: int
    max_stream_requests: int
    stalled_after_s: float


@dataclass(slots=True)
class Call(Generic[Request]):
    """One request on its way.

    Attributes:
        request: What is asked.
        caller: Whose it is.
        place: What it holds while it is in work.
        share: Holds it back, in its turn, while too many bytes of other answers are unsent.
        most_bytes: Of its answer's tensors.
        deadline_s: Of its caller, and once the clock runs the server's, on that of `time.monotonic`; None for none.
        started: On the same clock.
    """

    request: Request
    caller: Caller
    place: Place
    share: Share
    most_bytes: int
    deadline_s: float | None
    started: float
    _end_s: float | None = None

    def start_clock(self, most_s: float) -> float:
        """Give the request at most so much time from now on, once; gives when that is up, its caller's time apart."""
        if self._end_s is None:
            self._end_s = time.monotonic() + most_s
            self.deadline_s = self._end_s if self.deadline_s is None else min(self.deadline_s, self._end_s)
        return self._end_s

    @property
    def is_the_servers_time(self) -> bool:
        """Whether the server's time for it ends before its caller's."""
        return self._end_s is not None and self._end_s == self.deadline_s


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that is ready for the queue.

    Attributes:
        sequences: Its inputs.
        looks: What is wanted of their attention; empty for nothing.
        answer_bytes: Of its answer's tensors.
        tokenize_s: How long tokenizing took.
    """

    sequences: list[Sequence]
    looks: tuple[Look, ...]
    answer_bytes: int
    tokenize_s: float


class Encoding:
    """Does the work of requests for the served models."""

    def __init__(self, models: Models, limits: RequestLimits) -> None:
        """Store the parts."""
        self._models = models
        self._limits = limits
        self.texts = Threads("attencode-text", _CHARS_AT_ONCE, _TEXT_THREADS)
        self.answers = Threads("attencode-answer", limits.max_answer_bytes)

    def check_inputs(self, count: int, what: str = "inputs") -> None:
        """Do nothing while a request has no more inputs than it may; before they are read: of 800,000 that took 1.8 s.

        Raises:
            InvalidRequest: It has.
        """
        if count > self._limits.max_inputs:
            way = ", for instance over EncodeStream" if what == "inputs" else ""
            raise InvalidRequest(
                f"the request has {count} {what}, more than this server's {self._limits.max_inputs}; "
                f"send several requests{way}"
            )

    async def encode(self, call: Call[EncodeRequest], finish: Callable[[EncodeResult], Answer]) -> Answer:
        """Answer one request; `finish` turns the result into what is sent."""
        return await self.answered(call, lambda served: self._encode_with(served, call, finish))

    async def answered(self, call: Call[Request], answer: Callable[[ServedModel], Awaitable[Answer]]) -> Answer:
        """Have a request answered by the present version of its model, and anew where that is replaced meanwhile."""
        while True:
            served = self._models.find(call.request.model)
            try:
                return await answer(served)
            except Outdated:
                call.share.begin_anew()
            except DeadlineExceeded as error:
                if call.is_the_servers_time:
                    raise self._servers_time() from error
                raise

    async def tokenize(self, request: TokenizeRequest, place: Place) -> TokenizeResult:
        """Split a request's inputs into tokens."""
        served = self._models.find(request.model)
        _check_some(request)
        try:
            end_s = time.monotonic() + self._limits.max_deadline_s
            sequences, _ = await self._sequences(served, request, place, end_s, describe=True)
        except TimeoutError as error:
            raise self._servers_time() from error
        results = [InputResult(item.length, item.original_length, item.tokens) for item in sequences]
        return TokenizeResult(results, served.name, served.artifact.digest)

    def _servers_time(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"this server gives a request {self._limits.max_deadline_s:g} s, and they have passed; ask for less at "
            "once, or start it with a longer --max-deadline-s"
        )

    async def _encode_with(
        self, served: ServedModel, call: Call[EncodeRequest], finish: Callable[[EncodeResult], Answer]
    ) -> Answer:
        """Answer a request by one version of its model from beginning to end."""
        _check_some(call.request)
        selection = served.select(call.request.outputs)
        if selection.runs:
            served.engine.check_room(len(call.request.inputs), call.deadline_s, call.caller)  # before it is tokenized
        ready = await self._prepare(served, call, selection)
        if selection.runs:
            encoded = await served.engine.submit(
                ready.sequences, selection.graph_outputs, call.deadline_s, caller=call.caller, looks=ready.looks
            )
            rows, queue_s, inference_s = encoded.rows, encoded.queue_s, encoded.inference_s
        else:
            rows, queue_s, inference_s = [_NO_ROW] * len(ready.sequences), 0.0, 0.0

        def build() -> Answer:
            pooled = selection.pooled(rows)
            results = []
            for place, sequence in enumerate(ready.sequences):
                results.append(selection.result(sequence, rows[place], ready.looks[place] if ready.looks else None))
                rows[place] = {}  # frees what was copied out of it
            timings = Timings(ready.tokenize_s, queue_s, inference_s, time.monotonic() - call.started)
            return finish(EncodeResult(pooled, results, timings, served.name, served.artifact.digest))

        size = ready.answer_bytes
        answer = await self.answers.run(build, size, when=size > INLINE_ANSWER_BYTES)
        metrics.record_stages(served.name, ready.tokenize_s, queue_s, inference_s, time.monotonic() - call.started)
        return answer

    async def _prepare(self, served: ServedModel, call: Call[EncodeRequest], selection: Selection) -> _Prepared:
        """Make a request ready for the queue, and hold its answer's bytes.

        The server's time for it begins here, where it has its turn: how slowly a stream is read is its reader's affair.
        When its caller's is up gRPC ends it.
        """
        try:
            async with call.share.turn():
                end_s = call.start_clock(self._limits.max_deadline_s)
                describe = call.request.outputs.by_token
                sequences, tokenize_s = await self._sequences(
                    served, call.request, call.place, end_s, describe=describe
                )
                lengths = [sequence.length for sequence in sequences]
                places = selection.places * len(lengths) + sum(lengths) if selection.looks_inside else 0
                looks = await self.texts.run(
                    lambda: selection.looks(sequences), places, when=places > INLINE_PLACES, until_s=end_s
                )
                size = selection.answer_bytes(lengths, looks)
                check_answer_size(selection, size, len(lengths), call.most_bytes, self._limits.max_answer_bytes)
                await call.share.take(size + (DESCRIBED_MESSAGE_BYTES * sum(lengths) if describe else 0), end_s)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the request could wait for a batch") from error
        return _Prepared(sequences, looks, size, tokenize_s)

    async def _sequences(
        self, served: ServedModel, request: TokenizeRequest, place: Place, end_s: float, *, describe: bool
    ) -> tuple[list[Sequence], float]:
        """Tokenize a request's inputs; returns the sequences and the seconds it took."""

        def tokenize() -> list[Sequence]:
            return served.tokenizer.tokenize(request, describe=describe)

        return await self.tokenized(served, tokenize, chars_of(request.inputs), place, end_s, describe=describe)

    async def tokenized(
        self,
        served: ServedModel,
        tokenize: Callable[[], list[Sequence]],
        chars: int,
        place: Place,
        end_s: float,
        *,
        describe: bool,
    ) -> tuple[list[Sequence], float]:
        """Have a request's texts tokenized within the limits on tokens and memory.

        Args:
            served: The model.
            tokenize: Does it.
            chars: Of the texts, as `chars_of` counts them.
            place: What the request holds while it is in work.
            end_s: When its time is up, on the loop's clock.
            describe: Whether sequences carry their `Tokens`.

        Returns:
            The sequences and the seconds that it took.

        Raises:
            InvalidRequest: There are too many tokens, or `tokenize` refuses a text.
            TimeoutError: The time is up.
        """
        started = time.perf_counter()

        def work() -> list[Sequence]:
            try:
                return tokenize()
            finally:
                if chars >= _TRIMMED_CHARS:
                    trim()

        with stage("tokenize"):
            sequences = await self.texts.run(work, chars * (1 + describe), when=chars > _INLINE_CHARS, until_s=end_s)
        seconds = time.perf_counter() - started
        truncated = sum(sequence.original_length > sequence.length for sequence in sequences)
        tokens = sum(item.length for item in sequences)
        metrics.record_tokenized(served.name, len(sequences), tokens, truncated, seconds)
        note(served.name, served.placement.provider, inputs=len(sequences), tokens=tokens)
        if tokens > self._limits.max_tokens:
            raise InvalidRequest(
                f"the request has {tokens:,} tokens, more than this server's {self._limits.max_tokens:,}; "
                "send fewer or shorter inputs in one request"
            )
        if describe:
            place.weigh(_DESCRIBED_BYTES * tokens)
        return sequences, seconds


def _check_some(request: TokenizeRequest) -> None:
    if not request.inputs:
        raise InvalidRequest("the request has no inputs; send at least one")


def chars_of(inputs: Iterable[Input]) -> int:
    """Count the characters of texts, and of token ids what costs as much."""
    total = 0
    for item in inputs:
        if isinstance(item, TokenIdsInput):
            total += _ID_CHARS * len(item.ids)
        else:
            total += len(item.text) + len(item.pair or "")
    return total
