"""A launch specification as a compose file: pure. `compose/compose.yaml` is what it makes of the scenario `smoke`.

A site is a container that owns a network namespace and does nothing; whatever runs in the site joins that namespace.
`wan` is the agent's container, on the bridges of both sites. Nothing is published: the host's listening socket is
handed to the gateway (`contained.py`), so a site has one way out, the link. What differs from machine to machine is a
variable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from netem.plugged import UNPLUGGED
from netem.topology import ADDRESSES, WAN_ADDRESSES, TopologySettings
from testbed.launch.spec import LaunchSpec, ProcessSpec
from testbed.launch.state import TestbedError

PROJECT: Final = "prfaas"
STATE_LABEL: Final = "prfaas.state"
WAN: Final = "wan"
STATE: Final = "${PRFAAS_STATE:?}"
INSIDE: Final = "/state"
"""Where a container has the state directory. The host's own path may be out of reach: an image's /root is root's."""
SOURCE: Final = "${PRFAAS_SOURCE:-..}"
OWNER: Final = "${PRFAAS_UID:-10001}:${PRFAAS_GID:-10001}"
URL: Final = "http://127.0.0.1:${PRFAAS_PORT:-8000}"
LISTEN_FD: Final = 3
"""Where a contained gateway finds the host's listening socket."""
FIRST_LOOK_S, LOOKS_APART_S = 120, 7
POLICIES: Final = "/policies"
"""Where the gateway finds what the launcher's user may import."""
PROFILES: Final = ("locust", "prometheus", "grafana")
PAGES: Final = {"locust": 8089, "prometheus": 9090, "grafana": 3000}
"""The port of 127.0.0.1 that a profile's page has."""

_HEADER = """\
# The scenario {scenario} in containers, as `prfaas up {scenario} --launcher compose` renders it:
# python -m testbed.launch.compose_file > compose/compose.yaml
"""
_TCP_BUFFERS = {"net.ipv4.tcp_wmem": "4096 16384", "net.ipv4.tcp_rmem": "4096 131072"}


def render(spec: LaunchSpec, *, bounds_tries: bool = False) -> str:
    """The compose file. `bounds_tries`: this kernel has `net.ipv4.tcp_rto_max_ms`, and a container is given it.

    Raises TestbedError for what containers cannot do.
    """
    topology = spec.topology or {}
    settings = TopologySettings(**topology)
    services: dict[str, Any] = {f"site-{site}": _site(site, settings, bounds_tries) for site in ADDRESSES}
    for process in spec.processes:
        services[service_of(process)] = _process(process, topology)
    _apart(services)
    services |= _watching() | _locust()
    networks = {f"link-{site}": _bridge(site) for site in ADDRESSES}
    file = {"name": PROJECT, "services": services, "networks": networks}
    return _HEADER.format(scenario=spec.scenario) + yaml.dump(file, Dumper=_Plain, sort_keys=False, width=120)


def service_of(process: ProcessSpec) -> str:
    """The service of a process. Raises TestbedError for one that no container can have."""
    if process.site == WAN:
        return WAN
    if process.site is None:
        raise TestbedError(f"{process.name}: the compose launcher runs processes in sites only; name its site")
    if process.nice < 0:
        raise TestbedError(f"{process.name}: niceness {process.nice}; in a container it is 0 or more")
    return process.name.lower()


def _base(command: Iterable[str], user: str = OWNER) -> dict[str, Any]:
    """What every container of the testbed is: without privileges, its file system read-only."""
    return {
        "image": "${PRFAAS_IMAGE:-prfaas-testbed}",
        "command": list(command),
        "user": user,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp"],
        "restart": "no",
        "labels": {STATE_LABEL: STATE},
    }


def _site(site: str, settings: TopologySettings, bounds_tries: bool) -> dict[str, Any]:
    sysctls = {name: f"{low} {settings.tcp_buffer_max_bytes}" for name, low in _TCP_BUFFERS.items()}
    if settings.slow_start_after_idle is not None:
        sysctls["net.ipv4.tcp_slow_start_after_idle"] = str(int(settings.slow_start_after_idle))
    if settings.rto_max_s is not None and bounds_tries:
        sysctls |= {
            "net.ipv4.tcp_rto_max_ms": str(round(settings.rto_max_s * 1e3)),
            "net.ipv4.tcp_retries2": "255",
        }
    return {
        **_base(["sleep", "infinity"]),
        "entrypoint": [],
        "stop_signal": "SIGKILL",
        "networks": {f"link-{site}": {"ipv4_address": ADDRESSES[site]}},
        "sysctls": sysctls,
        "healthcheck": _health("CMD", "test", "-e", "/sys/class/net/up0"),
    }


