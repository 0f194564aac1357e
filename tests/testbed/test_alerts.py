"""The alert rules that are shipped, each by a case in which it fires and one in which it does not (promtool)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[2] / "compose" / "prometheus" / "rules.yml"
PROMTOOL = shutil.which("promtool")
MISSING = "promtool is not there: apt-get install prometheus"
pytestmark = pytest.mark.skipif(PROMTOOL is None and "PRFAAS_CI" not in os.environ, reason=MISSING)

CASES = {  # alert -> series with a value a second from 0 on, fine until 9; when it is looked at again; labels and words
    "ProcessDown": (
        'up{job="prfaas",process="pd-p-0"}',
        "1x9 0x9",
        "16s",
        {"job": "prfaas", "process": "pd-p-0"},
        "pd-p-0 does not answer; see prfaas status and prfaas logs pd-p-0",
    ),
    "NodeServesNothing": (
        'prfaas_node_serving{node="pd-p-0",role="prefill"}',
        "1x9 0x19",
        "21s",
        {"node": "pd-p-0"},
        "pd-p-0 takes no requests: it is dead, silent, drains or reloads",
    ),
    "TimersLate": (
        'prfaas_timer_late_p99_wall_seconds{process="pd-d-0",node="pd-d-0"}',
        "0.001x9 0.03x9",
        "16s",
        {"process": "pd-d-0"},
        "pd-d-0: timers fire 30ms late at P99, so that a run is no measurement (meter.late_p99_s)",
    ),
    "LinkUnshaped": (
        'prfaas_link_unshaped_packets_total{direction="to_pd"}',
        "0x9 2x9",
        "11s",
        {"direction": "to_pd"},
        "2 packets went to_pd unshaped: no figure of this testbed means anything",
    ),
    "DelayLineDown": (
        'prfaas_delay_line_down{direction="to_pd"}',
        "0x9 1x9",
        "11s",
        {"direction": "to_pd"},
        "the delay line to_pd is dead, and nothing passes until the next one serves",
    ),
}


def test_every_alert_has_a_case() -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == set(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_not_before(alert: str, tmp_path: Path) -> None:
    assert PROMTOOL is not None, MISSING
    series, values, at, labels, summary = CASES[alert]
    expected = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]
    fires = {"eval_time": at, "alertname": alert, "exp_alerts": expected}
    case = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1s",
        "tests": [
            {
                "interval": "1s",
                "input_series": [{"series": series, "values": values}],
                "alert_rule_test": [{"eval_time": "9s", "alertname": alert, "exp_alerts": []}, fires],
            }
        ],
    }
    path = tmp_path / "case.yml"
    path.write_text(yaml.safe_dump(case))
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
