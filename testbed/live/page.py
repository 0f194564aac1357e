"""The page itself: files of the package, read once, with headers that let it load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from aiohttp import web

from testbed.live.access import check_reader
from testbed.openai_api import ApiError

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Page:
    """`GET /dashboard` and `GET /dashboard/{name}`."""

    def __init__(self) -> None:
        folder = files("testbed.live") / "assets"
        self._files: dict[str, tuple[bytes, str]] = {}
        for entry in (*folder.iterdir(), *(folder / "vendor").iterdir()):
            kind = TYPES.get("." + entry.name.rpartition(".")[2])
            if kind is not None:
                self._files[entry.name] = entry.read_bytes(), kind

    async def get(self, request: web.Request) -> web.Response:
        """A file of the page; 304 where the browser has it."""
        check_reader(request)
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            raise ApiError(404, f"/dashboard/{name}: no such file; the page is at /dashboard", code="not_found")
        body, kind = self._files[name]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={**headers, "Content-Type": kind})
