"""The live page in a real browser, on a real testbed: what it shows is what happens, and what it does happens.

Debian's Chromium without a screen, over the DevTools protocol (`browser.py`). Nothing here is about speed.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testbed.launch import namespaces
from tests.wire.browser import CHROMIUM, Page, chromium
from tests.wire.test_testbed import Command

REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)),
    pytest.mark.skipif(
        CHROMIUM is None and "PRFAAS_CI" not in os.environ, reason="no chromium; install Debian's package of that name"
    ),
]

LONG = 32768  # goes to PrfaaS
LIVE = "document.getElementById('connection').dataset.state === 'live' && !!document.querySelector('.node')"
LOG = "[...document.querySelectorAll('#log .what')].map(one => one.innerText)"
KEYS = "[...document.querySelectorAll('#chart-{} .keys b')].map(one => one.textContent)"


@pytest.fixture(scope="module")
def prfaas() -> Iterator[Command]:
    """The toy's testbed, up."""
    with tempfile.TemporaryDirectory(prefix="prf") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = Command(Path(folder), port)
        try:
            up(command)
            yield command
        finally:
            command("down")


def up(prfaas: Command) -> None:
    done = prfaas("up", "toy", "--port", str(prfaas.port))
    assert done.returncode == 0, done.stderr


@pytest.fixture
async def page(prfaas: Command) -> AsyncIterator[Page]:
    """The live page, open and told of the testbed; at the end nothing was complained of, and no fault is left."""
    async with chromium() as made:
        await made.look_like(1280, 900, "light")
        await made.open(f"http://127.0.0.1:{prfaas.port}/dashboard")
        await made.until(LIVE)
        yield made
        ask(prfaas, "DELETE", "/prfaas/faults")
        await made.until("!document.querySelector('#troubles li')")
        assert made.problems == []


