"""Who may see the live page and use its controls: a browser or a program on this machine, and no foreign web page.

The gateway listens on loopback only; what is left is a page in the user's own browser that sends requests there, by a
cross-site form (so a header is asked for that no form sends), or under a name of its own that resolves to 127.0.0.1
(so the name asked for has to be a loopback one). That a page says where it is from is looked at for all of the gateway
(`testbed.guard.same_origin`).
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from testbed.openai_api import ApiError

HEADER: Final = "X-Prfaas"


def check_reader(request: web.Request) -> None:
    """Raises ApiError (403) unless the request was addressed to a loopback name."""
    host = request.headers.get("Host", "")
    if not _is_loopback(host):
        raise ApiError(
            403,
            f"Host = {host[:80]!r}: the live page answers to localhost, 127.0.0.1 and [::1] only; use "
            "http://127.0.0.1 and the port of the gateway (from elsewhere: an ssh tunnel)",
            "Host",
            "forbidden",
        )


def check_writer(request: web.Request) -> None:
    """Raises ApiError (403) unless the request comes from the live page itself, or from a program."""
    check_reader(request)
    if HEADER not in request.headers:
        raise ApiError(
            403, f"{HEADER}: missing; send it, with any value: foreign web pages cannot", HEADER, "forbidden"
        )


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
