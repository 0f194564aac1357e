"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAMES = "A shipped scenario's name, or the path of a YAML file."

ScenarioArg = Annotated[str, typer.Argument(metavar="SCENARIO", help=NAMES)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a scenario key, such as workload.load_fraction=0.8; repeatable."
    ),
]
DeploymentOption = Annotated[
    str | None,
    typer.Option("--deployment", metavar="NAME", help="One of the scenario's deployments; the first one unless given."),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", metavar="POLICY", help="Another policy: a name, or package.module:Class.")
]
PoliciesOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="POLICY[,POLICY...]",
        help="Another policy: a name, or package.module:Class. Several (a,b,c) are compared, on the same requests.",
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="Draw each policy's TTFT distribution and mean parts (.png, .svg or .pdf)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else there.")]
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="The gateway's port on 127.0.0.1.")]
LauncherOption = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="namespaces|compose",
        help="Who starts the processes: this host, or a container engine. As what is up, or namespaces.",
    ),
]
LogLevelOption = Annotated[
    str | None,
    typer.Option("--log-level", metavar="debug|info|warning|error", help="From which level on the processes log."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where results go; results/<time>-<scenario> unless given.")
]
KeptOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Write the results there; with --requests, results/<time>-<scenario> unless given."
    ),
]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, max=32, help="Locust processes that share the load.")]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Another seed than the scenario's.")]
RequestsOption = Annotated[
    str, typer.Option("--requests", metavar="none|csv|parquet", help="Write a row a request, and as what.")
]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", metavar="N", min=1, help="Runs under seeds from the scenario's own, with intervals.")
]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", metavar="N", min=1, help="Processes; one a core (or Ray CPU) unless given.")
]
RayOption = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="Run on this Ray cluster (needs the extra `ray`).")
]
TraceOption = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Replay this trace instead of the scenario's workload.")
]
ArrivalsOption = Annotated[
    str | None,
    typer.Option("--arrivals", metavar="as-is|spread|poisson|gamma|uniform|mmpp|diurnal", help="When requests come."),
]
DurationOption = Annotated[
    float | None, typer.Option("--duration-s", metavar="S", help="Length of the load, model seconds.")
]
WarmupOption = Annotated[
    float | None, typer.Option("--warmup-s", metavar="S", help="Left out of the figures, model seconds.")
]
RateOption = Annotated[float | None, typer.Option("--rate-rps", metavar="R", help="Requests a model second.")]
TraceOutOption = Annotated[
    Path | None,
    typer.Option("--trace-out", metavar="FILE", help="Write a Chrome trace (JSON), to be opened at ui.perfetto.dev."),
]
FractionOption = Annotated[
    float | None,
    typer.Option("--load-fraction", metavar="F", help="Rate as a fraction of the deployment's Lambda_max."),
]
