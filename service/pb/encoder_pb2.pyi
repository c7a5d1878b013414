from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Truncation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATION_UNSPECIFIED: _ClassVar[Truncation]
    TRUNCATION_RIGHT: _ClassVar[Truncation]
    TRUNCATION_LEFT: _ClassVar[Truncation]
    TRUNCATION_OFF: _ClassVar[Truncation]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_CLS: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_MAX: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_SENTENCE: _ClassVar[Pooling]

class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCTION_UNSPECIFIED: _ClassVar[Reduction]
    REDUCTION_MEAN: _ClassVar[Reduction]
    REDUCTION_MAX: _ClassVar[Reduction]

class SpecialTokens(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECIAL_TOKENS_UNSPECIFIED: _ClassVar[SpecialTokens]
    SPECIAL_TOKENS_KEEP: _ClassVar[SpecialTokens]
    SPECIAL_TOKENS_DROP: _ClassVar[SpecialTokens]
    SPECIAL_TOKENS_RENORMALIZE: _ClassVar[SpecialTokens]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]

class TensorField(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_FIELD_UNSPECIFIED: _ClassVar[TensorField]
    TENSOR_FIELD_POOLED: _ClassVar[TensorField]
    TENSOR_FIELD_TOKEN_EMBEDDINGS: _ClassVar[TensorField]
    TENSOR_FIELD_HIDDEN_STATES: _ClassVar[TensorField]
    TENSOR_FIELD_ATTENTION: _ClassVar[TensorField]
    TENSOR_FIELD_ATTENTION_KEYS: _ClassVar[TensorField]
    TENSOR_FIELD_QUERY_VECTORS: _ClassVar[TensorField]
    TENSOR_FIELD_KEY_VECTORS: _ClassVar[TensorField]
TRUNCATION_UNSPECIFIED: Truncation
TRUNCATION_RIGHT: Truncation
TRUNCATION_LEFT: Truncation
TRUNCATION_OFF: Truncation
POOLING_UNSPECIFIED: Pooling
POOLING_CLS: Pooling
POOLING_MEAN: Pooling
POOLING_MAX: Pooling
POOLING_LAST: Pooling
POOLING_SENTENCE: Pooling
REDUCTION_UNSPECIFIED: Reduction
REDUCTION_MEAN: Reduction
REDUCTION_MAX: Reduction
SPECIAL_TOKENS_UNSPECIFIED: SpecialTokens
SPECIAL_TOKENS_KEEP: SpecialTokens
SPECIAL_TOKENS_DROP: SpecialTokens
SPECIAL_TOKENS_RENORMALIZE: SpecialTokens
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_INT32: DataType
TENSOR_FIELD_UNSPECIFIED: TensorField
TENSOR_FIELD_POOLED: TensorField
TENSOR_FIELD_TOKEN_EMBEDDINGS: TensorField
TENSOR_FIELD_HIDDEN_STATES: TensorField
TENSOR_FIELD_ATTENTION: TensorField
TENSOR_FIELD_ATTENTION_KEYS: TensorField
TENSOR_FIELD_QUERY_VECTORS: TensorField
TENSOR_FIELD_KEY_VECTORS: TensorField

class Input(_message.Message):
    __slots__ = ("text", "pair", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    pair: TextPair
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., pair: _Optional[_Union[TextPair, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class TextPair(_message.Message):
    __slots__ = ("first", "second")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    first: str
    second: str
    def __init__(self, first: _Optional[str] = ..., second: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids", "token_type_ids")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TYPE_IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    token_type_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., token_type_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PooledOptions(_message.Message):
    __slots__ = ("pooling", "normalize", "dimensions")
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    pooling: Pooling
    normalize: bool
    dimensions: int
    def __init__(self, pooling: _Optional[_Union[Pooling, str]] = ..., normalize: bool = ..., dimensions: _Optional[int] = ...) -> None: ...

class TokenEmbeddingsOptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HiddenStatesOptions(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ...) -> None: ...

class AttentionOptions(_message.Message):
    __slots__ = ("layers", "heads", "reduce_heads", "reduce_layers", "rollout", "queries", "keys", "top_k", "special_tokens", "words")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    REDUCE_HEADS_FIELD_NUMBER: _ClassVar[int]
    REDUCE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    heads: _containers.RepeatedScalarFieldContainer[int]
    reduce_heads: Reduction
    reduce_layers: Reduction
    rollout: bool
    queries: TokenSelection
    keys: TokenSelection
    top_k: int
    special_tokens: SpecialTokens
    words: bool
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., heads: _Optional[_Iterable[int]] = ..., reduce_heads: _Optional[_Union[Reduction, str]] = ..., reduce_layers: _Optional[_Union[Reduction, str]] = ..., rollout: bool = ..., queries: _Optional[_Union[TokenSelection, _Mapping]] = ..., keys: _Optional[_Union[TokenSelection, _Mapping]] = ..., top_k: _Optional[int] = ..., special_tokens: _Optional[_Union[SpecialTokens, str]] = ..., words: bool = ...) -> None: ...

class TokenSelection(_message.Message):
    __slots__ = ("tokens", "spans")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    spans: _containers.RepeatedCompositeFieldContainer[CharSpan]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., spans: _Optional[_Iterable[_Union[CharSpan, _Mapping]]] = ...) -> None: ...

class CharSpan(_message.Message):
    __slots__ = ("start", "end", "sequence")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    sequence: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class QueryKeyOptions(_message.Message):
    __slots__ = ("layers", "heads")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    heads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., heads: _Optional[_Iterable[int]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("shape", "data_type", "data", "chunked_bytes")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    data_type: DataType
    data: bytes
    chunked_bytes: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., data_type: _Optional[_Union[DataType, str]] = ..., data: _Optional[bytes] = ..., chunked_bytes: _Optional[int] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("model", "inputs", "truncation", "prompt_name", "pooled", "token_embeddings", "hidden_states", "attention", "query_key_vectors", "tokens", "data_type")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    QUERY_KEY_VECTORS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    truncation: Truncation
    prompt_name: str
    pooled: PooledOptions
    token_embeddings: TokenEmbeddingsOptions
    hidden_states: HiddenStatesOptions
    attention: AttentionOptions
    query_key_vectors: QueryKeyOptions
    tokens: bool
    data_type: DataType
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., prompt_name: _Optional[str] = ..., pooled: _Optional[_Union[PooledOptions, _Mapping]] = ..., token_embeddings: _Optional[_Union[TokenEmbeddingsOptions, _Mapping]] = ..., hidden_states: _Optional[_Union[HiddenStatesOptions, _Mapping]] = ..., attention: _Optional[_Union[AttentionOptions, _Mapping]] = ..., query_key_vectors: _Optional[_Union[QueryKeyOptions, _Mapping]] = ..., tokens: bool = ..., data_type: _Optional[_Union[DataType, str]] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("pooled", "results", "timings", "model", "model_digest")
    POOLED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    pooled: Tensor
    results: _containers.RepeatedCompositeFieldContainer[InputResult]
    timings: Timings
    model: str
    model_digest: str
    def __init__(self, pooled: _Optional[_Union[Tensor, _Mapping]] = ..., results: _Optional[_Iterable[_Union[InputResult, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ...) -> None: ...

class InputResult(_message.Message):
    __slots__ = ("num_tokens", "original_num_tokens", "truncated", "tokens", "token_embeddings", "hidden_states", "attention", "attention_keys", "query_axis", "key_axis", "query_vectors", "key_vectors")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_KEYS_FIELD_NUMBER: _ClassVar[int]
    QUERY_AXIS_FIELD_NUMBER: _ClassVar[int]
    KEY_AXIS_FIELD_NUMBER: _ClassVar[int]
    QUERY_VECTORS_FIELD_NUMBER: _ClassVar[int]
    KEY_VECTORS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    original_num_tokens: int
    truncated: bool
    tokens: Tokens
    token_embeddings: Tensor
    hidden_states: Tensor
    attention: Tensor
    attention_keys: Tensor
    query_axis: Axis
    key_axis: Axis
    query_vectors: Tensor
    key_vectors: Tensor
    def __init__(self, num_tokens: _Optional[int] = ..., original_num_tokens: _Optional[int] = ..., truncated: bool = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., token_embeddings: _Optional[_Union[Tensor, _Mapping]] = ..., hidden_states: _Optional[_Union[Tensor, _Mapping]] = ..., attention: _Optional[_Union[Tensor, _Mapping]] = ..., attention_keys: _Optional[_Union[Tensor, _Mapping]] = ..., query_axis: _Optional[_Union[Axis, _Mapping]] = ..., key_axis: _Optional[_Union[Axis, _Mapping]] = ..., query_vectors: _Optional[_Union[Tensor, _Mapping]] = ..., key_vectors: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Axis(_message.Message):
    __slots__ = ("starts", "ends")
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, starts: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids", "texts", "char_starts", "char_ends", "byte_starts", "byte_ends", "words", "sequences", "special")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    CHAR_STARTS_FIELD_NUMBER: _ClassVar[int]
    CHAR_ENDS_FIELD_NUMBER: _ClassVar[int]
    BYTE_STARTS_FIELD_NUMBER: _ClassVar[int]
    BYTE_ENDS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    char_starts: _containers.RepeatedScalarFieldContainer[int]
    char_ends: _containers.RepeatedScalarFieldContainer[int]
    byte_starts: _containers.RepeatedScalarFieldContainer[int]
    byte_ends: _containers.RepeatedScalarFieldContainer[int]
    words: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    special: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., char_starts: _Optional[_Iterable[int]] = ..., char_ends: _Optional[_Iterable[int]] = ..., byte_starts: _Optional[_Iterable[int]] = ..., byte_ends: _Optional[_Iterable[int]] = ..., words: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[int]] = ..., special: _Optional[_Iterable[bool]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("tokenize_seconds", "queue_seconds", "inference_seconds", "total_seconds")
    TOKENIZE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokenize_seconds: float
    queue_seconds: float
    inference_seconds: float
    total_seconds: float
    def __init__(self, tokenize_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., inference_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class EncodeStreamRequest(_message.Message):
    __slots__ = ("id", "request")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    id: int
    request: EncodeRequest
    def __init__(self, id: _Optional[int] = ..., request: _Optional[_Union[EncodeRequest, _Mapping]] = ...) -> None: ...

class EncodeStreamResponse(_message.Message):
    __slots__ = ("id", "response", "error", "chunk")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    id: int
    response: EncodeResponse
    error: Error
    chunk: TensorChunk
    def __init__(self, id: _Optional[int] = ..., response: _Optional[_Union[EncodeResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("result", "field", "offset", "data")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    result: int
    field: TensorField
    offset: int
    data: bytes
    def __init__(self, result: _Optional[int] = ..., field: _Optional[_Union[TensorField, str]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_delay_seconds")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retry_delay_seconds: float
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retry_delay_seconds: _Optional[float] = ...) -> None: ...

class AlignRequest(_message.Message):
    __slots__ = ("model", "pairs", "truncation", "prompt_name", "attention", "data_type")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    pairs: _containers.RepeatedCompositeFieldContainer[SourceTarget]
    truncation: Truncation
    prompt_name: str
    attention: AttentionOptions
    data_type: DataType
    def __init__(self, model: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[SourceTarget, _Mapping]]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., prompt_name: _Optional[str] = ..., attention: _Optional[_Union[AttentionOptions, _Mapping]] = ..., data_type: _Optional[_Union[DataType, str]] = ...) -> None: ...

class SourceTarget(_message.Message):
    __slots__ = ("source", "target")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    source: Input
    target: Input
    def __init__(self, source: _Optional[_Union[Input, _Mapping]] = ..., target: _Optional[_Union[Input, _Mapping]] = ...) -> None: ...

class AlignResponse(_message.Message):
    __slots__ = ("results", "timings", "model", "model_digest")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AlignResult]
    timings: Timings
    model: str
    model_digest: str
    def __init__(self, results: _Optional[_Iterable[_Union[AlignResult, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ...) -> None: ...

class AlignResult(_message.Message):
    __slots__ = ("source", "target", "attention", "attention_keys", "query_axis", "key_axis")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_KEYS_FIELD_NUMBER: _ClassVar[int]
    QUERY_AXIS_FIELD_NUMBER: _ClassVar[int]
    KEY_AXIS_FIELD_NUMBER: _ClassVar[int]
    source: InputResult
    target: InputResult
    attention: Tensor
    attention_keys: Tensor
    query_axis: Axis
    key_axis: Axis
    def __init__(self, source: _Optional[_Union[InputResult, _Mapping]] = ..., target: _Optional[_Union[InputResult, _Mapping]] = ..., attention: _Optional[_Union[Tensor, _Mapping]] = ..., attention_keys: _Optional[_Union[Tensor, _Mapping]] = ..., query_axis: _Optional[_Union[Axis, _Mapping]] = ..., key_axis: _Optional[_Union[Axis, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "inputs", "truncation", "prompt_name")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    truncation: Truncation
    prompt_name: str
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., prompt_name: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("results", "model", "model_digest")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[InputResult]
    model: str
    model_digest: str
    def __init__(self, results: _Optional[_Iterable[_Union[InputResult, _Mapping]]] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "model_digest", "model_id", "revision", "family", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_parameters", "max_tokens", "default_pooling", "default_normalize", "default_prompt_name", "prompts", "provider", "precision", "provider_reason", "max_inputs", "max_message_bytes", "server_version", "models", "pooled_size", "replicas", "max_answer_bytes", "max_request_bytes", "decoder")
    class PromptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENTION_HEADS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_POOLING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    POOLED_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    model_id: str
    revision: str
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_parameters: int
    max_tokens: int
    default_pooling: Pooling
    default_normalize: bool
    default_prompt_name: str
    prompts: _containers.ScalarMap[str, str]
    provider: str
    precision: str
    provider_reason: str
    max_inputs: int
    max_message_bytes: int
    server_version: str
    models: _containers.RepeatedScalarFieldContainer[str]
    pooled_size: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    max_answer_bytes: int
    max_request_bytes: int
    decoder: Decoder
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., model_id: _Optional[str] = ..., revision: _Optional[str] = ..., family: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_hidden_layers: _Optional[int] = ..., num_attention_heads: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_parameters: _Optional[int] = ..., max_tokens: _Optional[int] = ..., default_pooling: _Optional[_Union[Pooling, str]] = ..., default_normalize: bool = ..., default_prompt_name: _Optional[str] = ..., prompts: _Optional[_Mapping[str, str]] = ..., provider: _Optional[str] = ..., precision: _Optional[str] = ..., provider_reason: _Optional[str] = ..., max_inputs: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., server_version: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., pooled_size: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., max_answer_bytes: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., decoder: _Optional[_Union[Decoder, _Mapping]] = ...) -> None: ...

class Decoder(_message.Message):
    __slots__ = ("num_layers", "num_heads", "max_tokens")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_heads: int
    max_tokens: int
    def __init__(self, num_layers: _Optional[int] = ..., num_heads: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("id", "node", "device", "state", "digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    node: str
    device: str
    state: str
    digest: str
    def __init__(self, id: _Optional[str] = ..., node: _Optional[str] = ..., device: _Optional[str] = ..., state: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...