def _process(process: ProcessSpec, topology: Mapping[str, Any]) -> dict[str, Any]:
    words = ["--name", process.name]
    if process.nice:
        words += ["--nice", str(process.nice)]
    if process.site == WAN:
        words += ["--plug-wan", json.dumps(dict(topology))]
    if process.listens:
        words += ["--listen-fd", str(LISTEN_FD)]
    argv = ["python" if word == sys.executable else word for word in process.argv]
    if process.config is not None:
        argv += ["--config", f"{INSIDE}/config/{process.name}.json"]
    service = _base([*words, "--", *argv], "0:${PRFAAS_GID:-10001}" if process.site == WAN else OWNER)
    service["environment"] = {"PRFAAS_STATE": INSIDE, **process.env}
    service["volumes"] = _mounts(process)
    if (process.config or {}).get("import_path"):  # at a place of its own, as the state directory may lie within it
        service["volumes"].append(_bound("${PRFAAS_POLICIES:?}", POLICIES, read_only=True))
    if process.cpus:
        service["cpuset"] = ",".join(map(str, process.cpus))
    if process.site == WAN:
        service["cap_add"] = ["NET_ADMIN", "DAC_OVERRIDE"]  # the latter: to write into the user's state directory
        service["sysctls"] = {"net.ipv4.ip_forward": "0"}
        service["networks"] = {f"link-{site}": {"ipv4_address": UNPLUGGED[site]} for site in ADDRESSES}
    else:
        service["network_mode"] = f"service:site-{process.site}"
        service["depends_on"] = [f"site-{process.site}"]
    if (healthy := _healthy(process)) is not None:
        service["healthcheck"] = healthy
    return service


def _mounts(process: ProcessSpec) -> list[dict[str, Any]]:
    """What a process has of the host. A worker has its own configuration and no control socket."""
    if process.role not in ("prefill", "decode"):
        mounts = [_bound(STATE, INSIDE)]
    else:
        own = f"/config/{process.name}.json"
        mounts = [
            _bound(STATE + own, INSIDE + own, read_only=True),
            *(_bound(STATE + folder, INSIDE + folder) for folder in ("/ready", "/logs")),
        ]
    return [*mounts, *(_bound(file, given(file), read_only=True) for file in files_of(process.config or {}))]


def files_of(config: Mapping[str, Any]) -> list[str]:
    """The user's own files that a process reads."""
    files = (config.get("profile"), (config.get("model") or {}).get("weights"))
    return [file for file in files if file is not None and file.startswith("/")]


def given(file: str) -> str:
    """Where a container has a file of the user's."""
    return f"/given{file}"


def _bound(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"type": "bind", "source": source, "target": target, **({"read_only": True} if read_only else {})}


def _healthy(process: ProcessSpec) -> dict[str, Any] | None:
    """A worker and the agent answer HTTP; the gateway, whose socket is the host's, keeps its ready file fresh."""
    config = process.config or {}
    if process.listens:
        return _health("CMD", "healthy", "fresh", f"{INSIDE}/ready/{process.name}")
    if "metrics_port" in config:
        return _health("CMD", "healthy", "http", f"{config['host']}:{config['metrics_port']}")
    if process.site == WAN:
        return _health("CMD", "healthy", "http", f"{INSIDE}/agent.sock")
    return None


def _health(*test: str) -> dict[str, Any]:
    return {"test": list(test), "timeout": "5s", "retries": 2}


def _apart(services: Mapping[str, Any]) -> None:
    """Set how often each is looked at: seldom, and not all at a time, as every look takes an engine some 0.15 s
    beside what is measured."""
    looked_at = [one["healthcheck"] for one in services.values() if "healthcheck" in one]
    for i, health in enumerate(looked_at):
        health["interval"] = f"{FIRST_LOOK_S + LOOKS_APART_S * i}s"


def _bridge(site: str) -> dict[str, Any]:
    """A site's bridge with the WAN. The host has no address on it, and so no route to it or between the two."""
    network = WAN_ADDRESSES[site].rpartition(".")[0]
    return {
        "driver": "bridge",
        "driver_opts": {
            "com.docker.network.bridge.inhibit_ipv4": "true",
            "com.docker.network.bridge.enable_ip_masquerade": "false",
        },
        "ipam": {"config": [{"subnet": f"{network}.0/24", "gateway": WAN_ADDRESSES[site]}]},
    }


