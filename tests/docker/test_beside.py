"""Locust and Prometheus in containers beside a testbed: their pages answer, and what they do reaches the testbed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from testbed.cli.shared import add_beside
from testbed.launch import engine as engines
from testbed.launch import launchers
from tests.docker.conftest import Contained

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(
        PROMETHEUS is None and os.environ.get("PRFAAS_CI") != "1", reason="no prometheus; install Debian's package"
    ),
]

TAG = "prfaas-test-prometheus"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def prometheus_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's program in an image of its own, in the place of the published one."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(str(PROMETHEUS), folder / "prometheus")
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim")
    lines = [f"FROM {base}", "COPY prometheus /bin/", "USER 65534", 'ENTRYPOINT ["/bin/prometheus"]']
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    subprocess.run([*engines.builder(), "build", "--quiet", "-t", TAG, str(folder)], check=True, capture_output=True)
    yield TAG
    engines.connect().images.remove(TAG, force=True)


@pytest.fixture(scope="module")
def pages(prometheus_image: str, contained: Contained) -> Iterator[dict[str, str]]:
    """Their addresses; they go with the testbed, and the image of Locust's with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_IMAGE", prometheus_image)
        yield add_beside(contained.testbed, ["prometheus", "locust"])


def asked(url: str, form: dict[str, str] | None = None) -> Any:
    """The JSON at an address; None while nobody answers there."""
    body = None if form is None else urllib.parse.urlencode(form).encode()
    try:
        with urllib.request.urlopen(url, body, timeout=5) as answer:
            return json.loads(answer.read())
    except OSError:
        return None


def test_prometheus_finds_every_process_and_knows_the_rules(pages: dict[str, str]) -> None:
    processes = len(launchers.status()["supervisor"]["processes"])
    deadline = time.monotonic() + PATIENCE_S
    targets: dict[str, str] = {}
    while set(targets.values()) != {"up"} or len(targets) < processes:
        assert time.monotonic() < deadline, targets
        found = asked(f"{pages['prometheus']}/api/v1/targets") or {"data": {"activeTargets": []}}
        targets = {one["scrapeUrl"]: one["health"] for one in found["data"]["activeTargets"]}
        time.sleep(0.5)
    health: set[str] = set()
    rules: dict[str, Any] = {}
    while health != {"ok"}:  # each has been evaluated, without an error
        assert time.monotonic() < deadline + PATIENCE_S, rules
        rules = asked(f"{pages['prometheus']}/api/v1/rules") or {"data": {"groups": []}}
        health = {one["health"] for group in rules["data"]["groups"] for one in group["rules"]}
        time.sleep(0.5)


def test_locusts_page_replays_the_testbeds_own_load(pages: dict[str, str], contained: Contained) -> None:
    page = pages["locust"]
    deadline = time.monotonic() + PATIENCE_S
    while (told := asked(f"{page}/stats/requests")) is None or len(told["workers"]) < 2:
        assert time.monotonic() < deadline, told
        time.sleep(0.5)
    begun = asked(f"{page}/swarm", {"user_count": "2", "spawn_rate": "2"})
    assert (begun or {}).get("success"), begun
    path = contained.testbed.state.loads / "locust.csv"
    rows, counted = 0, {0}
    while told["state"] != "stopped" or rows <= 20 or counted != {rows}:  # its workers tell the page now and then
        assert time.monotonic() < deadline + PATIENCE_S, (rows, told)
        time.sleep(0.5)
        told = asked(f"{page}/stats/requests") or told
        rows = len(path.read_text().splitlines()) - 1 if path.exists() else 0
        counted = {one["num_requests"] for one in told["stats"][:-1]}  # the last one is their sum
    assert {one["num_failures"] for one in told["stats"]} == {0}, told


def test_both_listen_on_loopback_alone(pages: dict[str, str]) -> None:
    ports = {urllib.parse.urlsplit(page).port for page in pages.values()}
    listening = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {(one.ip, one.port) for one in listening if one.port in ports} == {("127.0.0.1", port) for port in ports}
