"""Targets: what a fuzzer's bytes go through, and what must hold of it whatever they are.

Each is a function of bytes that returns a word for what came of them, and raises where the code did what it must not.
May import: service, source, messages.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from fuzz.messages import align_request, any_message, encode_request
from fuzz.source import Source
from google.protobuf.message import DecodeError

from service import codec
from service.answers import aligned, attended, streamed
from service.artifact import Artifact, open_description
from service.chunks import Joiner, cut
from service.codec_align import decode_align_request, encode_align_request
from service.codec_model import decode_model_info
from service.errors import AttencodeError, InternalFault, InvalidRequest
from service.outputs import Selection, check_answer_size, select
from service.pb import encoder_pb2 as pb
from service.reduce import Look, Reducer
from service.request import AlignRequest, EncodeRequest, TextInput, TokenIdsInput
from service.resumption import Resumption, Unanswered
from service.statuses import Callee
from service.tokenization import Sequence, TextTokenizer

Target = Callable[[bytes], str]

_REQUESTS = (pb.EncodeRequest, pb.EncodeStreamRequest, pb.AlignRequest, pb.TokenizeRequest, pb.GetModelRequest)
_ANSWERS = (pb.EncodeResponse, pb.AlignResponse, pb.TokenizeResponse, pb.GetModelResponse)
_CALLEE = Callee("127.0.0.1:1", 1.0)


def request_bytes(source: Source) -> tuple[Any, bytes]:
    """Give a kind of request and its bytes: any, damaged, with any fields, or mostly right."""
    kind, way = source.pick(_REQUESTS), source.byte()
    if way < 40:
        return kind, source.data(source.left)
    if way < 150 and kind in (pb.EncodeRequest, pb.EncodeStreamRequest):
        message = encode_request(source)
        whole = message if kind is pb.EncodeRequest else pb.EncodeStreamRequest(id=source.unsigned(64), request=message)
        return kind, whole.SerializeToString()
    if way < 150 and kind is pb.AlignRequest:
        return kind, align_request(source).SerializeToString()
    data = bytearray(any_message(kind, source).SerializeToString())
    for _ in range(source.few() if way > 220 and data else 0):
        data[source.below(len(data))] = source.byte()
    return kind, bytes(data)


def codec_requests(data: bytes) -> str:
    """A request is read or refused; one that is read says the same when it is written and read again."""
    kind, sent = request_bytes(Source(data))
    try:
        message = codec.parse(kind, sent)
        if kind is pb.GetModelRequest:
            return "read"
        if kind is pb.TokenizeRequest:
            again = codec.encode_tokenize_request(request := codec.decode_tokenize_request(message))
            assert codec.decode_tokenize_request(again) == request
            return "read"
        if kind is pb.AlignRequest:
            pairs = decode_align_request(message)
            written = encode_align_request(pairs).SerializeToString()
            assert decode_align_request(pb.AlignRequest.FromString(written)) == pairs
            return "read"
        message = message.request if kind is pb.EncodeStreamRequest else message
        request = codec.decode_encode_request(message)
    except InvalidRequest:
        return "refused"
    if request.outputs.pooled and request.outputs.pooled.dimensions == 0:
        return "refused later"
    written = codec.encode_encode_request(request).SerializeToString()
    assert codec.decode_encode_request(pb.EncodeRequest.FromString(written)) == request
    return "read"


class OnArtifact:
    """Targets that take a model's description and tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.artifact: Artifact = open_description(folder)
        self.tokenizer = TextTokenizer(self.artifact)

    def tokenization(self, data: bytes) -> str:
        """Texts become tokens that cover them, or are refused; with and without description the same ones."""
        source = Source(data)
        message = any_message(pb.TokenizeRequest, source) if source.chance(60) else encode_request(source)
        message.model, describe = "", source.chance(200)
        message.ClearField("prompt_name")
        message = pb.TokenizeRequest(inputs=message.inputs[:16], truncation=message.truncation)
        try:
            request = codec.decode_tokenize_request(message)
            sequences = self.tokenizer.tokenize(request, describe=describe)
        except InvalidRequest:
            return "refused"
        for item, sequence in zip(request.inputs, sequences, strict=True):
            self._check(sequence, described=describe)
            if describe:
                self._check_spans(item, sequence)
        others = self.tokenizer.tokenize(request, describe=not describe)
        for sequence, other in zip(sequences, others, strict=True):
            np.testing.assert_array_equal(sequence.input_ids, other.input_ids)
            assert sequence.original_length == other.original_length
        answer = codec.encode_tokenize_result(_tokenized(sequences))
        codec.decode_tokenize_response(pb.TokenizeResponse.FromString(answer.SerializeToString()))
        return "tokens"

    def _check(self, sequence: Sequence, *, described: bool) -> None:
        length = sequence.length
        assert 0 < length <= min(self.artifact.max_tokens, sequence.original_length)
        assert 0 <= sequence.input_ids.min() <= sequence.input_ids.max() < self.artifact.vocab_size
        types = sequence.token_type_ids
        assert types is None or (len(types) == length and types.max() < max(1, self.artifact.type_vocab_size))
        assert (sequence.tokens is not None) == described
        if sequence.tokens is not None:
            lists = (sequence.tokens.texts, sequence.tokens.char_spans, sequence.tokens.byte_spans)
            lists += (sequence.tokens.words, sequence.tokens.sequences, sequence.tokens.special)  # type: ignore[assignment]
            assert {len(values) for values in lists} == {length}
            assert set(sequence.tokens.sequences) <= {-1, 0, 1}
            assert not all(sequence.tokens.special)

    def _check_spans(self, item: TextInput | TokenIdsInput, sequence: Sequence) -> None:
        tokens = sequence.tokens
        assert tokens is not None
        if isinstance(item, TokenIdsInput):
            assert set(tokens.char_spans) == {(0, 0)}
            return
        for place, (start, end) in enumerate(tokens.char_spans):
            text = item.pair or "" if tokens.sequences[place] == 1 else item.text
            assert 0 <= start <= end <= len(text)
            first, last = tokens.byte_spans[place]
            assert text.encode()[first:last] == text[start:end].encode()
            assert tokens.words[place] >= -1

    def selection(self, data: bytes) -> str:
        """What a request asks for is resolved or refused; an answer has the bytes that were reckoned, either way."""
        source = Source(data)
        message = any_message(pb.EncodeRequest, source) if source.chance(50) else encode_request(source)
        message.ClearField("prompt_name")
        del message.inputs[6:]
        try:
            request = codec.decode_encode_request(message)
            selection = (
                select(request.outputs, self.artifact) if request.outputs.by_token or request.outputs.pooled else None
            )
            sequences = self.tokenizer.tokenize(request, describe=True)
            if selection is None or not sequences:
                return "nothing asked"
            looks = selection.looks(sequences)
            lengths = [sequence.length for sequence in sequences]
            size = selection.answer_bytes(lengths, looks)
            check_answer_size(selection, size, len(lengths), 2**22, 2**23)
        except InvalidRequest:
            return "refused"
        return self._answer(source, selection, sequences, looks, size)

    def _answer(
        self, source: Source, selection: Selection, sequences: list[Sequence], looks: tuple[Look, ...], size: int
    ) -> str:
        draw = np.random.default_rng(source.byte())
        rows = [self._row(draw, sequence, looks[place] if looks else None) for place, sequence in enumerate(sequences)]
        from service.request import EncodeResult

        results = [
            selection.result(sequence, rows[place], looks[place] if looks else None)
            for place, sequence in enumerate(sequences)
        ]
        result = EncodeResult(selection.pooled(rows), results, model="m", model_digest="d")
        message = codec.encode_encode_result(result)
        assert _tensor_bytes(message) == size
        read = codec.decode_encode_response(pb.EncodeResponse.FromString(message.SerializeToString()))
        joiner, joined = Joiner(), None
        for part in cut(1, result, source.pick((0, 10_000, 2**26))).messages():
            joined = joiner.add(pb.EncodeStreamResponse.FromString(part))
        assert joined is not None
        for one, other in zip(read.results, joined.results, strict=True):
            for name in ("attention", "attention_keys", "hidden_states", "query_vectors", "token_embeddings"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            if one.attention is not None:
                assert np.isfinite(one.attention).all()
                assert one.attention.min() >= 0
                assert one.attention.max() <= 1.001
        return "answered"

    def _row(self, draw: np.random.Generator, sequence: Sequence, look: Look | None) -> Mapping[str, Any]:
        """Make what a model might yield of a sequence."""
        artifact, length = self.artifact, sequence.length
        row = {f"pooled_{name}": draw.normal(size=artifact.pooled_size(name)) for name in artifact.poolings}
        names = ["last_hidden_state", *(f"hidden_states_{layer}" for layer in range(artifact.num_hidden_layers))]
        row |= {name: draw.normal(size=(length, artifact.hidden_size)) for name in names}
        row = {name: array.astype(np.float32) for name, array in row.items()}
        if look is None:
            return row
        reducer, heads = Reducer(look), artifact.num_attention_heads
        for layer in look.layers:
            weights = draw.random((heads, length, length), np.float32)
            vectors = draw.random((2, heads, length, artifact.head_dim), np.float32)
            outputs = {"attention": weights / weights.sum(-1, keepdims=True)}
            reducer.add(layer, {**outputs, "query_vectors": vectors[0], "key_vectors": vectors[1]})
        return {**row, **reducer.arrays()}


def _tokenized(sequences: list[Sequence]) -> Any:
    from service.request import InputResult, TokenizeResult

    return TokenizeResult([InputResult(item.length, item.original_length, item.tokens) for item in sequences])


def _tensor_bytes(message: pb.EncodeResponse) -> int:
    size = len(message.pooled.data)
    for item in message.results:
        size += sum(len(value.data) for _, value in item.ListFields() if isinstance(value, pb.Tensor))
    return size


def answers(data: bytes) -> str:
    """Whatever a server sends, the client gives an answer or an error of its own kind."""
    source = Source(data)
    kind = source.pick(_ANSWERS)
    sent = source.data(source.left) if source.chance(30) else any_message(kind, source).SerializeToString()
    try:
        message = kind.FromString(sent)
    except DecodeError:
        return "no message"  # gRPC itself makes a status of it
    try:
        if kind is pb.EncodeResponse:
            codec.decode_encode_response(message)
        elif kind is pb.AlignResponse:
            text = TextInput("abc")
            aligned(AlignRequest(((text, text),) * len(message.results)), message)
        elif kind is pb.TokenizeResponse:
            codec.decode_tokenize_response(message)
        else:
            decode_model_info(message)
    except AttencodeError:
        return "refused"
    return "read"


def streamed_answers(data: bytes) -> str:
    """Whatever comes on a stream, and in whatever order, the same holds."""
    source = Source(data)
    request = EncodeRequest((TextInput("abc"),))
    items, joiner = Resumption([request] * 4), Joiner()
    for _ in items.messages():
        pass
    told = "nothing"
    for _ in range(1 + source.below(6)):
        if source.chance(120):
            parts = [pb.EncodeStreamResponse.FromString(part) for part in _right(items.due, source)]
        else:
            parts = [any_message(pb.EncodeStreamResponse, source)]
        for message in parts:
            if source.chance(200):
                message.id = items.due
            try:
                answer = streamed(message, joiner, items, _CALLEE)
                if answer is not None and not isinstance(answer, AttencodeError):
                    attended(request, answer)
                    told = "read"
            except InternalFault:
                return "refused"
            except (Unanswered, AttencodeError):
                told = "error"
            if items.due >= 4:
                return told
    return told


def _right(number: int, source: Source) -> list[bytes]:
    from service.request import EncodeResult, InputResult

    array = np.arange(1 + source.below(20), dtype=np.float32)
    result = EncodeResult(array[None], [InputResult(1, 1, token_embeddings=array[None])])
    parts = list(cut(number, result, source.pick((0, 2**26))).messages())
    if source.chance(40):
        parts.reverse()
    return parts


class Status(grpc.RpcError):
    """A call's end as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, details: str | None, trailing: Any) -> None:
        super().__init__()
        self._told = (code, details, trailing)

    def code(self) -> grpc.StatusCode:
        return self._told[0]

    def details(self) -> str | None:
        return self._told[1]

    def trailing_metadata(self) -> Any:
        return self._told[2]


def statuses(data: bytes) -> str:
    """Whatever a call ends with becomes an error with a message, and a delay that can be slept."""
    source = Source(data)
    code = source.pick(tuple(grpc.StatusCode))
    words = (
        "Received message larger than max (",
        "9" * source.below(6000),
        " vs. 4)",
        "errors resolving ",
        "CERTIFICATE_VERIFY_FAILED: ",
    )
    details = source.pick((None, "", "".join(source.pick((*words, source.text())) for _ in range(source.below(6)))))
    values = ("", "0", "1", "0.5", "-1", "nan", "inf", "1e999", "abc", "\x00", b"1", b"\xff", source.text())
    names = (
        "attencode-retry-delay-seconds",
        "attencode-fits-stream",
        "attencode-refused-reason",
        "grpc-status-details-bin",
        "x",
    )
    trailing = source.pick((None, (), [(source.pick(names), source.pick(values)) for _ in range(source.below(5))]))
    error = _CALLEE.error(Status(code, details, trailing))
    assert isinstance(error, AttencodeError)
    delay_s = getattr(error, "retry_delay_s", 0.0)
    assert math.isfinite(delay_s)
    assert delay_s >= 0
    return type(error).__name__
