"""`attencode align`: the matrix and the word pairs, as text, as JSON, as a picture."""

import json
from pathlib import Path

import numpy as np
import pytest

from service.cli import main
from tests.service.translators import Translator

TEXTS = ("the cat sat", "die katze")


def test_it_prints_the_matrix_and_the_pairs(t5: Translator, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without flags it is the mean over all layers and heads, and behind it each word of the target with its own."""
    picture = tmp_path / "heat.svg"
    assert main(["align", *TEXTS, "--address", t5.running.address, "-o", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mean over all layers, mean over all heads: each row's weights over the columns, in percent"
    assert lines[1].split() == ["t", "##h", "##e", "c", "##a", "##t", "s", "##a", "##t", "</s>"]
    pairs = t5.client.align(*TEXTS).word_pairs()
    told = [f"{pair.target:>5}  {pair.source} {100 * pair.weight:.0f}%" for pair in pairs]
    assert lines[-3:] == ["each word of the target, and what it looks at", *told]
    assert picture.read_text().startswith("<?xml")


def test_flags_ask_for_what_the_client_can(t5: Translator, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags give what the client's options give, with labels, pairs and both sides' tokens, as JSON."""
    words = ["--layers", "0,-1", "--head", "1", "--words", "--special-tokens", "drop", "--threshold", "0.01", "--json"]
    assert main(["align", *TEXTS, *words, "--address", t5.running.address]) == 0
    told = json.loads(capsys.readouterr().out)
    item = t5.client.align(*TEXTS, layers=[0, -1], heads=[1], words=True, special_tokens="drop")
    np.testing.assert_allclose(told["weights"], item.attention[:, 0], atol=1e-5)
    assert (told["axes"], told["layers"], told["head"]) == (["layer", "row", "column"], [0, -1], 1)
    assert (told["rows"], told["columns"]) == (["die", "katze"], ["the", "cat", "sat"])
    assert len(told["word_pairs"]) == 6
    assert told["source"]["num_tokens"] == 10
    assert told["target"]["tokens"][:3] == ["d", "##i", "##e"]


def test_no_pair_reaches_the_threshold(t5: Translator, capsys: pytest.CaptureFixture[str]) -> None:
    """Then it says so."""
    assert main(["align", *TEXTS, "--threshold", "1", "--address", t5.running.address]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no word looks at one by 1 or more"


def test_it_says_what_it_cannot_do(t5: Translator, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that contradict each other, a picture of another kind, and what the server refuses are one line."""
    address = ["--address", t5.running.address]
    assert main(["align", *TEXTS, "--layer", "0", "--layers", "1", *address]) == 1
    assert "--layer takes one layer and --layers several" in capsys.readouterr().err
    assert main(["align", *TEXTS, "-o", "x.html", *address]) == 1
    assert ".png" in capsys.readouterr().err
    assert main(["align", "", "x", *address]) == 1
    assert "source: input 0 is empty" in capsys.readouterr().err


def test_info_tells_of_the_decoder(t5: Translator, capsys: pytest.CaptureFixture[str]) -> None:
    """`attencode info` says how large the decoder is."""
    assert main(["info", "--address", t5.running.address]) == 0
    assert "3 layers, 4 heads, targets of at most 512 tokens" in capsys.readouterr().out
