"""The embedded launcher: every process in network namespaces of this host, as root or as an ordinary user, without
touching the host's network. Its supervisor is pid 1 of namespaces of its own, under one outer `unshare`.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from testbed.launch import processes
from testbed.launch.spec import LaunchSpec
from testbed.launch.state import StateDir, TestbedError

PATIENCE = 1.0
STOP_S = 6.0  # the supervisor gives its processes 3
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


def prepare(state: StateDir, spec: LaunchSpec) -> None:
    """Nothing: pid 1 builds the namespaces."""


def argv() -> list[str]:
    """The command of pid 1 in new namespaces. Raises `TestbedError` where `unshare` is not installed."""
    return [*unshare_argv(), sys.executable, "-m", "testbed.launch.pid1"]


def clear(state: StateDir) -> list[str]:
    """Nothing outlives a pid 1."""
    return []


def host_pids(state: StateDir) -> Mapping[int, int]:
    """Pids as seen inside the testbed -> pids on this host."""
    return processes.host_pids(state.root)


def unshare_argv() -> list[str]:
    """The command prefix that gives a program its own namespaces, as pid 1. It needs a user namespace unless this
    process may administer the host. Raises `TestbedError` where `unshare` is not installed.
    """
    path = shutil.which("unshare", path=processes.search_path())
    if path is None:
        raise TestbedError("the program unshare is not there; install util-linux")
    user = [] if _may_administer() else ["--user", "--map-root-user"]
    return [path, *user, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def refusal() -> str | None:
    """Why namespaces cannot be made here, with the remedy; None if they can. Really tries, in about 20 ms."""
    try:
        argv = unshare_argv()
    except TestbedError as error:
        return str(error)
    try:
        tried = subprocess.run([*argv, "true"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "namespaces cannot be made: `unshare` did not answer within 20 s"
    if tried.returncode == 0:
        return None
    why = tried.stderr.strip().splitlines()[-1:] or [f"unshare ended with {tried.returncode}"]
    return f"namespaces cannot be made here ({why[0]}); {_remedy()}"


def _may_administer() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
            return all(capabilities >> bit & 1 for bit in (CAP_NET_ADMIN, CAP_SYS_ADMIN))
    return False


def _remedy() -> str:
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor keeps ordinary users from them (Ubuntu 24.04 and later): run as root, or "
            "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return "run as root, or `sudo sysctl kernel.unprivileged_userns_clone=1`"
    if _sysctl("user/max_user_namespaces") == "0":
        return "run as root, or `sudo sysctl user.max_user_namespaces=10000`"
    return (
        "inside a container: start it with --privileged, or with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined; "
        "elsewhere run as root"
    )


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None
