"""`attencode attend` and its flags, which `attencode view` has too: the API's options, printed or as JSON."""

import json

import numpy as np
import pytest

from attencode import Client
from service import cli_attend
from service.cli import main

TEXT = "Unbelievably the dog slept"
WORDS = ["[CLS]", "Unbelievably", "the", "dog", "slept", "[SEP]"]


def as_json(address: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """Run `attend --json`."""
    assert main(["attend", TEXT, *words, "--json", "--address", address]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "options", "axes"),
    [
        ([], {"layers": [-1], "reduce_heads": "mean"}, []),
        (["--layer", "1", "--head", "-2"], {"layers": [1], "heads": [-2]}, []),
        (["--layers", "0,2-4", "--heads", "1-2"], {"layers": [0, 2, 3, 4], "heads": [1, 2]}, ["layer", "head"]),
        (["--layers", "-2,-1", "--heads", "all"], {"layers": [-2, -1]}, ["layer", "head"]),
        (["--layers", "-3--1"], {"layers": [-3, -2, -1], "reduce_heads": "mean"}, ["layer"]),
        (["--heads", "3"], {"layers": [-1], "heads": [3]}, ["head"]),
        (["--reduce-layers", "max"], {"reduce_layers": "max", "reduce_heads": "mean"}, []),
        (
            ["--layers", "1,2", "--reduce-layers", "mean", "--heads", "1,3", "--reduce-heads", "max"],
            {"layers": [1, 2], "reduce_layers": "mean", "heads": [1, 3], "reduce_heads": "max"},
            [],
        ),
        (["--rollout"], {"rollout": True}, []),
        (
            ["--rollout", "--layers", "0-2", "--reduce-heads", "max"],
            {"rollout": True, "layers": [0, 1, 2], "reduce_heads": "max"},
            [],
        ),
        (["--words", "--special-tokens", "drop"], {"layers": [-1], "reduce_heads": "mean", "special": "drop"}, []),
        (["--layers", "all", "--top-k", "2"], {"reduce_heads": "mean", "top_k": 2}, ["layer"]),
    ],
)
def test_flags_ask_for_what_the_api_can_do(
    minilm_address: str, capsys: pytest.CaptureFixture[str], *, words: list[str], options: dict, axes: list[str]
) -> None:
    """Flags give the weights that the same options of the client give, and name their axes and labels."""
    printed = as_json(minilm_address, capsys, *words)
    if special := options.pop("special", None):
        options |= {"words": True, "special_tokens": special}
    with Client(minilm_address) as client:
        item = client.attend(TEXT, **options)
    assert printed["axes"] == [*axes, "row", "column"]
    assert (printed["rows"], printed["columns"]) == (item.row_labels, item.column_labels)
    weights = np.array(printed["weights"], np.float32)
    assert weights.ndim == len(axes) + 2
    np.testing.assert_allclose(weights, item.attention.reshape(weights.shape), atol=1e-5)
    assert ("keys" in printed) == ("top_k" in options)
    for noun in axes:
        asked = options.get(f"{noun}s")
        assert printed[f"{noun}s"] == (asked or list(range({"layer": 6, "head": 12}[noun])))


