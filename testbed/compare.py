"""Policies side by side on one deployment: every figure of each of them, and its difference to the first policy's.

The requests are the same, so differences are paired: a figure's difference is taken seed by seed, and its interval is
over seeds. Pure: from summaries to tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from testbed.report.intervals import interval, main_figures, over_runs, repeated
from testbed.report.rows import PARTS

Summary = Mapping[str, Any]


def figures(summary: Summary) -> dict[str, float | None]:
    """What policies are compared in: the main figures, requests, mean TTFT parts (s), and changes made on the way."""
    parts = summary["ttft_split_s"]["overall"]
    return {
        **{key: summary["requests"][key] for key in ("completed", "failed")},
        **main_figures(summary),
        **{f"ttft_{part}_mean_s": parts[part]["mean"] for part in PARTS},
        **{key: summary["scheduler"][key] for key in ("threshold_changes", "role_changes")},
    }


def repeats(by_seed: Mapping[int, Summary]) -> dict[str, Any]:
    """Runs of one policy under several seeds, as `testbed.points.repeat` gives them."""
    verdicts = [summary["verdict"]["status"] for summary in by_seed.values()]
    return repeated(list(by_seed), verdicts, [main_figures(summary) for summary in by_seed.values()])


def compare(by_policy: Mapping[str, Mapping[int, Summary]]) -> dict[str, Any]:
    """The comparison of policies, from the summaries of their runs: policy -> seed -> summary.

    policies: each one's summary under its first seed. runs: seeds, verdicts and their reasons. figures: mean and 95 %
    interval over seeds. differences: of every policy but the first to the first, likewise, over the seeds that both
    were run under; `low` and `high` are None with fewer than two of them. A run that is not valid counts.
    """
    (first, base), *others = by_policy.items()
    known = {name: {seed: figures(run) for seed, run in runs.items()} for name, runs in by_policy.items()}
    summary = next(iter(base.values()))
    return {
        **{key: summary[key] for key in ("scenario", "deployment", "clock")},
        "policies": {name: next(iter(runs.values())) for name, runs in by_policy.items()},
        "runs": {name: _runs(runs) for name, runs in by_policy.items()},
        "figures": {name: over_runs(list(runs.values())) for name, runs in known.items()},
        "differences": {name: _differences(known[first], known[name]) for name, _ in others},
    }


def _runs(by_seed: Mapping[int, Summary]) -> dict[str, list[Any]]:
    verdicts = [summary["verdict"] for summary in by_seed.values()]
    return {
        "seeds": list(by_seed),
        "verdicts": [verdict["status"] for verdict in verdicts],
        "reasons": [verdict["reasons"] for verdict in verdicts],
    }


def _differences(
    base: Mapping[int, Mapping[str, float | None]], other: Mapping[int, Mapping[str, float | None]]
) -> dict[str, dict[str, float | None]]:
    pairs = [(base[seed], of) for seed, of in other.items() if seed in base]
    return {key: interval([_less(of[key], was[key]) for was, of in pairs]) for key in next(iter(base.values()))}


def _less(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write `comparison.json` or `repeats.json`."""
    path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))
