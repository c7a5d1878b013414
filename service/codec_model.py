"""Codec of GetModel: what a server says of a model, to its dataclass and back.

May import: pb, codec_enums, request, values.
"""

from dataclasses import asdict

from service.codec_enums import POOLINGS, number
from service.pb import encoder_pb2 as pb
from service.request import DecoderInfo, ModelInfo, ReplicaInfo
from service.values import text


def encode_get_model_request(model: str) -> pb.GetModelRequest:
    """Write a GetModelRequest.

    Raises:
        InvalidRequest: A name that the wire cannot carry.
    """
    return pb.GetModelRequest(model=text("model", model))


def encode_model_info(info: ModelInfo) -> pb.GetModelResponse:
    """Write a GetModelResponse, whose fields have ModelInfo's names."""
    values = {name: getattr(info, name) for name in ModelInfo.__slots__}
    values["default_pooling"] = number("pooling", POOLINGS, info.default_pooling)
    values["replicas"] = [pb.Replica(**asdict(replica)) for replica in info.replicas]
    values["decoder"] = None if info.decoder is None else pb.Decoder(**asdict(info.decoder))
    return pb.GetModelResponse(**values)


def decode_model_info(message: pb.GetModelResponse) -> ModelInfo:
    """Read a GetModelResponse."""
    values = {name: getattr(message, name) for name in ModelInfo.__slots__}
    values["default_pooling"] = POOLINGS.get(message.default_pooling, "")
    values["prompts"] = dict(message.prompts)
    values["models"] = list(message.models)
    values["replicas"] = [
        ReplicaInfo(**{name: getattr(replica, name) for name in ReplicaInfo.__slots__}) for replica in message.replicas
    ]
    decoder = {name: getattr(message.decoder, name) for name in DecoderInfo.__slots__}
    values["decoder"] = DecoderInfo(**decoder) if message.HasField("decoder") else None
    return ModelInfo(**values)
