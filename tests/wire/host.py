"""What this host has of its own, before and after: interfaces, addresses, routes, qdiscs, rules, mounts, settings.

Nothing of it may be touched by a testbed, however that ends. Counters and lifetimes, which change by themselves, are
left out. `holders` says who still holds a network namespace of a testbed that should be gone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "links": ("ip", "-j", "link"),
    "addresses": ("ip", "-j", "address"),
    "routes": ("ip", "-j", "route", "show", "table", "all"),
    "routing rules": ("ip", "-j", "rule"),
    "qdiscs": ("tc", "-j", "qdisc"),
    "nf_tables": ("nft", "list", "ruleset"),
    "iptables": ("iptables-save",),
}
SETTINGS = ("ip_forward", "tcp_rto_max_ms", "tcp_retries2", "tcp_wmem", "tcp_rmem", "tcp_congestion_control")
_MOVING = ("valid_life_time", "preferred_life_time", "expires", "age")
_COUNTS = re.compile(r"packets \d+ bytes \d+|\[\d+:\d+\]|^# .*$", re.MULTILINE)


def snapshot() -> dict[str, list[str]]:
    """By kind, its entries as texts. A program that is not installed answers nothing, before as after."""
    found = {kind: _ask(question) for kind, question in QUESTIONS.items()}
    mounts = [line.split(" ", 3)[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found["mounts"] = sorted(mounts)
    found["named namespaces"] = sorted(str(path) for path in Path("/run").glob("netns/*"))
    found["runtime files"] = sorted(str(path) for path in Path("/run").glob("*"))
    found["settings"] = [f"{name} {_setting(name)}" for name in SETTINGS]
    return found


def differences(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> list[str]:
    """What is there in one of two snapshots only, in words."""
    told = []
    for kind, was in before.items():
        now = after[kind]
        told += [f"{kind}: gone: {one}" for one in was if one not in now]
        told += [f"{kind}: new: {one}" for one in now if one not in was]
    return told


def namespaces(pids: Iterable[int]) -> set[str]:
    """The network namespaces of these processes, as the kernel names them; not the host's own."""
    found = {name for pid in pids if (name := _link(f"/proc/{pid}/ns/net"))}
    return found - {_link("/proc/self/ns/net")}


def holders(namespaces: set[str]) -> list[str]:
    """Who holds one of these network namespaces: a process that is in it, one with a descriptor of it, a mount."""
    told = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        if _link(f"/proc/{pid}/ns/net") in namespaces:
            told.append(f"process {pid} is in a network namespace of the testbed")
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if _link(str(descriptor)) in namespaces:
                    told.append(f"process {pid} holds a network namespace of the testbed")
    mounts = Path("/proc/self/mountinfo").read_text()
    return told + [f"{name} is mounted" for name in sorted(namespaces) if name in mounts]


def marked(state_dir: Path) -> list[str]:
    """Processes that were started for this state directory, clients such as Locust included, as `pid command`."""
    mark = f"PRFAAS_STATE={state_dir}".encode()
    told = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        with suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                told.append(f"{pid} {command.strip()}")
    return told


def _ask(question: tuple[str, ...]) -> list[str]:
    if shutil.which(question[0]) is None:
        return []
    answer = subprocess.run(question, capture_output=True, text=True, timeout=30)
    if "-j" not in question:
        return [line.rstrip() for line in _COUNTS.sub("", answer.stdout).splitlines() if line.strip()]
    return [json.dumps(_still(one), sort_keys=True) for one in json.loads(answer.stdout or "[]")]


def _still(value: Any) -> Any:
    """A JSON value without what changes by itself."""
    if isinstance(value, dict):
        return {key: _still(inner) for key, inner in value.items() if key not in _MOVING}
    return [_still(inner) for inner in value] if isinstance(value, list) else value


def _setting(name: str) -> str:
    try:
        return Path(f"/proc/sys/net/ipv4/{name}").read_text().strip()
    except OSError:
        return "is not there"


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