def _locust() -> dict[str, Any]:
    """Locust's page, its master and workers, in the host's network like any client, all of it on 127.0.0.1."""
    rows = f"{INSIDE}/loads/locust.csv"
    replay = ["locust", "-f", "/opt/prfaas/src/traces/replay.py", "--trace", f"{INSIDE}/loads/locust.jsonl"]
    common = {"network_mode": "host", "profiles": ["locust"], "volumes": [_bound(f"{STATE}/loads", f"{INSIDE}/loads")]}
    image = {"image": "${PRFAAS_LOCUST_IMAGE:-prfaas-testbed-locust}", "entrypoint": []}
    master = [*replay, "--rows", rows, "--host", URL, "--master", "--master-bind-host", "127.0.0.1"]
    worker = [*replay, "--worker", "--master-host", "127.0.0.1"]
    return {
        "locust": {
            **_base([*master, "--web-host", "127.0.0.1", "--web-port", str(PAGES["locust"])]),
            **image,
            **common,
        },
        "locust-worker": {
            **_base(worker),
            **image,
            **common,
            "depends_on": ["locust"],
            "deploy": {"replicas": "${PRFAAS_LOCUST_WORKERS:-2}"},
        },
    }


def _watching() -> dict[str, Any]:
    """Prometheus and Grafana as they are published, on 127.0.0.1 only, keeping nothing."""

    def service(profile: str, image: str, **more: Any) -> dict[str, Any]:
        return {
            "image": image,
            "profiles": [profile],
            "network_mode": "host",
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "restart": "no",
            "labels": {STATE_LABEL: STATE},
            **more,
        }

    def shipped(here: str, there: str) -> dict[str, Any]:
        return _bound(f"{SOURCE}/compose/{here}", there, read_only=True)

    prometheus, grafana = f"127.0.0.1:{PAGES['prometheus']}", str(PAGES["grafana"])
    return {
        "prometheus": service(
            "prometheus",
            "${PROMETHEUS_IMAGE:-prom/prometheus:v3.5.0}",
            command=[
                "--config.file=/etc/prometheus/prometheus.yml",
                f"--web.listen-address={prometheus}",
                "--storage.tsdb.path=/prometheus",
            ],
            tmpfs=["/prometheus:mode=1777"],
            volumes=[
                _prometheus_file(),
                shipped("prometheus/rules.yml", "/etc/prometheus/rules.yml"),
            ],
        ),
        "grafana": service(
            "grafana",
            "${GRAFANA_IMAGE:-grafana/grafana:12.1.0}",
            environment={
                "GF_SERVER_HTTP_ADDR": "127.0.0.1",
                "GF_SERVER_HTTP_PORT": grafana,
                "GF_AUTH_ANONYMOUS_ENABLED": "true",
                "GF_AUTH_DISABLE_LOGIN_FORM": "true",
                "GF_ANALYTICS_REPORTING_ENABLED": "false",
                "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
                "PROMETHEUS_URL": f"http://{prometheus}",
            },
            tmpfs=["/var/lib/grafana:mode=1777", "/var/log/grafana:mode=1777", "/tmp"],
            volumes=[
                shipped("grafana/provisioning", "/etc/grafana/provisioning"),
                shipped("grafana/dashboards", "/var/lib/grafana/dashboards"),
            ],
        ),
    }


def _prometheus_file() -> dict[str, Any]:
    """Prometheus' configuration with this testbed's port, which the launcher writes."""
    return _bound(f"{STATE}/config/prometheus.yml", "/etc/prometheus/prometheus.yml", read_only=True)


class _Plain(yaml.SafeDumper):
    """YAML that spells everything out where it stands, and short lists in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _short(dumper: _Plain, data: list[Any]) -> yaml.Node:
    plain = all(isinstance(one, str | int) for one in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)


_Plain.add_representer(list, _short)


def main() -> None:
    """Print the rendering of the scenario that is shipped, `smoke`."""
    from pathlib import Path

    from testbed.fleet import launch_spec
    from testbed.launch.state import StateDir
    from testbed.scenario import load

    scenario = load("smoke", ())
    spec = launch_spec(scenario, scenario.deployments[0], port=8000, state=StateDir(Path("/state")))
    sys.stdout.write(render(spec))


if __name__ == "__main__":
    main()
