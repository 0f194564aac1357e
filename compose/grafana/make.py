"""Grafana's dashboards from dashboards.yaml: `python compose/grafana/make.py` writes dashboards/*.json anew.

The YAML has what a reader and a test need (what is asked, what it means); all that only Grafana needs is here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SOURCE, FOLDER = HERE / "dashboards.yaml", HERE / "dashboards"
DATA_SOURCE = {"type": "prometheus", "uid": "prometheus"}
HEIGHTS = {"stat": 4, "timeseries": 8, "state-timeline": 8}  # of Grafana's grid, which is 24 wide
WIDTH = 24


def dashboards() -> dict[str, dict[str, Any]]:
    """File name -> what Grafana reads."""
    return {f"{one['uid']}.json": _dashboard(one) for one in yaml.safe_load(SOURCE.read_text(encoding="utf-8"))}


def text(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=1) + "\n"


def _dashboard(source: dict[str, Any]) -> dict[str, Any]:
    panels, x, y, height = [], 0, 0, 0
    for number, given in enumerate(source["panels"], start=1):
        panel = _panel(given, number)
        width, tall = given.get("width", 8), HEIGHTS[panel["type"]]
        if x + width > WIDTH:
            x, y, height = 0, y + height, 0
        panel["gridPos"] = {"x": x, "y": y, "w": width, "h": tall}
        x, height = x + width, max(height, tall)
        panels.append(panel)
    return {
        "uid": source["uid"],
        "title": source["title"],
        "description": source["about"],
        "tags": ["prfaas"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,  # one crosshair in all panels
        "refresh": "5s",
        "time": {"from": "now-5m", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "title": "PrfaaS", "tags": ["prfaas"], "asDropdown": False, "keepTime": True}],
        "panels": panels,
    }


def _panel(given: dict[str, Any], number: int) -> dict[str, Any]:
    kind = given.get("kind", "timeseries")
    targets = [
        {"refId": chr(ord("A") + i), "datasource": DATA_SOURCE, "expr": query, "legendFormat": legend}
        for i, (legend, query) in enumerate(given["queries"].items())
    ]
    options: dict[str, Any] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    defaults: dict[str, Any] = {"unit": given.get("unit", "none")}
    if kind == "stat":
        named = any("{{" in legend for legend in given["queries"])
        options = {"textMode": "name" if named else "auto", "reduceOptions": {"calcs": ["lastNotNull"]}}
    elif kind == "timeseries":
        defaults["min"] = 0
    return {
        "id": number,
        "type": kind,
        "title": given["title"],
        "description": given["about"],
        "datasource": DATA_SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    made = dashboards()
    for left in FOLDER.glob("*.json"):
        if left.name not in made:
            left.unlink()
    for name, dashboard in made.items():
        (FOLDER / name).write_text(text(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
