"""Grafana's files: made from their source, and every panel says what it shows. Asked for real: tests/wire."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

GRAFANA = Path(__file__).parents[2] / "compose" / "grafana"
MAKE = runpy.run_path(str(GRAFANA / "make.py"))
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def test_what_is_checked_in_is_made_from_the_source() -> None:
    """Otherwise: python compose/grafana/make.py"""
    made = {name: MAKE["text"](one) for name, one in MAKE["dashboards"]().items()}
    assert {path.name: path.read_text() for path in FILES} == made


def test_a_dashboards_panels_have_a_meaning_and_a_place(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["description"].endswith("."), panel["title"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_titles_and_legends_tell_apart(dashboard: dict[str, Any]) -> None:
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(titles) == len(set(titles))
    for panel in dashboard["panels"]:
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(legends) == len(set(legends)), panel["title"]


def test_panels_ask_the_data_source_that_is_provisioned(dashboard: dict[str, Any]) -> None:
    provisioned = (GRAFANA / "provisioning/datasources/prometheus.yaml").read_text()
    asked = {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel["targets"]}
    assert asked == {"prometheus"}
    assert "uid: prometheus" in provisioned


def test_grafana_finds_the_dashboards_where_the_compose_file_puts_them() -> None:
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/prfaas.yaml").read_text())["providers"][0]
    services = yaml.safe_load((GRAFANA.parent / "compose.yaml").read_text())["services"]
    targets = {one["target"] for one in services["grafana"]["volumes"]}
    assert provider["options"]["path"] in targets
