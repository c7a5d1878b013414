"""Plain values as a user writes them: numpy's as good as Python's; what is none is told by name, expected and got."""

import re
from typing import Any

import numpy as np
import pytest

from attencode import Attention, Client, EncodeRequest, InvalidRequest, Outputs, Pooled, TokenIdsInput, encode_request
from service.codec import encode_encode_request
from service.plain import attend_request

SIGNED = "from -2147483648 to 2147483647"
CHOICE = "must be True, a number or a list of numbers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -1}, "top_k must be a whole number from 0 to 4294967295, got -1"),
        ({"top_k": 2**32}, "top_k must be a whole number from 0 to 4294967295, got 4294967296"),
        ({"top_k": "3"}, "top_k must be a whole number from 0 to 4294967295, got '3'"),
        ({"top_k": True}, "top_k must be a whole number from 0 to 4294967295, got True"),
        ({"top_k": np.array([1, 2])}, "top_k must be a whole number from 0 to 4294967295, got array([1, 2])"),
        ({"rollout": "yes"}, "rollout must be True or False, got 'yes'"),
        ({"words": "yes"}, "words must be True or False, got 'yes'"),
        ({"words": None}, "words must be True or False, got None"),
        ({"tokens": "yes"}, "tokens must be True or False, got 'yes'"),
        ({"token_embeddings": "yes"}, "token_embeddings must be True or False, got 'yes'"),
        ({"pooled": "yes"}, "pooled must be True or False, got 'yes'"),
        ({"normalize": 1}, "normalize must be True or False, got 1"),
        ({"dimensions": -1}, "dimensions must be a whole number from 1 to 4294967295, got -1"),
        ({"dimensions": 0}, "dimensions must be a whole number from 1 to 4294967295, got 0"),
        ({"dimensions": 2.0}, "dimensions must be a whole number from 1 to 4294967295, got 2.0"),
        ({"attention": [2**40]}, f"attention: each number must be a whole number {SIGNED}, got 1099511627776"),
        ({"attention": None}, f"attention {CHOICE}, got None"),
        ({"attention": [0, True]}, f"attention {CHOICE}, got [0, True], which holds True"),
        ({"hidden_states": "0"}, f"hidden_states {CHOICE}, got '0'"),
        ({"query_key_vectors": [-(2**31) - 1]}, "query_key_vectors: each number must be a whole number"),
        ({"heads": None}, f"heads {CHOICE}, got None"),
        ({"heads": False}, "heads must be True for all, a number or a list of numbers, got False"),
        ({"queries": "it"}, "queries must be token numbers, or spans (start, end) or (start, end, sequence), each"),
        ({"queries": [True]}, "each a tuple, got True"),
        ({"keys": [(0, 5, 1, 2)]}, "each a tuple, got (0, 5, 1, 2)"),
        ({"keys": [(-1, 5)]}, "keys: each number of a span must be a whole number from 0 to 4294967295, got -1"),
        ({"keys": 2**31}, f"keys: each token number must be a whole number {SIGNED}, got 2147483648"),
        ({"pooling": ["mean"]}, "pooling ['mean'] is unknown; known: cls, last, max, mean, sentence"),
        ({"model": 5}, "model must be text, got 5"),
        ({"layers": [0]}, "encode has no option layers; it is called attention here, use attention="),
        ({"nonsense": 1}, "encode has no option nonsense; it has attention, data_type, dimensions, heads, "),
        ({"hidden_state": 1}, "encode has no option hidden_state; it has hidden_states, "),
    ],
)
def test_an_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    """Each message names its option, what was expected and what came, whatever else the request asks for."""
    others = {} if options.keys() & {"attention"} else {"attention": True}
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        encode_encode_request(encode_request("abc", **{**others, **options}))