def test_the_keys_of_the_largest(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --top-k each weight has its column beside it, in JSON by place and in print by label."""
    words = ["--words", "--layer", "3", "--top-k", "2"]
    whole = np.array(as_json(minilm_address, capsys, *words[:-2])["weights"])
    few = as_json(minilm_address, capsys, *words)
    np.testing.assert_allclose(np.take_along_axis(whole, np.array(few["keys"]), -1), few["weights"], atol=1e-6)
    assert main(["attend", TEXT, *words, "--address", minilm_address]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == "layer 3, mean over all heads: each row's largest weights"
    for row, label, line, keys in zip(rows, WORDS, whole, few["keys"], strict=True):
        shown = ", ".join(f"{WORDS[key]} {100 * line[key]:.0f}%" for key in keys)
        assert row.split("  ")[-1] == shown
        assert row.split()[0] == label


def test_a_table_for_each_layer_and_head(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Several layers and heads are tables one below another, each with its title, header and rows."""
    words = ["attend", TEXT, "--layers", "-2,5", "--heads", "0,3", "--words", "--address", minilm_address]
    assert main(words) == 0
    tables = capsys.readouterr().out.split("\n\n")
    titles = [table.splitlines()[0].split(":")[0] for table in tables]
    assert titles == [f"layer {layer}, head {head}" for layer in (-2, 5) for head in (0, 3)]
    for table in tables:
        assert table.splitlines()[1].split() == [line.split()[0] for line in table.splitlines()[2:]] == WORDS


def test_a_narrow_terminal_gets_columns_below_each_other() -> None:
    """No line is wider than the terminal, as long as one column fits; without a width there is one block."""
    labels, weights = [f"token{number}" for number in range(9)], np.full((9, 9), 1 / 9)
    for width in (20, 41, 80):
        blocks = cli_attend._matrix(labels, labels, weights, width).split("\n\n")
        assert max(len(line) for block in blocks for line in block.splitlines()) <= width
        assert [label for block in blocks for label in block.split("\n")[0].split()] == labels
        assert all(len(block.strip().splitlines()) == 10 for block in blocks)
    assert "\n\n" not in cli_attend._matrix(labels, labels, weights, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "1", "--layers", "2"], "--layer takes one layer and --layers several; leave one of them out"),
        (["--head", "1", "--reduce-heads", "max"], "--head takes one head and --reduce-heads several"),
        (["--layer", "1", "--reduce-layers", "max"], "--layer takes one layer and --reduce-layers several"),
        (["--rollout", "--head", "1"], "leave --layer and --head out"),
        (["--rollout", "--reduce-layers", "max"], "leave --reduce-layers out"),
        (["--layers", "0-9"], "layer 6 does not exist; it must be from -6 to 5"),
        (["--layers", "5,-1"], "name each once"),
    ],
)
def test_what_does_not_go_together(
    minilm_address: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Flags that contradict each other, or the model, are one line that says what to change."""
    assert main(["attend", TEXT, *words, "--address", minilm_address]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--layers", "--heads", "--top-k"])
@pytest.mark.parametrize("word", ["", "x", "3-1", "0--1", "-1-2", "1,,2", "99999", "0x1", "-0-", "1.5"])
def test_what_is_no_list(capsys: pytest.CaptureFixture[str], flag: str, word: str) -> None:
    """What is no list of numbers, or no count, is refused before anything is sent."""
    if (flag, word) == ("--top-k", "99999"):
        return
    with pytest.raises(SystemExit):
        main(["attend", TEXT, f"{flag}={word}"])
    assert f"argument {flag}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--top-k", "99999999999"],
            "argument --top-k: must be a whole number from 1 to 4294967295, got '99999999999'",
        ),
        (["--top-k", "0"], "argument --top-k: must be a whole number from 1 to 4294967295, got '0'"),
        (["--top-k", "9" * 5000], "argument --top-k: must be a whole number from 1 to 4294967295, got '9999"),
        (["--layers", "0-3000000"], "argument --layers: must be numbers from -9999 to 9999, got '0-3000000'"),
        (["--heads=-10000"], "argument --heads: must be numbers from -9999 to 9999, got '-10000'"),
        (["caf\udce9"], "argument TEXT_B: must be UTF-8, got the byte 0xe9 behind 3 characters; set the terminal"),
        (["--prompt-name", "\udcff"], "argument --prompt-name: must be UTF-8, got the byte 0xff behind 0 characters"),
    ],
)
@pytest.mark.parametrize("command", [["attend"], ["view", "-o", "x.png"]])
def test_a_bound_is_named(
    capsys: pytest.CaptureFixture[str], command: list[str], words: list[str], message: str
) -> None:
    """A number beyond a bound, and a text that is not UTF-8, are told by flag with what is expected and what came."""
    if command[0] == "view" and "--top-k" in words:
        return
    with pytest.raises(SystemExit):
        main([*command, TEXT, *words])
    assert message in capsys.readouterr().err


def test_negative_lists_need_no_equals_sign() -> None:
    """`--layers -2,-1` is read as one flag, and nothing behind `--` is."""
    assert cli_attend.joined(["--layers", "-2,-1", "--heads", "3", "-x"]) == ["--layers=-2,-1", "--heads", "3", "-x"]
    assert cli_attend.joined(["a", "--", "--layers", "-2"]) == ["a", "--", "--layers", "-2"]
