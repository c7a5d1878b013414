"""Wire: requests as the bytes that travel, so that a client encodes nothing while it measures.

May import: service's pb, request and codec.
"""

from typing import Any

from service.codec import encode_encode_request
from service.pb import encoder_pb2 as pb
from service.plain import encode_request

ENCODE = "/attencode.v1.Encoder/Encode"
ENCODE_STREAM = "/attencode.v1.Encoder/EncodeStream"
# No retries: each refusal shall be seen. A connection of its own for each channel, as callers have.
CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


def request_bytes(texts: list[str], **options: Any) -> bytes:
    """Give an EncodeRequest of these texts; the options are those of `encode_request`."""
    return bytes(encode_encode_request(encode_request(texts, **options)).SerializeToString())


def stream_item(number: int, request: bytes) -> bytes:
    """Give an EncodeStreamRequest around an EncodeRequest's bytes."""
    message = pb.EncodeStreamRequest(id=number)
    message.request.MergeFromString(request)
    return bytes(message.SerializeToString())