@pytest.mark.parametrize(
    ("item", "options", "message"),
    [
        ("a", {"layers": None}, f"layers {CHOICE}, got None"),
        ("a", {"layers": "0"}, f"layers {CHOICE}, got '0'"),
        ("a", {"layers": False}, "layers must be True for all, a number or a list of numbers, got False; encode has"),
        ("a", {"layers": np.False_}, "a list of numbers, got False; encode has"),
        ("a", {"layers": [2**40]}, f"layers: each number must be a whole number {SIGNED}, got 1099511627776"),
        ("a", {"attention": [0]}, "attend has no option attention; it is called layers here, use layers="),
        ("a", {"nonsense": 1}, "attend has no option nonsense; it has data_type, dimensions, heads, hidden_states, "),
        ("a", {"layer": 1}, "attend has no option layer; it has layers, "),
        (5, {}, "attend takes a text, a pair of texts (a tuple), or token ids, got 5"),
        (True, {}, "attend takes a text, a pair of texts (a tuple), or token ids, got True"),
        (None, {}, "attend takes a text, a pair of texts (a tuple), or token ids, got None"),
        (b"a", {}, "or token ids, got bytes"),
        (
            ["a", "b"],
            {},
            "attend takes one input, a text, a pair of texts (a tuple), or token ids, got ['a', 'b']; call",
        ),
        ([[2, 3], [2, 3]], {}, "call it for each of several"),
        ([True, False], {}, "got [True, False]"),
    ],
)
def test_attend_speaks_of_its_own_options(item: Any, options: dict[str, Any], message: str) -> None:
    """`attend` calls options as its caller does, and takes one input."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=re.escape(message)):
        client.attend(item, **options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (5, "inputs must be a text or a list of inputs, got int"),
        (np.array(5), "inputs must be a text or a list of inputs, got ndarray"),
        ([True, False], "input 0 must be a text, a pair of texts (a tuple), or token ids, got bool"),
        ([[2, 5.5, 3]], "or token ids, got list, which holds 5.5"),
        (["a", ["b"]], "input 1 must be a text, a pair of texts (a tuple), or token ids, got list, which holds 'b'"),
        ([("a", "b", "c")], "or token ids, got tuple, which holds 'a'"),
        (TokenIdsInput((2, 2**32, 3)), "input 0: each of its token ids must be a whole number from 0 to 4294967295"),
        (TokenIdsInput((2, 3), (0, -1)), "input 0: each of its token type ids must be a whole number from 0 to 429"),
        (TokenIdsInput(5), "input 0 must hold token ids as a list of whole numbers, got 5"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_input(inputs: Any, message: str) -> None:
    """What is no input says which it is, and what in it."""
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        encode_encode_request(encode_request(inputs))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (Outputs(attention=Attention(layers=0)), "layers must hold whole numbers from -2147483648"),  # type: ignore[arg-type]
        (Outputs(attention=Attention(queries=[1])), "queries must be Places(tokens, spans), got [1]"),  # type: ignore[arg-type]
        (Outputs(attention=Attention(top_k=-1)), "top_k must be a whole number from 0 to 4294967295, got -1"),
        (Outputs(pooled=Pooled(dimensions=-1)), "dimensions must be a whole number from 1 to 4294967295, got -1"),
        ({"tokens": True}, "outputs must be Outputs(...), got {'tokens': True}; encode_request makes it"),
    ],
)
def test_what_was_built_by_hand_is_told_as_well(outputs: Any, message: str) -> None:
    """Requests that encode_request did not make are held to the same."""
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        encode_encode_request(EncodeRequest(encode_request("a").inputs, outputs=outputs))


def test_numpy_is_as_good_as_lists() -> None:
    """Arrays and numbers of numpy are taken wherever lists and numbers are."""
    given = encode_request(
        [np.array([2, 5, 3]), np.array([2, 6, 3], np.uint8)],
        attention=np.arange(3),
        heads=np.array([1, -1], np.int32),
        queries=np.array([0, 2]),
        keys=[np.int64(1), (np.int64(0), np.int64(3))],
        top_k=np.int64(2),
        words=np.True_,
        hidden_states=np.int64(1),
        dimensions=np.int16(8),
        normalize=np.False_,
    )
    plain = encode_request(
        [[2, 5, 3], [2, 6, 3]],
        attention=[0, 1, 2],
        heads=[1, -1],
        queries=[0, 2],
        keys=[1, (0, 3)],
        top_k=2,
        words=True,
        hidden_states=1,
        dimensions=8,
        normalize=False,
    )
    assert encode_encode_request(given) == encode_encode_request(plain)
    for ids in (np.array([[2, 5, 3], [2, 6, 3]]), [np.array([2, 5, 3]), [2, 6, 3]]):
        assert encode_request(ids).inputs == plain.inputs
    assert encode_request(np.array([2, 5, 3])).inputs == plain.inputs[:1]
    assert encode_request(np.array(["a", "b"])).inputs == encode_request(["a", "b"]).inputs
    assert attend_request(np.array([2, 5, 3]), np.arange(2), np.array([0]), {}) == attend_request(
        [2, 5, 3], [0, 1], [0], {}
    )
    by_hand = EncodeRequest((TokenIdsInput(np.array([2, 5, 3])),))  # type: ignore[arg-type]
    assert encode_encode_request(by_hand) == encode_encode_request(encode_request([2, 5, 3]))
