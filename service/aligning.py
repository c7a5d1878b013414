"""Aligning: the work of one request of pairs, from what is asked to what is answered.

Pairs go the way of all requests: the same door, the same turns, the same queue, the same bounds on what is held.
May import: attention, cross, encoding, pairing, served, request, metrics, errors.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from service import metrics
from service.attention import Attention
from service.cross import Cross
from service.encoding import (
    DESCRIBED_MESSAGE_BYTES,
    INLINE_ANSWER_BYTES,
    INLINE_PLACES,
    Call,
    Encoding,
    RequestLimits,
    chars_of,
)
from service.errors import DeadlineExceeded, InvalidRequest
from service.pairing import Pair, Pairing, check_answer, paired, result
from service.request import AlignRequest, AlignResult, Timings
from service.served import Models, ServedModel

_NO_OUTPUTS: frozenset[str] = frozenset()

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that is ready for the queue.

    Attributes:
        pairs: Its pairs.
        crosses: What is wanted of each.
        answer_bytes: Of its answer's tensors.
        tokenize_s: How long tokenizing took.
    """

    pairs: list[Pair]
    crosses: list[Cross]
    answer_bytes: int
    tokenize_s: float


class Aligning:
    """Does the work of requests of pairs for the served models."""

    def __init__(self, models: Models, encoding: Encoding, limits: RequestLimits) -> None:
        """Store the parts."""
        self._models = models
        self._encoding = encoding
        self._limits = limits

    async def align(self, call: Call[AlignRequest], finish: Callable[[AlignResult], Answer]) -> Answer:
        """Answer one request; `finish` turns the result into what is sent."""
        return await self._encoding.answered(call, lambda served: self._align_with(served, call, finish))

    async def _align_with(
        self, served: ServedModel, call: Call[AlignRequest], finish: Callable[[AlignResult], Answer]
    ) -> Answer:
        """Answer a request by one version of its model from beginning to end."""
        pairing = self._pairing(served)
        if not call.request.pairs:
            raise InvalidRequest("the request has no pairs; send at least one source with its target")
        asked = pairing.select(call.request)
        served.engine.check_room(len(call.request.pairs), call.deadline_s, call.caller)  # before it is tokenized
        ready = await self._prepare(served, pairing, call, asked)
        sources = [pair.source for pair in ready.pairs]
        encoded = await served.engine.submit(
            sources, _NO_OUTPUTS, call.deadline_s, caller=call.caller, looks=ready.crosses
        )

        def build() -> Answer:
            results = []
            for place, (pair, cross) in enumerate(zip(ready.pairs, ready.crosses, strict=True)):
                results.append(result(pair, cross, encoded.rows[place]))
                encoded.rows[place] = {}
            total_s = time.monotonic() - call.started
            timings = Timings(ready.tokenize_s, encoded.queue_s, encoded.inference_s, total_s)
            return finish(AlignResult(results, timings, served.name, served.artifact.digest))

        size = ready.answer_bytes
        answer = await self._encoding.answers.run(build, size, when=size > INLINE_ANSWER_BYTES)
        total_s = time.monotonic() - call.started
        metrics.record_stages(served.name, ready.tokenize_s, encoded.queue_s, encoded.inference_s, total_s)
        return answer

    def _pairing(self, served: ServedModel) -> Pairing:
        """Give what a model makes of pairs.

        Raises:
            InvalidRequest: It has no decoder.
        """
        if served.pairing is not None:
            return served.pairing
        others = [other.name for other in self._models.all() if other.pairing is not None]
        raise InvalidRequest(
            f"model {served.name!r} is an encoder alone, and Align needs an encoder-decoder (T5, BART, Marian); "
            f"{'name one of: ' + ', '.join(others) if others else 'none is served here'}. Align takes a target that is "
            "given; this server generates no text"
        )

    async def _prepare(
        self, served: ServedModel, pairing: Pairing, call: Call[AlignRequest], asked: Attention
    ) -> _Prepared:
        """Make a request ready for the queue, and hold its answer's bytes; the server's time for it begins here."""
        request = call.request
        chars = chars_of(item for pair in request.pairs for item in pair)
        try:
            async with call.share.turn():
                end_s = call.start_clock(self._limits.max_deadline_s)
                sequences, tokenize_s = await self._encoding.tokenized(
                    served, lambda: pairing.tokenize(request), chars, call.place, end_s, describe=True
                )
                tokens, pairs = sum(sequence.length for sequence in sequences), paired(sequences)
                places = asked.places * len(pairs) + tokens
                crosses = await self._encoding.texts.run(
                    lambda: [pairing.cross(request, asked, place, pair) for place, pair in enumerate(pairs)],
                    places,
                    when=places > INLINE_PLACES,
                    until_s=end_s,
                )
                size = sum(cross.bytes for cross in crosses)
                check_answer(asked, request, size, call.most_bytes)
                await call.share.take(size + DESCRIBED_MESSAGE_BYTES * tokens, end_s)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the request could wait for a batch") from error
        return _Prepared(pairs, crosses, size, tokenize_s)
