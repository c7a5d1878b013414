"""attencode: what a transformer encoder knows about a text, over gRPC.

import attencode

with attencode.Client("127.0.0.1:50051") as client:
client.encode(["time flies like an arrow"]).pooled  # (1, hidden) float32
"""

from service.client import AsyncClient, Client, RemoteError
from service.errors import (
    AttencodeError,
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from service.request import (
    Attention,
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
    encode_request,
)

__all__ = [
    "AsyncClient",
    "AttencodeError",
    "Attention",
    "Client",
    "DeadlineExceeded",
    "EncodeRequest",
    "EncodeResult",
    "InputResult",
    "InternalFault",
    "InvalidRequest",
    "ModelInfo",
    "Outputs",
    "Pooled",
    "QueueFull",
    "RemoteError",
    "TextInput",
    "TokenIdsInput",
    "TokenizeResult",
    "Tokens",
    "Unavailable",
    "encode_request",
]
