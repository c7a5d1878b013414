"""Pages and pictures of attention: they hold the answer's tokens and numbers, and no text breaks them."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attencode
from attencode import Attended, Attention, Client, InputResult, InvalidRequest, Tokens
from service.cli import main
from service.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = "the dog did not attack the old man because it was sleepy"
HOSTILE = '</script><b>"it\'s"</b> \N{GRINNING FACE} $5 & $6 <!--'
bertviz = pytest.mark.skipif(not importlib.util.find_spec("bertviz"), reason="needs bertviz; install attencode[viz]")
matplotlib = pytest.mark.skipif(
    not importlib.util.find_spec("matplotlib"), reason="needs matplotlib; install attencode[viz]"
)


def made(texts: list[str], attention: np.ndarray, **fields: object) -> Attended:
    """Make an answer by hand."""
    count = len(texts)
    spans = [(0, 0)] * count
    tokens = Tokens([0] * count, texts, spans, spans, [-1] * count, [0] * count, [False] * count)
    asked = fields.pop("asked", Attention())
    return Attended(InputResult(count, count, tokens, attention=attention, **fields), asked)


def params(page: str) -> dict:
    """Read what bertviz's script in a page is given."""
    found = re.search(r"(?:const params|window\.bertviz_params) = (\{.*?\})(?:; //|</script>)", page)
    assert found
    return json.loads(found[1])


def test_an_answer_is_reached_as_before(minilm_address: str) -> None:
    """`attend` gives the answer's attributes, its labels and its weights."""
    with Client(minilm_address) as client:
        attended = client.attend("time flies", layers=[0], heads=[0, 1])
    assert isinstance(attended, Attended)
    assert attended.tokens.texts == attended.row_labels == attended.column_labels == ["[CLS]", "time", "flies", "[SEP]"]
    assert attended.attention.shape == attended.to_numpy().shape == (1, 2, 4, 4)
    assert not attended.truncated
    with pytest.raises(AttributeError):
        _ = attended.nothing


def test_top_k_is_spread_into_zeros(minilm_address: str) -> None:
    """Each weight that top_k kept is in its key's place, all others are 0."""
    with Client(minilm_address) as client:
        whole = client.attend(TEXT).to_numpy()
        few = client.attend(TEXT, top_k=2).to_numpy()
    assert few.shape == whole.shape
    assert ((few > 0).sum(axis=-1) == 2).all()
    np.testing.assert_allclose(few[few > 0], whole[few > 0], atol=1e-6)
    np.testing.assert_allclose(few.max(axis=-1), whole.max(axis=-1), atol=1e-6)


def test_words_are_labelled_as_the_text_has_them(minilm_address: str) -> None:
    """Merged tokens are labelled by the text that they cover, rows and columns each by their own."""
    with Client(minilm_address) as client:
        words = client.attend("Unbelievably Sleepyish", words=True, keys=[1, 2], layers=[0])
    assert words.row_labels == ["[CLS]", "Unbelievably", "Sleepyish", "[SEP]"]
    assert words.column_labels != words.row_labels
    assert words.to_numpy().shape[-2:] == (len(words.row_labels), len(words.column_labels))


def test_a_table_for_notebooks_is_escaped() -> None:
    """The table holds every label, escaped, and the weights; it is cut where it would be slow."""
    table = made(["<i>&", '"</td>'], np.array([[0.25, 0.75], [1, 0]], np.float32))._repr_html_()
    assert "&lt;i&gt;&amp;" in table
    assert "<i>" not in table
    assert 'title="75.0%"' in table
    assert table.count("<td") == 4
    cut = made([f"t{number}" for number in range(70)], np.ones((70, 70), np.float32))._repr_html_()
    assert "the first 64 of 70 rows" in cut
    assert cut.count("<td") == 64 * 64
    assert "Attended(2 tokens" in Attended(InputResult(2, 2))._repr_html_()


