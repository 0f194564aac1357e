"""Runs a Python module as root under a User-Mode Linux kernel, which has sch_netem, with this host's files.

It boots in two seconds and halts when the module ends; fork and exec cost thirteen times what they cost here, so few
processes. `netem.uml`, which measures the link's matrix there, says what it needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from netem.uml import environment, missing

ROOM = Path(__file__).parents[2]
MODULES = ("veth", "sch_htb", "cls_u32", "sch_netem")

_INIT = """#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run
mount -t tmpfs tmp /lib/modules; mkdir -p /lib/modules/$(uname -r)
mount --bind /usr/lib/uml/modules/$(uname -r) /lib/modules/$(uname -r)
for module in {modules}; do modprobe $module; done
ip link set lo up
cd {room} && {command} >{work}/out 2>{work}/err; echo $? >{work}/rc; sync
echo 1 >/proc/sys/kernel/sysrq; echo o >/proc/sysrq-trigger; sleep 5
"""


def why_not() -> str | None:
    """What is missing here; None when nothing is."""
    return missing() or ("needs root" if os.geteuid() != 0 else None)


def run(module: str, *arguments: str, work: Path, modules: Sequence[str] = MODULES, timeout_s: float = 400) -> str:
    """What `python -m module arguments` printed under the other kernel; an AssertionError with its stderr if it failed.

    `work`: an empty directory of the caller's.
    """
    command = " ".join([sys.executable, "-m", module, *arguments])
    init = work / "init"
    init.write_text(_INIT.format(modules=" ".join(modules), room=ROOM, command=command, work=work))
    init.chmod(0o755)
    machine = ["rootfstype=hostfs", "rootflags=/", "rw", "mem=1G", f"init={init}", "con=null", "con0=null"]
    booted = subprocess.run(
        ["linux", *machine], stdin=subprocess.DEVNULL, capture_output=True, env=environment(work), timeout=timeout_s
    )
    said = work / "err"
    verdict = work / "rc"
    assert verdict.exists(), f"User-Mode Linux did not boot: {booted.stdout.decode(errors='replace')[-2000:]}"
    assert verdict.read_text().strip() == "0", said.read_text()
    return (work / "out").read_text()
