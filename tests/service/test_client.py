"""The clients: blocking and asyncio alike, deadlines, retries and typed errors."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

import attencode


def test_both_clients_agree(minilm_address: str) -> None:
    """Every method of the asyncio client gives what the blocking one gives."""

    async def everything() -> tuple[object, ...]:
        async with attencode.AsyncClient(minilm_address) as client:
            requests = [attencode.encode_request("one"), attencode.encode_request("")]

            async def source() -> AsyncIterator[attencode.EncodeRequest]:
                for request in requests:
                    yield request

            return (
                await client.encode(["one", "two"]),
                await client.attend("one", layers=[0], heads=[0, 1]),
                [answer async for answer in client.encode_stream(requests)],
                [answer async for answer in client.encode_stream(source())],
                await client.tokenize("one"),
                await client.get_model(),
            )

    encoded, attended, streamed, streamed_too, tokenized, info = asyncio.run(everything())
    with attencode.Client(minilm_address) as client:
        np.testing.assert_allclose(encoded.pooled, client.encode(["one", "two"]).pooled, atol=1e-6)
        np.testing.assert_allclose(
            attended.attention, client.attend("one", layers=[0], heads=[0, 1]).attention, atol=1e-6
        )
        assert tokenized.results == client.tokenize("one").results
        assert info == client.get_model()
    for answers in (streamed, streamed_too):
        assert isinstance(answers[0], attencode.EncodeResult)
        assert isinstance(answers[1], attencode.InvalidRequest)


def test_a_stream_may_be_left_early(minilm_address: str) -> None:
    """Leaving the loop ends the stream, and the client goes on."""
    with attencode.Client(minilm_address) as client:
        endless = iter(lambda: attencode.encode_request("x"), None)
        for number, _ in enumerate(client.encode_stream(endless)):
            if number == 3:
                break
        assert client.encode("x").pooled is not None


def test_an_unsendable_item_ends_the_stream_with_its_error(minilm_address: str) -> None:
    """A request that cannot be written is told as what it is, not as a broken stream."""
    requests = [attencode.encode_request("x"), attencode.encode_request("\ud800")]
    with attencode.Client(minilm_address) as client, pytest.raises(attencode.InvalidRequest, match="UTF-8"):
        list(client.encode_stream(requests))


def test_every_error_has_a_base(minilm_address: str) -> None:
    """One except clause catches all that a call can raise."""
    with attencode.Client(minilm_address) as client, pytest.raises(attencode.AttencodeError):
        client.encode("")


def test_defaults_ask_for_pooled_vectors() -> None:
    """Pooled vectors come when nothing else is asked for, or when they are spoken of."""
    assert attencode.encode_request("x").outputs.pooled is not None
    assert attencode.encode_request("x", token_embeddings=True).outputs.pooled is None
    assert attencode.encode_request("x", token_embeddings=True, pooling="cls").outputs.pooled is not None
    assert attencode.encode_request("x", pooled=True, attention=0).outputs.attention == attencode.Attention((0,))