def test_the_axes_that_were_reduced() -> None:
    """Layers and heads are told apart by what was asked, and counted as the model counts."""
    weights = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    heads = made(["a", "b"], weights, asked=Attention(reduce_layers="mean"))
    layers = made(["a", "b"], weights, asked=Attention(layers=(3, 5), reduce_heads="max"))
    assert heads.by_layer().shape == (1, 2, 2, 2)
    assert layers.by_layer().shape == (2, 1, 2, 2)
    assert layers.chosen(layer=5).name == "layer 5, maximum over all heads"
    np.testing.assert_array_equal(layers.chosen(layer=5).weights, layers.chosen(layer=-1).weights)
    with pytest.raises(InvalidRequest, match="layer 4 is not in the answer; it has 3, 5"):
        layers.chosen(layer=4)
    with pytest.raises(InvalidRequest, match="reduced to one; leave head out"):
        layers.chosen(head=0)


@bertviz
@pytest.mark.parametrize("mode", ["head", "model", "neuron"])
def test_a_page_holds_the_answer(minilm_address: str, tmp_path: Path, mode: str) -> None:
    """A page of bertviz has our tokens and weights, a pair's parts each by itself."""
    page = tmp_path / "page.html"
    assert main(["view", "a dog", "two cats", "--mode", mode, "-o", str(page), "--address", minilm_address]) == 0
    with Client(minilm_address) as client:
        item = client.attend(("a dog", "two cats"), query_key_vectors=True)
    given = params(page.read_text())["attention"]
    parts = given if mode == "neuron" else dict(zip(("all", "aa", "bb", "ab", "ba"), given, strict=True))
    assert parts["all"]["left_text"] == item.tokens.texts
    assert parts["ab"]["left_text"] == ["[CLS]", "a", "dog", "[SEP]"]
    assert parts["ab"]["right_text"] == ["two", "cats", "[SEP]"]
    np.testing.assert_allclose(parts["all"]["attn"], item.attention, atol=1e-5)
    np.testing.assert_allclose(parts["ba"]["attn"], item.attention[:, :, 4:, :4], atol=1e-5)
    if mode == "neuron":
        np.testing.assert_allclose(parts["ab"]["queries"], item.query_vectors[:, :, :4], atol=1e-4)
        np.testing.assert_allclose(parts["ab"]["keys"], item.key_vectors[:, :, 4:], atol=1e-4)


@bertviz
@pytest.mark.parametrize("mode", ["head", "model", "neuron"])
def test_no_label_ends_a_script(tmp_path: Path, mode: str) -> None:
    """A label such as </script>, quotes or an emoji stays a label."""
    labels = ["</script>", "\"'", "\N{GRINNING FACE}", "<!--", "\ue000"]
    weights, vectors = np.full((1, 2, 5, 5), 0.2, np.float32), np.ones((1, 2, 5, 3), np.float32)
    item = made(labels, weights, query_vectors=vectors, key_vectors=vectors)
    page = item.save(tmp_path / "page.html", mode).read_text()
    given = params(page)["attention"]
    assert (given["all"] if mode == "neuron" else given[0])["left_text"] == labels
    assert page.count("</script>") == page.count("<script")
    assert "<!--" not in page


@bertviz
def test_rows_and_columns_of_their_own(minilm_address: str, tmp_path: Path) -> None:
    """A head view of chosen rows has other labels left than right, and there is no one list of tokens."""
    with Client(minilm_address) as client:
        item = client.attend(TEXT, queries=[10], layers=[2])
    given = params(item.save(tmp_path / "page.html", "head").read_text())["attention"][0]
    assert given["left_text"] == ["it"]
    assert given["right_text"] == item.tokens.texts
    with pytest.raises(InvalidRequest, match="rows and columns differ"):
        item.to_bertviz()


@bertviz
def test_tensors_for_bertviz(minilm_address: str) -> None:
    """`to_bertviz` gives a tensor (1, heads, q, k) for each layer, and the tokens."""
    with Client(minilm_address) as client:
        item = client.attend(TEXT)
    tensors, tokens = item.to_bertviz()
    assert [tuple(tensor.shape) for tensor in tensors] == [(1, 12, 14, 14)] * 6
    assert tokens == item.tokens.texts
    np.testing.assert_array_equal(tensors[3][0].numpy(), item.attention[3])


