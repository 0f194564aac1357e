"""What `prfaas link verify --matrix` tells people: a row a cell, what failed, and how two machines agree; on the
terminal, or as a page of Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from testbed.show import out

STYLES: Final = {"pass": None, "fail": "red", "invalid": "yellow"}
COLUMNS: Final = (
    "expected, Mbit/s", "measured, Mbit/s", "error", "first s, Mbit", "at most", "up after", "down after",
    "RTT p50, ms", "p99, ms", "jitter, ms", "lost", "loss within", "overtaken", "drops", "unshaped",
)  # fmt: skip
AGREEMENT: Final = ("cell", "goodput", "RTT p50", "agree")
WIDTH: Final = 130  # no figure is cut off on a narrower terminal
_NOTHING = "-"


def show_matrix(result: Mapping[str, Any]) -> None:
    wide = Console(width=max(out.width, WIDTH))
    for name, machine in result["machines"].items():
        out.print(_headline(name, machine))
        for kind, titles, rows in tables(machine["cells"]):
            table = Table(title=kind, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
            for title in titles:
                where: JustifyMethod = "left" if title in ("cell", "verdict") else "right"
                table.add_column(title.replace(", ", ",\n"), justify=where, no_wrap=True)
            for cell, texts in rows:
                table.add_row(*texts, style=STYLES[cell["verdict"]])
            wide.print(table)
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
        lines += [f"## {_headline(name, machine)}", ""]
        for kind, titles, rows in tables(machine["cells"]):
            lines += [f"### {kind}", "", *_rows([titles, ["---"] * len(titles)])]
            lines += [*_rows([text.replace("\n", "; ") for text in texts] for _, texts in rows), ""]
        told = [f"- {cell['cell']}: {'; '.join(why)}" for cell in machine["cells"] if (why := _why(cell))]
        lines += [*told, *([""] if told else ())]
    if result["agreement"]:
        lines += ["## uml beside native", "", *_rows([AGREEMENT, ["---"] * len(AGREEMENT)])]
        lines += [*_rows(_compared(one) for one in result["agreement"]), ""]
    return "\n".join([*lines, f"{_conclusion(result)}.", ""])


def tables(
    cells: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[str, list[str], list[tuple[Mapping[str, Any], list[str]]]]]:
    """(kind, titles, [(cell, texts)]) for each kind of cells, without the columns in which it has nothing."""
    for kind, group in groupby(cells, key=lambda cell: str(cell["kind"])):
        rows = [(cell, row(cell["found"])) for cell in group]
        used = [i for i in range(len(COLUMNS)) if any(texts[i] != _NOTHING for _, texts in rows)]
        titles = ["cell", "verdict", *(COLUMNS[i] for i in used)]
        named = [(cell, [cell["cell"].removeprefix(f"{kind} "), _verdict(cell)]) for cell, _ in rows]
        yield (
            kind,
            titles,
            [
                (cell, [*first, *(texts[i] for i in used)])
                for (cell, first), (_, texts) in zip(named, rows, strict=True)
            ],
        )


def row(found: Mapping[str, Any]) -> list[str]:
    """A cell's figures as COLUMNS has them, a line a direction; a bar where there is nothing to tell."""
    trains, bounds = found["trains"], found["loss_bounds"]
    steps = found["step_s"]
    return [
        *(_of(found[key], lambda bps: f"{bps / 1e6:.2f}") for key in ("expected_bps", "goodput_bps")),
        _of(found["error"], lambda error: f"{error:+.2%}"),
        *(_of(found[f"first_second_{which}bits"], lambda bits: f"{bits / 1e6:.2f}") for which in ("", "bound_")),
        *(
            "never" if steps and steps[way] is None else _of(steps.get(way), "{:.2f} s".format)
            for way in ("up", "down")
        ),
        *(_of(found[f"rtt_{which}_s"], lambda s: f"{s * 1e3:.2f}") for which in ("p50", "p99", "jitter")),
        "\n".join(f"{one['lost']} of {one['sent']}" for one in trains.values()) or _NOTHING,
        "\n".join(f"{low:.3%} to {high:.3%}" for low, high in bounds.values()) or _NOTHING,
        "\n".join(str(one["reordered"]) for one in trains.values()) or _NOTHING,
        *(str(found[key] or _NOTHING) for key in ("drops", "direct_packets")),
    ]


def _of(value: Any, text: Callable[[Any], str]) -> str:
    return _NOTHING if value is None else text(value)


def _verdict(cell: Mapping[str, Any]) -> str:
    return str(cell["verdict"]) if cell["tries"] == 1 else f"{cell['verdict']} (try {cell['tries']})"


def _why(cell: Mapping[str, Any]) -> list[str]:
    return [*cell["wrong"], *cell["spoilt"]]


def _headline(name: str, machine: Mapping[str, Any]) -> str:
    clock = machine["clock_error"]
    return (
        f"{name}: Linux {machine['kernel']}, {machine['cpus']} CPUs, htb; "
        f"delay and loss by {machine['delay_by']['delay']}; TCP {machine['congestion_control']}; "
        f"{machine['took_s']:.0f} s" + ("" if clock is None else f"; its clock is {clock:+.2%} off")
    )


def _conclusion(result: Mapping[str, Any]) -> str:
    counted = ", ".join(f"{number} {verdict}" for verdict, number in sorted(result["counts"].items()))
    clocks = "".join(f"; the clock of {name} goes wrong, nothing of it counts" for name in result["wrong_clocks"])
    found = [cell["found"] for machine in result["machines"].values() for cell in machine["cells"]]
    unshaped, drops = (sum(one[key] for one in found) for key in ("direct_packets", "drops"))
    told = f"{unshaped} packets unshaped, {drops} dropped that were not to be lost"
    return f"verdict: {result['status']} ({counted}{clocks}); {told}"


def _rows(rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in rows]


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
