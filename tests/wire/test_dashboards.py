"""Every query of every dashboard, asked of a real Prometheus that scrapes a real testbed under load.

What the dashboards ask is in compose/grafana/dashboards.yaml; what Grafana reads is made from it, see
tests/testbed/test_dashboards.py. Prometheus runs on the host, as a user's would, configured as it is shipped.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.launch import namespaces
from tests.wire.loopback import free_port, until
from tests.wire.test_testbed import Command

REPOSITORY = Path(__file__).parents[2]
CONFIGURATION = REPOSITORY / "compose" / "prometheus"
PANELS = [
    (f"{one['uid']}: {panel['title']}: {legend}", query, panel.get("may_be_empty"))
    for one in yaml.safe_load((REPOSITORY / "compose/grafana/dashboards.yaml").read_text())
    for panel in one["panels"]
    for legend, query in panel["queries"].items()
]
REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
PROMETHEUS = shutil.which("prometheus")
MISSING = "Prometheus is not there: apt-get install prometheus"
pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)),
    pytest.mark.skipif(PROMETHEUS is None and "PRFAAS_CI" not in os.environ, reason=MISSING),
]
SETS = [  # small, and with everything that a dashboard shows: a cache, and a delay line on any kernel
    "deployments.prfaas-pd.fleet={n_prfaas: 1, n_p: 1, n_d: 2}",
    "workload.output_tokens=128",
    "workload.warmup_s=0",
    "cache_bytes=100000000000",
    "link.delay_s=0.02",
    "link.jitter_s=0.005",
]
INTERVAL = "10s"  # what Grafana makes of $__rate_interval is at least four scrapes


@dataclass(frozen=True)
class Scraped:
    """A load that is over, and the Prometheus that watched it."""

    port: int
    summary: dict[str, Any]
    start_s: float
    end_s: float

    def ask(self, path: str, **parameters: object) -> Any:
        return ask(self.port, path, **parameters)

    def over_time(self, query: str) -> list[dict[str, Any]]:
        """The series over the load, as a graph has them."""
        query = query.replace("$__rate_interval", INTERVAL)
        found: list[dict[str, Any]] = self.ask(
            "/api/v1/query_range", query=query, start=self.start_s, end=self.end_s, step=1
        )["result"]
        return found

    def now(self, query: str) -> float:
        (one,) = self.ask("/api/v1/query", query=query)["result"]
        return float(one["value"][1])


def ask(port: int, path: str, **parameters: object) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", f"{path}?{urllib.parse.urlencode(parameters)}")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
    return answer["data"]


def settled(port: int, targets: int) -> bool:
    """Whether everybody was scraped once; Prometheus itself takes a moment to serve."""
    try:
        found = ask(port, "/api/v1/query", query='up{job="prfaas"}')["result"]
    except (OSError, ValueError):
        return False
    return len(found) == targets and all(one["value"][1] == "1" for one in found)


def leave_early(port: int) -> None:
    """A client that is gone before its answer is whole: one failure, counted as its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        body = json.dumps({"model": "prfaas", "prompt": "hello", "max_tokens": 4096, "stream": True})
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert b"200 OK" in sock.recv(4096)


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    assert PROMETHEUS is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="prf") as name:
        folder, gateway, port = Path(name), free_port(), free_port()
        command = Command(folder, gateway)
        for file in CONFIGURATION.glob("*.yml"):
            (folder / file.name).write_text(file.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{gateway}"))
        words = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        up = command("up", "smoke", "--port", str(gateway), *(word for one in SETS for word in ("--set", one)))
        try:
            assert up.returncode == 0, up.stderr
            with (
                (folder / "prometheus.log").open("w") as log,
                subprocess.Popen(words, stdout=log, stderr=log) as server,
            ):
                try:
                    until(lambda: settled(port, 6), lambda: (folder / "prometheus.log").read_text())
                    start_s = time.time()
                    leave_early(gateway)
                    load = ("load", "--duration-s", "150", "--warmup-s", "0", "--load-fraction", "0.7")
                    summary = command.json(*load, expect=(0, 3))
                    time.sleep(2.5)  # the last scrapes
                    yield Scraped(port, summary, start_s, time.time())
                finally:
                    server.terminate()
        finally:
            command("down")


def test_everybody_was_scraped(scraped: Scraped) -> None:
    up = scraped.ask("/api/v1/query", query="up")["result"]
    names = {one["metric"]["process"] for one in up if one["value"][1] == "1"}
    assert names == {"gateway", "agent", "prfaas-0", "pd-p-0", "pd-d-0", "pd-d-1"}


@pytest.mark.parametrize(("query", "may_be_empty"), [one[1:] for one in PANELS], ids=[one[0] for one in PANELS])
def test_a_dashboards_query_has_an_answer(scraped: Scraped, query: str, may_be_empty: str | None) -> None:
    series = scraped.over_time(query)
    numbers = [float(value) for one in series for _, value in one["values"]]
    if may_be_empty is None:
        assert any(math.isfinite(number) for number in numbers), f"{query}: {series}"


def test_no_query_has_one_series_twice(scraped: Scraped) -> None:
    """What a legend cannot tell apart nobody can read."""
    for where, query, _ in PANELS:
        series = [tuple(sorted(one["metric"].items())) for one in scraped.over_time(query)]
        assert len(series) == len(set(series)), where


def test_what_prometheus_counted_is_what_the_report_says(scraped: Scraped) -> None:
    requests = scraped.summary["requests"]
    assert requests["completed"] == requests["scheduled"] > 50
    assert scraped.now('sum(prfaas_requests_total{status="ok"})') == requests["completed"]
    assert scraped.now('prfaas_request_failures_total{error="client_gone"}') == 1
    assert scraped.now("vllm:generation_tokens_total") == requests["completed"] * 128
    split = scraped.summary["ttft_split_s"]["overall"]
    for part, metric in (("queue", "vllm:request_queue_time"), ("prefill", "vllm:request_prefill_time")):
        total, count = scraped.now(f"sum({metric}_seconds_sum)"), scraped.now(f"sum({metric}_seconds_count)")
        # One more than the report's: the request whose client left.
        assert count == requests["completed"] + 1
        assert total == pytest.approx(split[part]["mean"] * requests["completed"], rel=0.02), part


def test_the_link_carried_what_the_report_says(scraped: Scraped) -> None:
    sent = scraped.now('prfaas_link_sent_bytes_total{direction="to_pd", class="kv"}')
    assert sent >= scraped.summary["link"]["wan_tx_bytes"] > 0
    landed = scraped.now('prfaas_transferred_kv_bytes_total{site="prfaas"}')
    assert landed > 0
    assert scraped.now("max(prfaas_link_unshaped_packets_total)") == 0


def test_no_alert_but_of_a_busy_machine(scraped: Scraped) -> None:
    firing = {one["metric"]["alertname"] for one in scraped.over_time('ALERTS{alertstate="firing"}')}
    assert firing <= {"TimersLate"}
