"""A page in Debian's Chromium without a screen, driven over the DevTools protocol: for tests of pages.

Console messages, exceptions and failed loads are kept; keys are pressed as a keyboard presses them.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
PATIENCE_S = 30.0
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-port=0", "about:blank",
)  # fmt: skip


class Page:
    """One page. `problems`: what its console, its scripts and its loads complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def look_like(self, width: int, height: int, scheme: str) -> None:
        """A window of that size, and the reader's colour scheme: light or dark."""
        phone = width < 600
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def do(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise's when it is one."""
        told = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, (script, told["exceptionDetails"])
        return told["result"].get("value")

    async def until(self, script: str, patience_s: float = PATIENCE_S) -> Any:
        """Wait until a JavaScript expression is true; its value."""
        deadline_s = time.monotonic() + patience_s
        while not (value := await self.do(script)):
            assert time.monotonic() < deadline_s, f"never true: {script}\n{self.problems}\n{await self.text()}"
            await asyncio.sleep(0.05)
        return value

    async def text(self) -> str:
        return str(await self.do("document.body.innerText"))

    async def press(self, key: str) -> None:
        """Press and release a key of KEYS."""
        code = KEYS[key]
        more = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=code,
                **(more if kind == "keyDown" else {}),
            )

    async def write(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.send("Input.insertText", text=text)

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save what it looks like as a PNG."""
        told = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    async def send(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        return await asyncio.wait_for(answer, PATIENCE_S)

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if not answer.done():
                    if "error" in told:
                        answer.set_exception(AssertionError(told["error"]))
                    else:
                        answer.set_result(told["result"])
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(f"exception: {told['exceptionDetails']}")
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.problems.append(f"console.{told['type']}: {told['args']}")
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"log: {told['entry']['text']} {told['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                url = told["request"]["url"]
                if not url.startswith(("http://127.0.0.1", "http://localhost", "data:", "about:", "file:")):
                    self.problems.append(f"asked another host: {url}")


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """A fresh browser with one page; gone afterwards, with whatever it started and stored."""
    assert CHROMIUM is not None, "no chromium; install Debian's package of that name"
    folder = Path(tempfile.mkdtemp(prefix="chromium"))
    process = subprocess.Popen(
        [CHROMIUM, f"--user-data-dir={folder}", *FLAGS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(folder, process)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(one for one in await answer.json(content_type=None) if one["type"] == "page")
            async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                yield page
                page._reading.cancel()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _port(folder: Path, process: subprocess.Popen[bytes]) -> int:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(OSError, IndexError, ValueError):
            return int((folder / "DevToolsActivePort").read_text().splitlines()[0])
        await asyncio.sleep(0.05)
    raise AssertionError(f"Chromium did not start (exit code {process.poll()})")
