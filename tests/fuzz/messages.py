"""Messages: those of the contract, made of a source of choices; whatever fields the contract has, they are set.

`any_message` sets fields as they come, so that most are refused; `encode_request` and `align_request` make what the
server mostly takes, so that what is behind the first checks is reached too. May import: pb, source.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fuzz.source import Source
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from service.pb import encoder_pb2 as pb

VOCABULARY = 41  # of the tiny checkpoint
CLS, SEP = 2, 3
_FLOATS = (0.0, 1.0, -1.0, 1e308, -1e308, 1e-320, float("inf"), float("-inf"), float("nan"))
_DEEPEST = 6


def any_message(kind: type[Message], source: Source, depth: int = 0) -> Any:
    """Make a message of a kind with fields set at random."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(source.few() % 5):
                getattr(message, field.name)[source.text()] = source.text()
        elif field.is_repeated:
            values = [_value(field, source, depth) for _ in range(source.few() if depth < _DEEPEST else 0)]
            getattr(message, field.name).extend(values)
        elif source.chance(110):
            value = _value(field, source, depth)
            if field.message_type is not None:
                getattr(message, field.name).CopyFrom(value)
                getattr(message, field.name).SetInParent()
            else:
                setattr(message, field.name, value)
    return message


def _value(field: Any, source: Source, depth: int) -> Any:
    if field.message_type is not None:
        return any_message(field.message_type._concrete_class, source, depth + 1)
    return _MAKE[field.type](source, field)


_MAKE: Mapping[int, Callable[[Source, Any], Any]] = {
    Field.TYPE_ENUM: lambda source, field: (
        source.below(len(field.enum_type.values) + 1) if source.byte() < 250 else source.signed(32)
    ),
    Field.TYPE_STRING: lambda source, _: source.text() if source.chance(128) else "",
    Field.TYPE_BYTES: lambda source, _: source.data(source.below(80)),
    Field.TYPE_BOOL: lambda source, _: source.chance(128),
    Field.TYPE_DOUBLE: lambda source, _: source.pick(_FLOATS),
    Field.TYPE_UINT64: lambda source, _: source.unsigned(64),
    Field.TYPE_UINT32: lambda source, _: source.unsigned(32),
    Field.TYPE_SINT32: lambda source, _: source.signed(32),
    Field.TYPE_INT32: lambda source, _: source.signed(32),
}
"""How a field of each of the contract's types is made."""


def encode_request(source: Source) -> pb.EncodeRequest:
    """Make a request that is mostly right."""
    message = pb.EncodeRequest(inputs=[_input(source) for _ in range(1 + source.few() % 9)])
    message.truncation = source.pick((0, 1, 2, 0, 1, 2, 3))
    message.data_type = source.pick((0, 1, 2))
    message.tokens = source.chance(64)
    if source.chance(120):
        message.pooled.pooling = source.pick((0, 1, 2, 3, 4))
        if source.chance(128):
            message.pooled.normalize = source.chance(128)
        if source.chance(100):
            message.pooled.dimensions = 1 + source.below(25)
    if source.chance(60):
        message.token_embeddings.SetInParent()
    if source.chance(60):
        message.hidden_states.layers.extend(_choice(source, 3))
        message.hidden_states.SetInParent()
    if source.chance(60):
        message.query_key_vectors.layers.extend(_choice(source, 2))
        message.query_key_vectors.heads.extend(_choice(source, 3))
        message.query_key_vectors.SetInParent()
    if source.chance(150):
        message.attention.CopyFrom(_attention(source))
        message.attention.SetInParent()
    return message


def align_request(source: Source) -> pb.AlignRequest:
    """Make a request of pairs that is mostly right."""
    pairs = [pb.SourceTarget(source=_input(source), target=_target(source)) for _ in range(1 + source.few() % 6)]
    message = pb.AlignRequest(pairs=pairs, truncation=source.pick((0, 1, 2, 3)), data_type=source.pick((0, 1, 2)))
    if source.chance(180):
        message.attention.CopyFrom(_attention(source))
        message.attention.rollout = source.chance(20)
    return message


def _target(source: Source) -> pb.Input:
    return pb.Input(text=_text(source)) if source.chance(220) else _input(source)


def _choice(source: Source, count: int) -> list[int]:
    """Choose of so many layers or heads, each at most once, from either end."""
    chosen = [number for number in range(count) if source.chance(100)]
    numbers = [number - count if source.chance(80) else number for number in chosen]
    return numbers[::-1] if source.chance(60) else numbers


def _attention(source: Source) -> pb.AttentionOptions:
    rollout = source.chance(60)
    return pb.AttentionOptions(
        layers=_choice(source, 2),
        heads=_choice(source, 3),
        reduce_heads=source.below(3),
        reduce_layers=0 if rollout else source.below(3),
        rollout=rollout,
        queries=_selection(source) if source.chance(80) else None,
        keys=_selection(source) if source.chance(80) else None,
        top_k=source.pick((0, 0, 1, 2, 5, 40, 2**32 - 1)),
        special_tokens=source.below(4),
        words=source.chance(80),
    )


def _selection(source: Source) -> pb.TokenSelection:
    tokens = [source.below(5) - 2 for _ in range(source.below(4))]
    spans = []
    for _ in range(source.below(3)):
        start = source.below(6)
        spans.append(pb.CharSpan(start=start, end=start + 1 + source.below(9), sequence=int(source.chance(40))))
    return pb.TokenSelection(tokens=tokens, spans=spans)


def _input(source: Source) -> pb.Input:
    kind = source.byte()
    if kind < 140:
        return pb.Input(text=_text(source))
    if kind < 200:
        return pb.Input(pair=pb.TextPair(first=_text(source), second=_text(source)))
    if kind < 252:
        ids = [CLS, *(1 + source.below(VOCABULARY - 1) for _ in range(1 + source.few())), SEP]
        types = [source.below(2) for _ in ids] if source.chance(60) else []
        return pb.Input(token_ids=pb.TokenIds(ids=ids, token_type_ids=types))
    return pb.Input()


def _text(source: Source) -> str:
    """Make a text that mostly has a token."""
    return ("a" if source.chance(200) else "") + source.text()
