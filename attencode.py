"""attencode: what a transformer encoder knows about a text, over gRPC.

import attencode

with attencode.Client("127.0.0.1:50051") as client:
client.encode(["time flies like an arrow"]).pooled  # (1, hidden) float32
"""

from service.aligned import Aligned, WordPair
from service.attended import Attended
from service.attention import Attention, Places, QueryKeyVectors, Span
from service.client import AsyncClient, Client
from service.credentials import Tls
from service.errors import (
    AttencodeError,
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    NotWritten,
    QueueFull,
    Unauthenticated,
    Unavailable,
)
from service.plain import encode_request
from service.plain_align import align_request
from service.request import (
    AlignRequest,
    DecoderInfo,
    EncodeRequest,
    EncodeResult,
    InputResult,
    ModelInfo,
    Outputs,
    PairResult,
    Pooled,
    TextInput,
    TokenIdsInput,
    TokenizeResult,
    Tokens,
)
from service.statuses import RemoteError

__all__ = [
    "AlignRequest",
    "Aligned",
    "AsyncClient",
    "AttencodeError",
    "Attended",
    "Attention",
    "Client",
    "DeadlineExceeded",
    "DecoderInfo",
    "EncodeRequest",
    "EncodeResult",
    "InputResult",
    "InternalFault",
    "InvalidRequest",
    "ModelInfo",
    "NotWritten",
    "Outputs",
    "PairResult",
    "Places",
    "Pooled",
    "QueryKeyVectors",
    "QueueFull",
    "RemoteError",
    "Span",
    "TextInput",
    "Tls",
    "TokenIdsInput",
    "TokenizeResult",
    "Tokens",
    "Unauthenticated",
    "Unavailable",
    "WordPair",
    "align_request",
    "encode_request",
]
