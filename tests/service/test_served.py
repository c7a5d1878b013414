"""Served: what is kept of what callers ask for."""

import asyncio
from pathlib import Path

from service.artifact import open_artifact
from service.attention import Attention, Places
from service.config import ServiceConfig
from service.placement import Placement
from service.request import Outputs, Pooled
from service.served import ServedModel
from tests.service.gate import GateRunner


def test_long_questions_are_not_kept(tiny_artifact: Path) -> None:
    """What callers repeat is resolved once; questions that name thousands of tokens are not held for it."""

    async def build() -> ServedModel:
        config = ServiceConfig(model="m", _cli_parse_args=False)  # type: ignore[call-arg]
        placement = Placement("cpu", "float32", "asked for")
        return ServedModel(config, "m", open_artifact(tiny_artifact), GateRunner(), placement=placement, threads=1)

    served = asyncio.run(build())
    short = Outputs(Pooled())
    assert served.select(short) is served.select(short)
    kept = served._select.cache_info().currsize
    for number in range(5):
        long = Outputs(attention=Attention(queries=Places(tuple(range(number, number + 1000)))))
        assert served.select(long).attention is not None
    assert served._select.cache_info().currsize == kept
