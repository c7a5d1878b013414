"""The clients: blocking and asyncio alike, deadlines, retries and typed errors."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

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


async def asynchronous(items: list[Any]) -> AsyncIterator[Any]:
    """Give items one by one."""
    for item in items:
        yield item


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (["hello"], r"item 0 of the stream is no request; make requests with attencode.encode_request.* got 'hello'"),
        ("hello", r"item 0 of the stream is no request; make requests with attencode.encode_request.* got 'h'"),
        ([attencode.encode_request("x"), None], r"item 1 of the stream is no request; .*encode_request.* got None"),
        (attencode.encode_request("x"), r"make requests with attencode.encode_request\(...\) and give .* an iterable"),
        (None, "an iterable of them; got None"),
        ([attencode.EncodeRequest(("a",))], "input 0 must be a TextInput or a TokenIdsInput, as encode_request makes"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_request_is_told(minilm_address: str, requests: Any, message: str) -> None:
    """A stream of what is no request says how to make one, whichever client it is."""

    async def asynchronously(given: Any) -> None:
        async with attencode.AsyncClient(minilm_address) as client:
            async for _ in client.encode_stream(given):
                pass

    with attencode.Client(minilm_address) as client, pytest.raises(attencode.InvalidRequest, match=message):
        list(client.encode_stream(requests))
    with pytest.raises(attencode.InvalidRequest, match=message):
        asyncio.run(asynchronously(requests))
    if isinstance(requests, list):
        with pytest.raises(attencode.InvalidRequest, match=message):
            asyncio.run(asynchronously(asynchronous(requests)))
        with (
            attencode.Client(minilm_address) as client,
            pytest.raises(attencode.InvalidRequest, match="an async iterable goes with AsyncClient"),
        ):
            list(client.encode_stream(asynchronous(requests)))  # type: ignore[arg-type]


def test_a_closed_client_says_so(minilm_address: str) -> None:
    """Every call of a client that is closed is told so in words, whichever client it is."""
    request = attencode.encode_request("x")
    with attencode.Client(minilm_address) as client:
        client.encode("x")
    for call in (
        lambda: client.encode("x"),
        lambda: client.attend("x"),
        lambda: list(client.encode_stream([request])),
        lambda: client.tokenize("x"),
        client.get_model,
    ):
        with pytest.raises(attencode.InvalidRequest, match=r"this client is closed; .* or make a new one"):
            call()
    client.close()

    async def asynchronously() -> None:
        async with attencode.AsyncClient(minilm_address) as client:
            await client.encode("x")
        for method in (client.encode, client.attend, client.tokenize):
            with pytest.raises(attencode.InvalidRequest, match="this client is closed"):
                await method("x")
        with pytest.raises(attencode.InvalidRequest, match="this client is closed"):
            await client.get_model()
        with pytest.raises(attencode.InvalidRequest, match="this client is closed"):
            _ = [answer async for answer in client.encode_stream([request])]

    asyncio.run(asynchronously())


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