def ask(prfaas: Command, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """One request to the gateway: status and JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", prfaas.port, timeout=30)
    connection.request(method, path, None if body is None else json.dumps(body), {"X-Prfaas": "1", **headers})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return answer.status, told


@contextmanager
def traffic(prfaas: Command, clients: int = 4) -> Iterator[None]:
    """Long prompts, one after the other from each client."""
    enough = threading.Event()

    def send() -> None:
        while not enough.is_set():
            body = {"prfaas": {"input_tokens": LONG}, "max_tokens": 4}
            status, told = ask(prfaas, "POST", "/v1/completions", body)
            assert status == 200, told

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        enough.set()
        for one in threads:
            one.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_it_fits_the_window_and_the_readers_scheme(page: Page, width: int, scheme: str) -> None:
    await page.look_like(width, 844, scheme)
    await page.until(f"innerWidth === {width} && document.querySelector('#chart-link canvas').clientWidth < {width}")
    wider = "[...document.querySelectorAll('main *')].filter(one => one.getBoundingClientRect().right > innerWidth + 1)"
    await page.until(f"{wider}.length === 0")  # the charts follow the window one after the other
    assert await page.do("document.documentElement.scrollWidth") == width
    rgb = await page.do("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(rgb) / 3 < 128) == (scheme == "dark")


async def test_it_shows_the_fleet_and_labels_its_units(page: Page) -> None:
    names = await page.do("[...document.querySelectorAll('.node .name')].map(one => one.textContent)")
    assert names == ["prfaas-0", "prfaas-1", "pd-p-0", "pd-d-0", "pd-d-1"]
    text = await page.text()
    for label in ("model time", "wall time", "5 model s a second", "0.01 byte on the wire", "8.00 Gbps", "8,192"):
        assert label in text
    controls = "[...document.querySelectorAll('input, select, button')]"
    unnamed = await page.do(f"{controls}.filter(one => !one.labels.length && !one.textContent).map(one => one.name)")
    assert unnamed == []


async def test_a_step_of_the_link_is_made_from_the_page_and_its_curve_moves(page: Page, prfaas: Command) -> None:
    with traffic(prfaas):
        measured = f"({KEYS.format('link')})[1]"
        await page.until(f"{measured}.includes('Gbps') && parseFloat({measured}) > 2")
        before = await page.do("document.querySelector('#chart-link canvas').toDataURL()")
        await page.do("document.querySelector('#link-form [name=rate]').focus()")
        await page.write("1")
        await page.press("Enter")
        await page.until("document.querySelector('#link-form output').textContent.startsWith('link: 1 Gbps: done')")
        await page.until(f"({KEYS.format('link')})[0] === '1.00 Gbps'")
        await page.until(f"{measured}.includes('Mbps') || parseFloat({measured}) < 1.3")
        assert await page.do("document.querySelector('#chart-link canvas').toDataURL()") != before
        await page.until(f"{LOG}.some(one => one.startsWith('link both ways: 8 Gbps → 1 Gbps'))")
        await page.do("document.querySelector('#troubles button').focus()")
        await page.press("Enter")
        await page.until(f"({KEYS.format('link')})[0] === '8.00 Gbps'")
        await page.until(f"{LOG}.some(one => one.startsWith('healed: link: 1 Gbps'))")
        await page.until(f"({KEYS.format('offloaded')})[0] === '100 %' && !({KEYS.format('ttft')}).includes('–')")


async def test_a_fault_is_seen_is_in_the_log_and_heals_by_itself(page: Page) -> None:
    await inject(page, "slow_worker", duration="10", node="pd-d-1", amount="7")
    await page.until("document.querySelector('#fault-form output').textContent.includes('7 times slower: done')")
    state = "[...document.querySelectorAll('.node')].find(one => one.innerText.startsWith('pd-d-1')).innerText"
    await page.until(f"{state}.includes('7× slower')")
    await page.until(f"{LOG}.some(one => one.startsWith('pd-d-1 7 times slower') && one.includes('by hand'))")
    await page.until(f"{LOG}.some(one => one.startsWith('healed: pd-d-1 7 times slower'))")
    await page.until(f"!{state}.includes('slower')")


async def test_a_killed_worker_is_lost_and_comes_back(page: Page) -> None:
    await inject(page, "killed_worker", duration="5", node="pd-d-0")
    await page.until(f"{LOG}.some(one => one.startsWith('pd-d-0 is lost, was up'))")
    await page.until(f"{LOG}.some(one => one.startsWith('pd-d-0 is up, was lost'))", 60)


async def test_an_outage_is_shown_where_the_link_is(page: Page) -> None:
    await inject(page, "outage", duration="1000", how="blackhole")
    await page.until("document.getElementById('pipe').dataset.state === 'outage'")
    assert "outage: blackhole" in await page.do("document.getElementById('pipe').innerText")
    await page.do("document.querySelector('#troubles button').click()")
    await page.until("document.getElementById('pipe').dataset.state !== 'outage'")


@pytest.mark.parametrize(
    ("rate", "said"), [("1000000", "rate_bps = 1e+15"), ("fast", "Rate = fast: a number is needed"), ("", "nothing is")]
)
async def test_what_cannot_be_had_is_said_where_it_was_asked(page: Page, rate: str, said: str) -> None:
    await page.do(f"document.querySelector('#link-form [name=rate]').value = {rate!r}")
    await page.do("document.querySelector('#link-form button[type=submit]').click()")
    await page.until(f"document.querySelector('#link-form output').textContent.includes({said!r})")
    page.problems[:] = [one for one in page.problems if "status of 400" not in one]  # the browser's own note of a 400


async def test_the_keyboard_reaches_everything_and_leaves_again(page: Page) -> None:
    describe = """(() => {
        const one = document.activeElement, style = getComputedStyle(one);
        return one === document.body ? null : [one.id || one.name || one.textContent.trim(), style.outlineStyle];
    })()"""
    await page.do("document.activeElement.blur()")
    seen: list[str] = []
    for _ in range(60):
        await page.press("Tab")
        told = await page.do(describe)
        if told is None or (seen and told[0] == seen[0]):
            break
        assert told[1] != "none", f"no focus to be seen on {told[0]}"
        seen.append(told[0])
    else:
        raise AssertionError(f"the focus never left the page: {seen}")
    assert seen[0] == "Skip to the controls"
    wanted = {"window", "pause", "rate", "delay", "duration", "kind", "how", "Step the link", "Inject", "nominal"}
    assert wanted <= set(seen)


async def test_a_pause_holds_the_picture_and_not_the_log(page: Page) -> None:
    await page.do("document.getElementById('pause').click()")
    clock = await page.do("document.getElementById('clock').textContent")
    await inject(page, "slow_worker", duration="10", node="pd-d-1", amount="3")
    await page.until(f"{LOG}.some(one => one.startsWith('pd-d-1 3 times slower'))")
    assert await page.do("document.getElementById('clock').textContent") == clock
    await page.do("document.getElementById('pause').click()")
    await page.until(f"document.getElementById('clock').textContent !== {clock!r}")


async def test_a_foreign_page_can_do_nothing(prfaas: Command) -> None:
    body = {"rate_bps": 1e9, "duration_s": 60}
    assert ask(prfaas, "POST", "/prfaas/link", body, Host="evil.example")[0] == 403
    assert ask(prfaas, "POST", "/prfaas/link", body, Origin="http://evil.example")[0] == 403
    assert ask(prfaas, "GET", "/prfaas/faults")[1]["faults"] == []


async def test_it_says_that_the_testbed_is_gone_and_comes_back_with_it(page: Page, prfaas: Command) -> None:
    await page.do("window.stillTheSame = true")
    done = prfaas("down")
    assert done.returncode == 0, done.stderr
    pill = "document.getElementById('connection').textContent"
    await page.until(f"{pill}.startsWith('testbed ended at') || {pill}.startsWith('gateway lost at')")
    up(prfaas)
    await page.until(LIVE, 60)
    assert await page.do("window.stillTheSame")
    refused = [one for one in page.problems if "ERR_CONNECTION_REFUSED" in one or "ERR_EMPTY" in one]
    page.problems[:] = [one for one in page.problems if one not in refused]  # of trying again


async def inject(page: Page, kind: str, **fields: str) -> None:
    """Fill in the form of the faults as its reader would, and send it."""
    await page.do(
        f"""(() => {{
            const form = document.getElementById('fault-form');
            form.elements.kind.value = {kind!r};
            form.elements.kind.dispatchEvent(new Event('change', {{ bubbles: true }}));
            for (const [name, value] of Object.entries({json.dumps(fields)})) form.elements[name].value = value;
            form.querySelector('button[type=submit]').click();
        }})()"""
    )
