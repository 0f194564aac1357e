"""`prfaas figure`: each of the project's figures made anew, with the table behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import orjson

from testbed.figures.draw import write_csv
from testbed.points import Runner

Format = Literal["svg", "pdf"]


def make_table_6(out: Path, form: Format) -> list[Path]:
    """Table 6: the paper's cells, ours in its form and with expectations. Returns the files written, figure first."""
    from testbed.figures.plan import plot_table_6, table_6_rows

    rows = table_6_rows(_plan())
    drawn, table = out / f"table6.{form}", out / "table6.csv"
    plot_table_6(rows, drawn)
    write_csv(table, rows)
    return [drawn, table]


def make_figure_5(out: Path, form: Format) -> list[Path]:
    """Figure 5: throughput over the split, and over the threshold."""
    from testbed.figures.plan import figure_5_rows, plot_plan

    result = _plan()
    drawn, table = out / f"figure5.{form}", out / "figure5.csv"
    plot_plan(result, drawn)
    write_csv(table, figure_5_rows(result))
    return [drawn, table]


def make_open_question(
    out: Path, form: Format, runner: Runner, *, replications: int | None = None, duration_s: float | None = None
) -> list[Path]:
    """The open question: three figures, three tables, and how they were made. replications, duration_s: of `study`."""
    from testbed.figures import study as figures
    from testbed.openquestion import HOUR_S, REPLICATIONS, study

    result = study(runner, replications=replications or REPLICATIONS, duration_s=duration_s or HOUR_S)
    cells, h20 = result["cells"], result["sensitivity"]
    drawn = [out / f"open-question{part}.{form}" for part in ("", "-link", "-h20")]
    figures.plot_ttft(cells, drawn[0])
    figures.plot_link(cells, drawn[1])
    figures.plot_sensitivity(h20, drawn[2])
    tables = {
        out / "open-question.csv": cells,
        out / "open-question-settled.csv": result["settled"],
        out / "open-question-h20.csv": h20,
    }
    for path, rows in tables.items():
        write_csv(path, rows)
    facts = {key: value for key, value in result.items() if key not in ("cells", "settled", "sensitivity")}
    made = out / "open-question.json"
    made.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")
    return [*drawn, *tables, made]


SOLVED: Final[dict[str, Callable[[Path, Format], list[Path]]]] = {"table6": make_table_6, "figure5": make_figure_5}
NAMES: Final = (*SOLVED, "open-question")


def _plan() -> dict[str, object]:
    from testbed.assemble import build_plan
    from testbed.scenario import load

    return build_plan(load("paper"))
