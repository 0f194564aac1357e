"""Boots User-Mode Linux (Debian: user-mode-linux, kmod) with this machine's files and measures cells in it.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m netem.uml --plan JSON --until-eof

For kernels without sch_netem: that one has it. It is up in seconds, runs `python -m netem.matrix` as its only program,
and halts. What passes between the two lies in a /run of this mount namespace, so nothing stays of it. Each line of the
matrix is passed on with `host_ns`, this machine's clock, since a guest's may go wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from netem.link import LinkError
from netem.matrix import Say, command, own_run

SILENCE_S: Final = 300.0
"""No line for as long, and it hangs."""
PROGRAMS: Final = ("linux", "modprobe")
PACKAGES: Final = "user-mode-linux kmod"
LARGE_STATE: Final = {"amx_tile", "apx_f"}
"""Of a CPU's flags: register state that UML 6.1 has no room for, see uml_xstate.c."""
MODULES: Final = "veth sch_htb cls_u32 sch_netem sch_ingress act_gact act_mirred"
_POLL_S = 0.05
_WORK = Path("/run/uml")

_INIT = """#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONPATH={pythonpath}
mount -t proc proc /proc; mount -t sysfs sys /sys
mount -t tmpfs tmp /lib/modules; mkdir -p /lib/modules/$(uname -r)
mount --bind /usr/lib/uml/modules/$(uname -r) /lib/modules/$(uname -r)
for module in {modules}; do modprobe -q $module; done
ip link set lo up
exec 3>{work}/rc
cd {cwd} && {python} -m netem.matrix --plan "$(<{work}/plan)" </dev/null >{work}/out 2>{work}/err; echo $? >&3; sync
echo 1 >/proc/sys/kernel/sysrq; echo o >/proc/sysrq-trigger; sleep 5
"""


def missing() -> str | None:
    """What has to be installed for it; None if nothing."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if not lacking and _large_state() and shutil.which("cc") is None:
        return (
            "cc: not installed, and this CPU has more registers than User-Mode Linux saves; install gcc and libc6-dev"
        )
    if not lacking:
        return None
    return f"{' and '.join(lacking)}: not installed; on Debian: apt-get install --no-install-recommends {PACKAGES}"


def environment(work: Path) -> dict[str, str]:
    """The environment in which to start `linux`. `work`: an empty directory of the caller's, for its memory, its
    sockets, and what this CPU's registers need. Raises LinkError where that cannot be built."""
    home = {"HOME": str(work), "TMPDIR": str(work)}
    if _large_state():
        library = work / "xstate.so"
        source = Path(__file__).with_name("uml_xstate.c")
        built = subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True)
        if built.returncode != 0:
            raise LinkError(f"{source}: cannot be built ({built.stderr.strip()}); install gcc and libc6-dev")
        home["LD_PRELOAD"] = str(library)
    return {**os.environ, **home}


def run(plan: Mapping[str, Any], say: Say) -> None:
    """Boot it, measure the plan's cells in it, `say` each line as it comes. Raises LinkError when it does not do it."""
    if lacking := missing():
        raise LinkError(lacking)
    own_run()
    _WORK.mkdir()
    (_WORK / "plan").write_text(json.dumps(plan))
    for name in ("out", "err", "rc"):
        (_WORK / name).touch()
    names = {"work": _WORK, "cwd": os.getcwd(), "python": sys.executable, "modules": MODULES}
    init = _WORK / "init"
    init.write_text(_INIT.format(**names, pythonpath=os.environ.get("PYTHONPATH", "")))
    init.chmod(0o755)
    machine = ["rootfstype=hostfs", "rootflags=/", "rw", "mem=1G", f"init={init}", "con=null", "con0=null"]
    with open(_WORK / "console", "wb") as console, open(_WORK / "out") as out:
        guest = subprocess.Popen(
            ["linux", *machine], stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment(_WORK)
        )
        heard_s, halted, line = time.monotonic(), False, ""
        while not halted:
            halted = guest.poll() is not None  # before the last look
            while piece := out.readline():
                line += piece
                if not line.endswith("\n"):
                    break  # the guest's files are written page by page: the rest is yet to come
                say({**json.loads(line), "host_ns": time.monotonic_ns()})
                heard_s, line = time.monotonic(), ""
            if time.monotonic() - heard_s > SILENCE_S:
                guest.kill()
                raise LinkError(f"User-Mode Linux said nothing for {SILENCE_S:g} s: {_last('console')}")
            time.sleep(_POLL_S)
    if (_WORK / "rc").read_text().strip() != "0":
        raise LinkError(f"in User-Mode Linux: {_last('err') or _last('console') or 'it did not boot'}")


def _large_state() -> bool:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    return not LARGE_STATE.isdisjoint(flags.split())


def _last(name: str) -> str:
    lines = (_WORK / name).read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-5:]).removeprefix("error: ")


if __name__ == "__main__":
    sys.exit(command("python -m netem.uml", "Measure cells in User-Mode Linux.", run))