@matplotlib
@pytest.mark.parametrize("mode", ["heatmap", "rollout"])
def test_a_picture_is_not_blank_and_grows(minilm_address: str, tmp_path: Path, mode: str) -> None:
    """A PNG opens, has many colours, and is larger for more tokens."""
    from matplotlib.image import imread

    sizes = []
    for text in (TEXT, " ".join([TEXT] * 5)):
        file = tmp_path / "picture.png"
        assert main(["view", text, "--mode", mode, "-o", str(file), "--address", minilm_address]) == 0
        pixels = imread(file)
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50
        sizes.append(min(pixels.shape[:2]))
    assert sizes[1] > 1.3 * sizes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


@matplotlib
def test_an_svg_has_the_labels(minilm_address: str, tmp_path: Path) -> None:
    """An SVG's labels are text, whatever the text is, and the layer and head are named."""
    from xml.etree import ElementTree as ET

    file = tmp_path / "picture.svg"
    words = ["view", HOSTILE, "-o", str(file), "--layer", "1", "--head", "2", "--words", "--address", minilm_address]
    assert main(words) == 0
    shown = {element.text.strip() for element in ET.parse(file).iter() if element.text}  # noqa: S314
    assert {"[CLS]", "script", "$", "5", "layer 1, head 2"} <= shown
    labels = ["\N{GRINNING FACE}", "$a$ $b$", "<", "\x01", "\u4e0d"]
    for name in ("label.png", "label.svg"):
        made(labels, np.eye(5, dtype=np.float32)).save(tmp_path / name)
    ET.parse(tmp_path / "label.svg")  # noqa: S314


