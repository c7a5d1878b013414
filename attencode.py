"""attencode: what a transformer encoder knows about a text, over gRPC.

import attencode

with attencode.Client("127.0.0.1:50051") as client:
client.encode(["time flies like an arrow"]).pooled  # (1, hidden) float32
"""

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
from service.request import (
    EncodeRequest,
    EncodeResult,
    InputResult,
    ModelInfo,
    Outputs,
    Pooled,
    TextInput,
    TokenIdsInput,
    TokenizeResult,
    Tokens,
)
from service.statuses import RemoteError

__all__ = [
    "AsyncClient",
    "AttencodeError",
    "Attended",
    "Attention",
    "Client",
    "DeadlineExceeded",
    "EncodeRequest",
    "EncodeResult",
    "InputResult",
    "InternalFault",
    "InvalidRequest",
    "ModelInfo",
    "NotWritten",
    "Outputs",
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
    "encode_request",
]
