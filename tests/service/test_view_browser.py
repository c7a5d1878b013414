"""Pages in a real browser: bertviz's scripts draw our answer, with the scripts of its CDN served from a folder."""

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attencode import Client

SCRIPTS = Path(__file__).parents[1] / ".browser"  # filled by `make browser`
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TEXTS = ["the dog was sleepy", ("a dog", "two cats")]
PAIR = ('a dog </script><b> "it\'s" \N{GRINNING FACE}', "two cats")

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium"),
    pytest.mark.skipif(not (SCRIPTS / "d3.min.js").exists(), reason="needs tests/.browser; run `make browser`"),
    pytest.mark.skipif(not importlib.util.find_spec("playwright"), reason="needs playwright; run `make install`"),
    pytest.mark.skipif(not importlib.util.find_spec("bertviz"), reason="needs bertviz; install attencode[viz]"),
]


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """Give a tab whose requests to a network are answered from the folder, and that lists its errors."""
    from playwright.sync_api import Route, sync_playwright

    def answer(route: Route) -> None:
        name = route.request.url.rsplit("/", 1)[-1]
        route.fulfill(path=SCRIPTS / name, content_type="text/javascript")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.route(re.compile("^https://"), answer)
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        yield page
        assert not page.errors
        browser.close()


def drawn(tab: Any, page: Path) -> Any:
    """Open a page and wait until it is drawn."""
    tab.goto(page.as_uri())
    tab.wait_for_function("document.querySelectorAll('#vis svg *').length > 20")
    tab.wait_for_timeout(300)
    return tab


def lines_seen(tab: Any) -> int:
    """Count the lines from token to token that are more than a breath."""
    seen = "line => line.getAttribute('stroke-opacity') > 0.01 && getComputedStyle(line).visibility === 'visible'"
    return tab.evaluate(f"[...document.querySelectorAll('#vis #attention line')].filter({seen}).length")


@pytest.mark.parametrize("mode", ["head", "model", "neuron"])
def test_a_page_draws_the_answer(minilm_address: str, tab: Any, tmp_path: Path, mode: str) -> None:
    """The page shows every token as text, draws, and offers the parts of a pair."""
    with Client(minilm_address) as client:
        item = client.attend(PAIR, query_key_vectors=True)
    drawn(tab, item.save(tmp_path / f"{mode}.html", mode, layer=None if mode == "model" else -1))
    for number in (1, 2, 3, 4, 0):
        tab.locator("#filter").select_option(index=number)
        tab.wait_for_timeout(100)
    assert not tab.errors
    assert tab.locator("#filter option").count() == 5
    assert tab.locator("#vis b").count() == 0
    if mode == "model":
        assert tab.locator("#vis svg line").count() > 72  # a line or more in each picture of 6 layers by 12 heads
        return
    assert tab.locator("#layer").input_value() == "5"
    shown = [text.strip() for text in tab.locator("#vis svg text").all_text_contents()]
    assert {"[CLS]", "dog", "<", "script", '"', "cats"} <= set(shown)


@pytest.mark.parametrize("text", TEXTS)
def test_a_head_is_chosen_by_its_square(minilm_address: str, tab: Any, tmp_path: Path, text: Any) -> None:
    """In a head view a double click leaves one head's lines, a click adds a head's, and pointing leaves a token's."""
    with Client(minilm_address) as client:
        item = client.attend(text)
    drawn(tab, item.save(tmp_path / "head.html", "head", layer=1))
    squares = tab.locator("#vis svg > g:last-child rect")
    assert squares.count() == 12
    heads = item.attention[1]

    squares.nth(2).dblclick()
    one = lines_seen(tab)
    assert one == pytest.approx((heads[2] > 0.01).sum(), abs=2)
    squares.nth(8).click()
    two = lines_seen(tab)
    assert two == pytest.approx((heads[[2, 8]] / 2 > 0.01).sum(), abs=4)
    assert two != one
    squares.nth(8).click()
    assert lines_seen(tab) == one
    tab.locator("#vis #left text").nth(1).hover()
    assert lines_seen(tab) == pytest.approx((heads[2, 1] > 0.01).sum(), abs=1)


@pytest.mark.parametrize("text", TEXTS)
def test_a_picture_is_enlarged_by_a_click(minilm_address: str, tab: Any, tmp_path: Path, text: Any) -> None:
    """In a model view a click shows the head with all its tokens, another hides it; so too after a part is chosen."""
    with Client(minilm_address) as client:
        item = client.attend(text)
    drawn(tab, item.save(tmp_path / "model.html", "model"))
    thumbnail = tab.locator("#vis svg > g").nth(15).locator("> rect").last  # layer 1, head 3
    corner = {"x": 3, "y": 3}  # what is enlarged lies over the rest
    assert tab.locator(".detail").count() == 0
    thumbnail.click(position=corner)
    assert tab.locator("text.detail").text_content() == "Layer 1, Head 3"
    assert tab.locator(".detail text.token").all_text_contents() == [*item.row_labels, *item.column_labels]
    assert tab.locator(".detail line").count() == item.num_tokens**2
    thumbnail.click(position=corner)
    assert tab.locator(".detail").count() == 0
    if isinstance(text, tuple):
        thumbnail.click(position=corner)
        tab.locator("#filter").select_option(index=3)  # first text to second
        assert tab.locator(".detail").count() == 0
        thumbnail.click(position=corner)
        start = item.second_text_start
        labels = [*item.row_labels[:start], *item.row_labels[start:]]
        assert tab.locator(".detail text.token").all_text_contents() == labels


