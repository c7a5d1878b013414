"""Codec outputs: the part of a request that says what is wanted, to messages and back.

May import: pb, codec_enums, attention, request, values, errors.
"""

from service.attention import MOST_PLACES, Attention, Places, QueryKeyVectors, Span
from service.codec_enums import DATA_TYPES, POOLINGS, REDUCTIONS, SPECIAL_TOKENS, lookup, number
from service.errors import InvalidRequest
from service.pb import encoder_pb2 as pb
from service.request import Outputs, Pooled
from service.values import MOST_UNSIGNED, flag, shown, whole, wholes

_OPTIONS = ("pooled", "token_embeddings", "hidden_states", "attention", "query_key_vectors")


def decode_outputs(message: pb.EncodeRequest) -> Outputs:
    """Read what a request wants.

    Raises:
        InvalidRequest: An enum value that does not exist.
    """
    wanted = {name for name in _OPTIONS if message.HasField(name)}
    vectors = message.query_key_vectors
    return Outputs(
        pooled=_decode_pooled(message.pooled) if "pooled" in wanted or not (wanted or message.tokens) else None,
        token_embeddings="token_embeddings" in wanted,
        hidden_states=tuple(message.hidden_states.layers) if "hidden_states" in wanted else None,
        attention=decode_attention(message.attention) if "attention" in wanted else None,
        query_key_vectors=QueryKeyVectors(tuple(vectors.layers), tuple(vectors.heads))
        if "query_key_vectors" in wanted
        else None,
        tokens=message.tokens,
        data_type=lookup("data_type", DATA_TYPES, message.data_type),
    )


def _decode_pooled(message: pb.PooledOptions) -> Pooled:
    return Pooled(
        pooling=lookup("pooling", POOLINGS, message.pooling) if message.pooling else None,
        normalize=message.normalize if message.HasField("normalize") else None,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
    )


def decode_attention(message: pb.AttentionOptions) -> Attention:
    """Read AttentionOptions.

    Raises:
        InvalidRequest: An enum value that does not exist, or too many tokens and spans.
    """
    reduce_heads, reduce_layers = message.reduce_heads, message.reduce_layers
    return Attention(
        layers=tuple(message.layers),
        heads=tuple(message.heads),
        reduce_heads=lookup("reduce_heads", REDUCTIONS, reduce_heads) if reduce_heads else None,
        reduce_layers=lookup("reduce_layers", REDUCTIONS, reduce_layers) if reduce_layers else None,
        rollout=message.rollout,
        queries=_decode_places(message.queries),
        keys=_decode_places(message.keys),
        top_k=message.top_k,
        special_tokens=lookup("special_tokens", SPECIAL_TOKENS, message.special_tokens),
        words=message.words,
    )


def _decode_places(message: pb.TokenSelection) -> Places:
    if (named := len(message.tokens) + len(message.spans)) > MOST_PLACES:
        raise InvalidRequest(
            f"queries or keys name {named:,} tokens and spans, and may name {MOST_PLACES:,}; "
            "name fewer, or join spans that adjoin"
        )
    return Places(tuple(message.tokens), tuple(Span(span.start, span.end, span.sequence) for span in message.spans))


def encode_outputs(outputs: Outputs, message: pb.EncodeRequest) -> None:
    """Write what a request wants into it.

    Raises:
        InvalidRequest: A name or a number that the wire cannot carry.
    """
    if not isinstance(outputs, Outputs):
        raise InvalidRequest(f"outputs must be Outputs(...), got {shown(outputs)}; encode_request makes it")
    message.data_type = number("data_type", DATA_TYPES, outputs.data_type)
    message.tokens = flag("tokens", outputs.tokens)
    if outputs.pooled is not None:
        message.pooled.CopyFrom(_encode_pooled(outputs.pooled))
    if flag("token_embeddings", outputs.token_embeddings):
        message.token_embeddings.SetInParent()
    if outputs.hidden_states is not None:
        message.hidden_states.layers.extend(wholes("hidden_states", outputs.hidden_states))
        message.hidden_states.SetInParent()
    if outputs.query_key_vectors is not None:
        message.query_key_vectors.layers.extend(wholes("query_key_vectors", outputs.query_key_vectors.layers))
        message.query_key_vectors.heads.extend(wholes("heads", outputs.query_key_vectors.heads))
        message.query_key_vectors.SetInParent()
    if outputs.attention is not None:
        message.attention.CopyFrom(encode_attention(outputs.attention))
        message.attention.SetInParent()


def _encode_pooled(pooled: Pooled) -> pb.PooledOptions:
    dimensions, normalize = pooled.dimensions, pooled.normalize
    return pb.PooledOptions(
        pooling=None if pooled.pooling is None else number("pooling", POOLINGS, pooled.pooling),
        normalize=None if normalize is None else flag("normalize", normalize),
        dimensions=None if dimensions is None else whole("dimensions", dimensions, 1, MOST_UNSIGNED),
    )


def encode_attention(attention: Attention) -> pb.AttentionOptions:
    """Write AttentionOptions.

    Raises:
        InvalidRequest: A name or a number that the wire cannot carry.
    """
    reduce_heads, reduce_layers = attention.reduce_heads, attention.reduce_layers
    return pb.AttentionOptions(
        layers=wholes("layers", attention.layers),
        heads=wholes("heads", attention.heads),
        reduce_heads=None if reduce_heads is None else number("reduce_heads", REDUCTIONS, reduce_heads),
        reduce_layers=None if reduce_layers is None else number("reduce_layers", REDUCTIONS, reduce_layers),
        rollout=flag("rollout", attention.rollout),
        queries=_encode_places("queries", attention.queries),
        keys=_encode_places("keys", attention.keys),
        top_k=whole("top_k", attention.top_k, 0, MOST_UNSIGNED),
        special_tokens=number("special_tokens", SPECIAL_TOKENS, attention.special_tokens),
        words=flag("words", attention.words),
    )


def _encode_places(name: str, places: Places) -> pb.TokenSelection | None:
    if not isinstance(places, Places):
        raise InvalidRequest(f"{name} must be Places(tokens, spans), got {shown(places)}")
    if not places:
        return None
    spans = [
        pb.CharSpan(
            **{part: whole(f"{name}: a span's {part}", getattr(span, part), 0, MOST_UNSIGNED) for part in Span._fields}
        )
        for span in places.spans
    ]
    return pb.TokenSelection(tokens=wholes(name, places.tokens), spans=spans)