@matplotlib
@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["--layers", "0,2-3", "--heads", "1"], "mean over layers 0, 2, 3, mean over heads 1"),
        (["--reduce-layers", "max", "--special-tokens", "drop"], "maximum over all layers, mean over all heads"),
        (
            ["--mode", "rollout", "--layers", "0-1", "--reduce-heads", "max"],
            "rollout through layers 0, 1, maximum over heads",
        ),
        (["--mode", "rollout", "--heads", "1,2"], "rollout, mean over heads 1, 2"),
    ],
)
def test_a_title_says_what_was_asked(minilm_address: str, tmp_path: Path, words: list[str], title: str) -> None:
    """A picture of several layers or heads says which, and how they were reduced."""
    file = tmp_path / "picture.svg"
    assert main(["view", "a dog", "-o", str(file), *words, "--address", minilm_address]) == 0
    shown = file.read_text()
    assert f">{title}<" in shown
    assert ("[CLS]" in shown) == ("drop" not in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "head", "-o", "x.png"], "head writes .html, got 'x.png'; .png goes with --mode heatmap or rollout"),
        (["-o", "x.html"], "heatmap writes .png or .svg, got 'x.html'; .html goes with --mode head, model or neuron"),
        (["-o", "nowhere/x.png"], "make it first, or write elsewhere"),
        (["-o", "x.png/"], "x.png/ names a folder"),
        (["-o", "/proc/x.png"], "the output's folder /proc takes no file: "),
        (["-o", "x.png", "--layer", "9"], "layer 9 does not exist; it must be from -6 to 5"),
        (["-o", "x.html", "--mode", "head", "--layer", "9"], "layer 9 is not in the answer"),
        (["-o", "x.png", "--mode", "rollout", "--head", "1"], "leave --layer and --head out"),
        (["-o", "x.html", "--mode", "neuron", "--words"], "leave --words out"),
        (["-o", "x.html", "--mode", "neuron", "--special-tokens", "drop"], "leave --special-tokens out"),
        (["-o", "x.html", "--mode", "model", "--reduce-heads", "max"], "leave --reduce-layers and --reduce-heads out"),
        (["-o", "x.png", "--reduce-heads", "max", "--head", "1"], "leave one of them out"),
        (["-o", "x.png", "--layers", "1,2", "--layer", "1"], "--layer takes one layer and --layers several"),
        (["-o", "x.png", "--mode", "rollout", "--reduce-layers", "max"], "leave --reduce-layers out"),
        (["-o", "x.png", "--address", "127.0.0.1:1"], "no server answers"),
    ],
)
@bertviz
@matplotlib
def test_refusals_say_what_to_change(
    minilm_address: str,
    *,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be drawn is one line that says what would help, and leaves no file."""
    monkeypatch.chdir(tmp_path)
    address = [] if "--address" in words else ["--address", minilm_address]
    assert main(["view", "a dog", *words, *address]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("mode", "package"), [("head", "bertviz"), ("heatmap", "matplotlib")])
def test_a_missing_package_is_named(mode: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package a mode says which extra brings it."""
    monkeypatch.setitem(sys.modules, package, None)
    item = made(["a"], np.ones((1, 1), np.float32))
    with pytest.raises(ConfigError, match=rf"{package} is missing; install attencode\[viz\]"):
        item.save(tmp_path / ("x.html" if mode == "head" else "x.png"), mode)


def test_what_does_not_go_with_an_answer(tmp_path: Path) -> None:
    """An answer without weights or vectors says what to ask for."""
    with pytest.raises(InvalidRequest, match="no attention weights"):
        Attended(InputResult(1, 1)).to_numpy()
    with pytest.raises(InvalidRequest, match="mode 'pie' is unknown"):
        made(["a"], np.ones((1, 1), np.float32)).save(tmp_path / "x.png", "pie")
    assert attencode.Attended is Attended


@matplotlib
def test_open_without_a_browser(minilm_address: str, tmp_path: Path) -> None:
    """Where no browser opens, the file's address is on stderr; where one does, nothing is."""
    file, browser = tmp_path / "a picture.png", tmp_path / "browser"
    browser.touch(mode=0o755)
    command = [sys.executable, "-m", "service", "view", "a dog", "-o", str(file), "--open", "--address", minilm_address]
    for status, told in ((1, f"attencode: no browser opens here; the file is {file.as_uri()}\n"), (0, "")):
        browser.write_text(f"#!/bin/sh\nexit {status}\n")
        environment = {**os.environ, "BROWSER": f"{browser} %s", "PATH": "/nowhere"}
        run = subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True, text=True)
        assert run.stderr == told


def test_a_default_mode_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of view says which mode it is if unset."""
    with pytest.raises(SystemExit):
        main(["view", "--help"])
    assert "heatmap if unset" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("path", [io.BytesIO(), None, 5, b"s.png", "a\0.png", ["s.png"]])
def test_what_is_no_path(path: object) -> None:
    """What is no path of a file is told, before anything is drawn."""
    with pytest.raises(InvalidRequest, match=r"path must be a file's path, such as 'attention.png', got"):
        made(["a"], np.ones((1, 1), np.float32)).save(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", ["a", 0.0, True, [0]])
@pytest.mark.parametrize("noun", ["layer", "head"])
def test_what_is_no_layer_or_head(tmp_path: Path, noun: str, number: object) -> None:
    """A layer or head that is no number is told by name; one of numpy's is a number."""
    item = made(["a"], np.ones((2, 2, 1, 1), np.float32))
    with pytest.raises(InvalidRequest, match=rf"{noun} must be a whole number, got {re.escape(repr(number))}"):
        item.chosen(**{noun: number})  # type: ignore[arg-type]
    assert item.chosen(**{noun: np.int64(1)}).name.count(f"{noun} 1") == 1  # type: ignore[arg-type]
    if importlib.util.find_spec("matplotlib"):
        with pytest.raises(InvalidRequest, match=f"{noun} must be a whole number"):
            item.save(tmp_path / "s.png", **{noun: number})  # type: ignore[arg-type]
