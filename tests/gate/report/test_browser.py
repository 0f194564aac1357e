"""`report.html` in a real browser: it fits, draws what it says it draws, and is read with the keyboard alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from testbed.gate.report.write import write_gate
from testbed.gate.result import GateResult
from tests.wire.browser import CHROMIUM, Page, chromium

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "PRFAAS_CI" not in os.environ, reason="no chromium; install Debian's package of that name"
)
OPEN = "document.querySelectorAll('details.scenario[open] figure').length"
LINK_DROP = "[...document.querySelectorAll('details.scenario')].find(one => one.innerText.includes('link-drop'))"


@pytest.fixture
async def page(result: GateResult, folder: Path) -> AsyncIterator[Page]:
    """The page at 1280 pixels, with the scenario opened whose runs can be drawn."""
    write_gate(result, folder)
    async with chromium() as made:
        await made.look_like(1280, 900, "light")
        await made.open(f"file://{folder / 'report.html'}")
        await made.do(f"{LINK_DROP}.open = true")
        await made.until(f"{LINK_DROP}.querySelectorAll('.js-plotly-plot').length >= 4")
        yield made
        assert made.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_it_fits_the_window_in_either_scheme(page: Page, width: int, scheme: str) -> None:
    await page.look_like(width, 900, scheme)
    await page.until(f"{LINK_DROP}.dataset.drawn === '{'narrow' if width < 760 else 'wide'}'")
    await page.until(f"document.documentElement.scrollWidth === {width}", patience_s=5)
    await page.until("[...document.querySelectorAll('figure')].every(one => one.scrollWidth <= one.clientWidth + 1)")
    paper = await page.do("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


async def test_both_arms_are_drawn_side_by_side_on_one_scale(page: Page) -> None:
    lines = await page.do(f"[...{LINK_DROP}.querySelectorAll('figure.wide .plot')].map(one => one.data.length)[0]")
    assert lines >= 16
    ranges = await page.do(
        f"(plot => [plot.layout.yaxis.range, plot.layout.yaxis2.range])({LINK_DROP}.querySelector('figure.wide .plot'))"
    )
    assert ranges[0] == ranges[1]


async def test_a_scenario_is_drawn_when_the_keyboard_opens_it(page: Page) -> None:
    before = await page.do(OPEN)
    await page.do("document.querySelector('details.scenario:not([open]) > summary').focus()")
    await page.press("Enter")
    await page.until(f"{OPEN} > {before}")


async def test_the_arrow_keys_read_values_and_escape_puts_them_away(page: Page) -> None:
    await page.do(f"{LINK_DROP}.querySelector('figure.wide .plot').focus()")
    for _ in range(3):
        await page.press("ArrowRight")
    said = await page.until(f"{LINK_DROP}.querySelector('figure.wide output').innerText")
    assert "link" in said
    assert "threshold" in said
    await page.press("Escape")
    await page.until(f"!{LINK_DROP}.querySelector('figure.wide output').innerText")


async def test_the_words_are_there_without_a_script(page: Page) -> None:
    await page.send("Emulation.setScriptExecutionDisabled", value=True)
    await page.send("Page.reload")
    await asyncio.sleep(0.5)
    told = await page.send("DOM.getDocument", depth=-1)
    assert "Worse: mine:HalfAway is worse than" in str(told)
