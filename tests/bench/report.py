"""What a gate's page weighs, and how soon a browser has it.

    python -m tests.bench.report [FOLDER] --json

FOLDER is a gate's results, written anew first; without one, `prfaas gate --suite quick` is run for it. The page is
opened in a fresh Chromium each time, from the file, at 1280 pixels: `loaded_s` until its load event (everything can be
read), `drawn_s` until the charts of the open scenario are drawn as well, both from the start of the navigation. Exit
code 1 when it weighs 6 MB or more, or the median of either is a second or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from testbed.gate.report.write import JUNIT, MARKDOWN, PAGE, write_gate
from testbed.gate.result import read
from tests.wire.browser import chromium

MOST_BYTES, MOST_S = 6e6, 1.0


async def opened(path: Path) -> tuple[float, float]:
    """(loaded, drawn) of one opening, seconds."""
    async with chromium() as page:
        await page.look_like(1280, 900, "light")
        await page.open(path.absolute().as_uri())
        await page.until("performance.getEntriesByName('drawn').length || !document.querySelector('details[open]')")
        loaded_ms = await page.do("performance.getEntriesByType('navigation')[0].loadEventEnd")
        drawn_ms = await page.do("performance.getEntriesByName('drawn')[0]?.startTime ?? 0")
        return loaded_ms / 1e3, drawn_ms / 1e3


def measure(folder: Path, times: int) -> dict[str, Any]:
    result = read(folder)
    started_s = time.perf_counter()
    write_gate(result, folder)
    wrote_s = time.perf_counter() - started_s
    openings = [asyncio.run(opened(folder / PAGE)) for _ in range(times)]
    loaded, drawn = zip(*openings, strict=True)
    return {
        "scenarios": len(result.scenarios),
        "write_s": round(wrote_s, 3),
        **{f"{name}_bytes": (folder / name).stat().st_size for name in (PAGE, MARKDOWN, JUNIT)},
        "openings": times,
        "loaded_s": {"median": round(statistics.median(loaded), 3), "max": round(max(loaded), 3)},
        "drawn_s": {"median": round(statistics.median(drawn), 3), "max": round(max(drawn), 3)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prfaas-report-") as scratch:
        folder = asked.folder
        if folder is None:
            folder = Path(scratch) / "gate"
            command = [sys.executable, "-m", "testbed.cli", "gate", "--candidate", "static", "--out", str(folder)]
            subprocess.run(command, check=False, stdout=sys.stderr)
        found = measure(folder, asked.times)
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
    fits = found[f"{PAGE}_bytes"] < MOST_BYTES
    return 0 if fits and max(found[name]["median"] for name in ("loaded_s", "drawn_s")) < MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())
