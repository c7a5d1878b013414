"""Codec enums: the contract's enums by our names for them, and what is said when one does not exist.

May import: pb, attention, request, errors, numpy.
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from service.attention import Reduction, SpecialTokens
from service.errors import InvalidRequest
from service.pb import encoder_pb2 as pb
from service.request import DataType, Pooling, Truncation

Name = TypeVar("Name", bound=str)

TRUNCATIONS: Mapping[int, Truncation] = {
    pb.TRUNCATION_UNSPECIFIED: "right",
    pb.TRUNCATION_RIGHT: "right",
    pb.TRUNCATION_LEFT: "left",
    pb.TRUNCATION_OFF: "off",
}
POOLINGS: Mapping[int, Pooling] = {
    pb.POOLING_CLS: "cls",
    pb.POOLING_MEAN: "mean",
    pb.POOLING_MAX: "max",
    pb.POOLING_LAST: "last",
    pb.POOLING_SENTENCE: "sentence",
}
REDUCTIONS: Mapping[int, Reduction] = {pb.REDUCTION_MEAN: "mean", pb.REDUCTION_MAX: "max"}
SPECIAL_TOKENS: Mapping[int, SpecialTokens] = {
    pb.SPECIAL_TOKENS_UNSPECIFIED: "keep",
    pb.SPECIAL_TOKENS_KEEP: "keep",
    pb.SPECIAL_TOKENS_DROP: "drop",
    pb.SPECIAL_TOKENS_RENORMALIZE: "renormalize",
}
DATA_TYPES: Mapping[int, DataType] = {
    pb.DATA_TYPE_UNSPECIFIED: "float32",
    pb.DATA_TYPE_FLOAT32: "float32",
    pb.DATA_TYPE_FLOAT16: "float16",
}
DTYPES: Mapping[int, np.dtype] = {
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    pb.DATA_TYPE_INT32: np.dtype("<i4"),
}


def lookup(field: str, names: Mapping[int, Name], number: int) -> Name:
    """Give our name of an enum's value.

    Raises:
        InvalidRequest: The enum has no such value.
    """
    if number not in names:
        known = ", ".join(f"{value} ({name})" for value, name in names.items())
        raise InvalidRequest(f"{field} {number} is unknown; known: {known}")
    return names[number]


def number(field: str, names: Mapping[int, str], name: str) -> int:
    """Give the enum's value that has a name.

    Raises:
        InvalidRequest: None has.
    """
    for value, known in names.items():
        if isinstance(name, str) and known == name:
            return value
    raise InvalidRequest(f"{field} {name!r} is unknown; known: {', '.join(sorted(set(names.values())))}")
