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


@pytest.mark.parametrize("mode", ["head", "model", "neuron"])
def test_a_page_draws_the_answer(minilm_address: str, tab: Any, tmp_path: Path, mode: str) -> None:
    """The page shows every token as text, draws, and offers the parts of a pair."""
    with Client(minilm_address) as client:
        item = client.attend(PAIR, query_key_vectors=True)
    tab.goto(item.save(tmp_path / f"{mode}.html", mode, layer=None if mode == "model" else -1).as_uri())
    tab.wait_for_function("document.querySelectorAll('#vis svg *').length > 100")
    tab.wait_for_timeout(300)
    tab.screenshot(path=tmp_path / f"{mode}.png")
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


def test_the_table_of_a_notebook(minilm_address: str, tab: Any, tmp_path: Path) -> None:
    """The table has a cell for each pair of tokens, coloured, and its labels stay text."""
    with Client(minilm_address) as client:
        item = client.attend(PAIR)
    page = tmp_path / "table.html"
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8">{item._repr_html_()}', encoding="utf-8")
    tab.goto(page.as_uri())
    tab.screenshot(path=tmp_path / "table.png")
    assert tab.locator("td").count() == item.num_tokens**2
    assert tab.locator("b").count() == 0
    assert tab.locator("tbody th").all_text_contents() == item.row_labels
