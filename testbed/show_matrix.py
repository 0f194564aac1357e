"""What `prfaas link verify --matrix` tells people: a row a cell, what failed, and how two machines agree; on the
terminal, or as a page of Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from testbed.show import out

STYLES: Final = {"pass": None, "fail": "red", "invalid": "yellow"}
COLUMNS: Final = (
    "cell", "verdict", "expected", "measured", "error", "first s / bound", "RTT p50", "p99", "jitter", "lost",
    "loss within", "overtaken", "drops", "unshaped",
)  # fmt: skip

AGREEMENT: Final = ("cell", "goodput", "RTT p50", "agree")


def show_matrix(result: Mapping[str, Any]) -> None:
    for name, machine in result["machines"].items():
        out.print(_headline(name, machine))
        table = Table()
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("cell", "verdict") else "right")
        for cell in machine["cells"]:
            table.add_row(cell["cell"], _verdict(cell), *row(cell["found"]), style=STYLES[cell["verdict"]])
        out.print(table)
        for cell in machine["cells"]:
            if told := _why(cell):
                out.print(escape(f"  {cell['cell']}: {'; '.join(told)}"))
    if result["agreement"]:
        out.print(_agreement(result["agreement"]))
    out.print(_conclusion(result))


def markdown(result: Mapping[str, Any], command: str) -> str:
    """The same as a page that names the command which made it."""
    lines = ["# The link, measured", "", f"Made by `{command}`; [link.md](link.md) says what it means.", ""]
    for name, machine in result["machines"].items():
        lines += [f"## {_headline(name, machine)}", "", *_rows([COLUMNS, ["---"] * len(COLUMNS)])]
        lines += _rows([[cell["cell"], _verdict(cell), *row(cell["found"])] for cell in machine["cells"]])
        told = [f"- {cell['cell']}: {'; '.join(why)}" for cell in machine["cells"] if (why := _why(cell))]
        lines += ["", *told, *([""] if told else ())]
    if result["agreement"]:
        lines += ["## uml beside native", "", *_rows([AGREEMENT, ["---"] * len(AGREEMENT)])]
        lines += [*_rows(_compared(one) for one in result["agreement"]), ""]
    return "\n".join([*lines, f"{_conclusion(result)}.", ""])


def _rows(rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _why(cell: Mapping[str, Any]) -> list[str]:
    return [*cell["wrong"], *cell["spoilt"]]


def _conclusion(result: Mapping[str, Any]) -> str:
    counted = ", ".join(f"{number} {verdict}" for verdict, number in sorted(result["counts"].items()))
    clocks = "".join(f"; the clock of {name} goes wrong, nothing of it counts" for name in result["wrong_clocks"])
    return f"verdict: {result['status']} ({counted}{clocks})"


def row(found: Mapping[str, Any]) -> list[str]:
    """A cell's figures as the columns from "expected" on have them; a bar where there is none."""
    trains, bounds = found["trains"], found["loss_bounds"]
    first, bound = found["first_second_bits"], found["first_second_bound_bits"]
    steps = ", ".join(f"{which} {'never' if s is None else f'{s:.2f} s'}" for which, s in found["step_s"].items())
    return [
        _of(found["expected_bps"], lambda bps: f"{bps / 1e6:.2f} Mbit/s"),
        steps or _of(found["goodput_bps"], lambda bps: f"{bps / 1e6:.2f} Mbit/s"),
        _of(found["error"], lambda error: f"{error:+.2%}"),
        "-" if first is None else f"{first / 1e6:.2f} / {bound / 1e6:.2f} Mbit",
        *(_of(found[f"rtt_{which}_s"], lambda s: f"{s * 1e3:.2f} ms") for which in ("p50", "p99", "jitter")),
        "; ".join(f"{one['lost']} of {one['sent']}" for one in trains.values()) or "-",
        "; ".join(f"{low:.3%} to {high:.3%}" for low, high in bounds.values()) or "-",
        "; ".join(str(one["reordered"]) for one in trains.values()) or "-",
        str(found["drops"]),
        str(found["direct_packets"]),
    ]


def _of(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _verdict(cell: Mapping[str, Any]) -> str:
    return cell["verdict"] if cell["tries"] == 1 else f"{cell['verdict']}, twice measured"


def _headline(name: str, machine: Mapping[str, Any]) -> str:
    clock = machine["clock_error"]
    return (
        f"{name}: Linux {machine['kernel']}, {machine['cpus']} CPUs, htb; "
        f"delay and loss by {machine['delay_by']['delay']}; TCP {machine['congestion_control']}; "
        f"{machine['took_s']:.0f} s" + ("" if clock is None else f"; its clock is {clock:+.2%} off")
    )


def _agreement(agreement: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="uml beside native")
    for column in AGREEMENT:
        table.add_column(column, justify="left" if column == "cell" else "right")
    for one in agreement:
        table.add_row(*_compared(one), style="red" if one["ok"] is False else None)
    return table


def _compared(one: Mapping[str, Any]) -> list[str]:
    apart = (one["apart"].get(figure) for figure in ("goodput_bps", "rtt_p50_s"))
    said = {True: "yes", False: f"no: {', '.join(one['wrong'])}", None: "not measured"}[one["ok"]]
    return [one["cell"], *(_of(value, lambda value: f"{value:+.2%}") for value in apart), said]
