"""What this machine can carry, asked before anything is started: `prfaas doctor`. What the kernel must do is really
tried, in a throw-away namespace; nothing of the host is changed.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.capabilities import probe
from netem.link import LinkError
from testbed.launch import engine
from testbed.launch.handover import open_port
from testbed.launch.namespaces import refusal, unshare_argv
from testbed.launch.processes import search_path
from testbed.launch.state import StateDir, TestbedError

Status = Literal["ok", "warn", "missing"]
PYTHON = (3, 11)
LINK = ("delay, loss", "jitter, stall", "punctuality")
CORES = 4
MEMORY_BYTES = 4 << 30
DISK_BYTES = 1 << 30
REQUIRED_PROGRAMS = ("unshare", "nsenter")
OTHER_PROGRAMS = {"ip": "iproute2", "tc": "iproute2"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `missing`: a testbed cannot start; `warn`: some scenarios cannot, or figures suffer. `remedy` is
    empty where none is needed.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def checks(port: int = 8000) -> list[Check]:
    """All findings, in the order to read them; `port` is the one to be free. Takes about a second; raises nothing."""
    found = [_linux(), _python(), *_programs()]
    refused = refusal() if sys.platform == "linux" else "not Linux"
    if refused is None:
        found.append(Check("namespaces", "ok", f"can be made as uid {os.geteuid()}"))
        found += [*_kernel(_probe()), *_link()]
    else:
        what, _, remedy = refused.partition("; ")
        found.append(Check("namespaces", "missing", what, remedy))
    return [*found, _cores(), _memory(), _disk(), _port(port), _congestion_control(), _containers()]


def _linux() -> Check:
    if sys.platform != "linux":
        return Check("linux", "missing", f"this is {platform.system()}", "use Linux, or a Linux virtual machine")
    return Check("linux", "ok", f"{platform.release()} {platform.machine()}")


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info < PYTHON:
        return Check("python", "missing", version, f"use Python {PYTHON[0]}.{PYTHON[1]} or later")
    return Check("python", "ok", version)


def _programs() -> list[Check]:
    path = search_path()
    found = []
    for program in REQUIRED_PROGRAMS:
        where = shutil.which(program, path=path)
        remedy = "" if where else "install util-linux"
        found.append(Check(program, "ok" if where else "missing", where or "not found", remedy))
    for program, package in OTHER_PROGRAMS.items():
        where = shutil.which(program, path=path)
        remedy = "" if where else f"install {package}"
        detail = where or "not found; it is for looking at the link by hand"
        found.append(Check(program, "ok" if where else "warn", detail, remedy))
    return found


def _containers() -> Check:
    """Only `--launcher compose` needs them."""
    try:
        version = engine.connect(timeout_s=5).version()["Version"]
        built_by = engine.builder()[0]
    except TestbedError as error:
        what, _, remedy = str(error).partition("; ")
        return Check("containers", "warn", f"{what}; only --launcher compose needs it", remedy)
    return Check("containers", "ok", f"engine {version}, images built by {built_by}")


def _probe() -> dict[str, str]:
    """Kernel feature -> "" if it works, else why not, tried in a throw-away namespace."""
    try:
        tried = subprocess.run(
            [*unshare_argv(), sys.executable, "-m", "testbed.doctor"], capture_output=True, text=True, timeout=60
        )
        answer: dict[str, str] = json.loads(tried.stdout)
        return answer
    except (TestbedError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"veth": f"could not be tried ({error})"}


def _kernel(tried: dict[str, str]) -> list[Check]:
    found = []
    for name, what in (("veth", "pairs of interfaces between sites"), ("htb", "the link's rate")):
        refused = tried.get(name, "could not be tried")
        remedy = (
            f"load its module as root: modprobe {'sch_htb' if name == 'htb' else name}; or use a kernel that has it"
        )
        found.append(
            Check(name, "ok", f"{what}: works") if not refused else Check(name, "missing", f"{what}: {refused}", remedy)
        )
    for name in ("ingress", "ifb"):
        refused = tried.get(name, "could not be tried")
        found.append(Check(name, "ok", f"{refused or 'works'} (informational: nothing needs it)"))
    return found


def _link() -> list[Check]:
    """Delay, jitter and loss, and how punctual they are."""
    try:
        capabilities = [one for one in probe(unshare_argv()) if one.name in LINK]
    except (LinkError, TestbedError) as error:
        what, _, remedy = str(error).rpartition("; ")
        return [Check(LINK[0], "warn", what, remedy)]
    return [
        Check(one.name, "warn" if one.remedy else "ok", f"{one.backend or 'nothing'}: {one.why}", one.remedy)
        for one in capabilities
    ]


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < CORES:
        return Check(
            "cores", "warn", f"{cores}", f"{CORES} or more; with fewer, use small scenarios such as toy or smoke"
        )
    return Check("cores", "ok", f"{cores}")


def _memory() -> Check:
    free = psutil.virtual_memory().available
    if free < MEMORY_BYTES:
        return Check("memory", "warn", f"{free / 2**30:.1f} GiB available", f"free {MEMORY_BYTES / 2**30:.0f} GiB")
    return Check("memory", "ok", f"{free / 2**30:.1f} GiB available")


def _disk() -> Check:
    try:
        root = StateDir().root
    except TestbedError as error:
        return Check("state directory", "missing", str(error), "set PRFAAS_STATE")
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Check("state directory", "missing", f"{root}: {there} is not yours to write", "set PRFAAS_STATE")
    if free < DISK_BYTES:
        return Check(
            "state directory", "warn", f"{root}: {free / 2**30:.1f} GiB free", "free 1 GiB, or set PRFAAS_STATE"
        )
    return Check("state directory", "ok", f"{root}: {free / 2**30:.1f} GiB free")


def _port(port: int) -> Check:
    try:
        open_port(port).close()
    except TestbedError as error:
        what, _, remedy = str(error).rpartition("; ")
        return Check(f"port {port}", "warn", what, remedy)
    return Check(f"port {port}", "ok", "free")


def _congestion_control() -> Check:
    available = _read("/proc/sys/net/ipv4/tcp_available_congestion_control")
    current = _read("/proc/sys/net/ipv4/tcp_congestion_control")
    detail = f"{available} (the host uses {current})"
    if "cubic" not in available.split():
        return Check(
            "congestion control", "warn", detail, "as root: modprobe tcp_cubic, or name another in the scenario"
        )
    return Check("congestion control", "ok", detail)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _try_features() -> dict[str, str]:
    """Run inside a throw-away namespace: feature -> "" or why the kernel refuses it."""
    with IPRoute() as ip:
        interface = "prfdoc0"

        def index(name: str) -> int:
            found = ip.link_lookup(ifname=name)
            return int(found[0]) if found else 1

        steps: dict[str, Callable[[], object]] = {
            "veth": lambda: ip.link("add", ifname=interface, kind="veth", peer={"ifname": "prfdoc1"}),
            "htb": lambda: ip.tc("add", "htb", index(interface), "1:", default=0x10),
            "ingress": lambda: ip.tc("add", "ingress", index(interface), "ffff:"),
            "ifb": lambda: ip.link("add", ifname="prfdoc2", kind="ifb"),
        }
        results = {}
        for name, step in steps.items():
            try:
                step()
                results[name] = ""
            except NetlinkError as error:
                results[name] = f"this kernel refuses it ({os.strerror(abs(error.code))})"
    return results


if __name__ == "__main__":
    print(json.dumps(_try_features()))