@pytest.mark.parametrize("text", TEXTS)
def test_vectors_are_shown_by_the_plus(minilm_address: str, tab: Any, tmp_path: Path, text: Any) -> None:
    """In a neuron view a click on a token's plus shows its query, the keys and their products; its minus hides them."""
    with Client(minilm_address) as client:
        item = client.attend(text, query_key_vectors=True)
    drawn(tab, item.save(tmp_path / "neuron.html", "neuron", layer=2, head=4))
    assert tab.locator("#expanded").get_attribute("visibility") == "hidden"
    tab.locator("#collapsed #leftText text").nth(2).hover()
    tab.locator("#collapsed #leftText > g").nth(2).locator("rect").last.click()
    assert tab.locator("#expanded").get_attribute("visibility") == "visible"
    assert tab.locator("#collapsed").get_attribute("visibility") == "hidden"
    for name, vectors in (("queries", item.query_vectors), ("keys", item.key_vectors)):
        shown = tab.locator(f"#expanded #{name} .element").evaluate_all("all => all.map(one => +one.dataset.value)")
        assert shown == pytest.approx(vectors[2, 4].ravel().tolist(), abs=1e-4)
    products = tab.locator("#expanded .dotproduct").evaluate_all("all => all.map(one => +one.dataset.value)")
    scores = item.key_vectors[2, 4] @ item.query_vectors[2, 4, 2] / item.query_vectors.shape[-1] ** 0.5
    assert products == pytest.approx(scores.tolist(), abs=1e-3)
    tab.locator("#expanded #leftText > g").nth(2).locator("rect").last.click()
    assert tab.locator("#expanded").get_attribute("visibility") == "hidden"


@pytest.mark.parametrize("layers", [[3, 5], [-3, -1]])
def test_layers_and_heads_have_the_models_numbers(minilm_address: str, tab: Any, tmp_path: Path, layers: list) -> None:
    """A page of some layers and heads calls them what the model does, and opens with the one that is named."""
    with Client(minilm_address) as client:
        item = client.attend("a dog", layers=layers, heads=[2, 7], query_key_vectors=layers)
    for mode in ("head", "neuron"):
        drawn(tab, item.save(tmp_path / "page.html", mode, layer=layers[1], head=7))
        assert tab.locator("#layer option").all_text_contents() == [str(layer) for layer in layers]
        assert tab.locator("#layer option:checked").text_content() == str(layers[1])
    assert tab.locator("#att_head option").all_text_contents() == ["2", "7"]
    assert tab.locator("#att_head option:checked").text_content() == "7"
    drawn(tab, item.save(tmp_path / "page.html", "model"))
    assert tab.locator("#vis svg > text").all_text_contents() == [
        *("Heads", "2", "7", "Layers"),
        *map(str, layers),
    ]
    assert tab.locator("#vis svg > g > rect").first.bounding_box()["width"] < 100
    tab.locator("#vis svg > g").nth(3).locator("> rect").last.click()
    assert tab.locator("text.detail").text_content() == f"Layer {layers[1]}, Head 7"
    assert tab.locator(".detail line").first.get_attribute("stroke")
    assert float(tab.locator("rect.detail").first.get_attribute("y")) >= 1
    drawn(tab, item.save(tmp_path / "page.html", "model", layer=layers[1], head=7))
    assert tab.locator("#vis svg > text").all_text_contents() == ["Heads", "7", "Layers", str(layers[1])]


@pytest.mark.parametrize("mode", ["head", "model", "neuron"])
def test_long_labels_have_room(minilm_address: str, tab: Any, tmp_path: Path, mode: str) -> None:
    """No label leaves the page, or lies over another column of labels; what is too long is cut and says so."""
    long = ["Donaudampfschifffahrt", "INTERNATIONALIZATION", "\u65e5\u672c\u8a9e" * 8, "x" * 90]
    with Client(minilm_address) as client:
        item = client.attend("a dog or a cat", query_key_vectors=True)
    item.result.tokens.texts[1:5] = long
    drawn(tab, item.save(tmp_path / "page.html", mode))
    if mode == "model":
        tab.locator("#vis svg > g").nth(6).locator("> rect").last.click()
    labels = {"model": ".detail text.token", "neuron": "#collapsed text.token", "head": "#left text, #right text"}[mode]
    boxes = tab.locator(labels).evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
    left, right = boxes[: len(boxes) // 2], boxes[len(boxes) // 2 :]
    assert min(box["left"] for box in left) >= (28 if mode == "neuron" else 0)  # its plus is there
    assert max(box["right"] for box in left) < min(box["left"] for box in right)
    shown = tab.locator(labels).all_text_contents()
    assert any(text.startswith("xxxx") and text.endswith("\u2026") for text in shown)
    if mode == "neuron":
        tab.locator("#collapsed #leftText > g").nth(2).locator("rect").last.click()
        labels = tab.locator("#expanded #rightText text")
        right = labels.evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
        assert max(box["right"] for box in right) <= tab.evaluate("document.documentElement.scrollWidth")
    if mode == "model":
        frame = tab.locator("rect.detail").evaluate("one => one.getBoundingClientRect().toJSON()")
        assert frame["left"] <= min(box["left"] for box in left)
        assert max(box["right"] for box in right) <= frame["right"] <= 1300


def test_the_table_of_a_notebook(minilm_address: str, tab: Any, tmp_path: Path) -> None:
    """The table has a cell for each pair of tokens, coloured, and its labels stay text."""
    with Client(minilm_address) as client:
        item = client.attend(PAIR)
    page = tmp_path / "table.html"
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8">{item._repr_html_()}', encoding="utf-8")
    tab.goto(page.as_uri())
    assert tab.locator("td").count() == item.num_tokens**2
    assert tab.locator("b").count() == 0
    assert tab.locator("tbody th").all_text_contents() == item.row_labels
