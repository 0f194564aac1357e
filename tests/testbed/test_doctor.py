"""What the doctor says of machines that are not this one."""

import socket
from pathlib import Path

import pytest

from netem.capabilities import judge
from testbed import doctor
from testbed.doctor import Check, checks

WORKS = {"veth": "", "htb": "", "ingress": "", "ifb": ""}
CAPABLE = {"veth": "", "htb": "", "u32": "", "netem": "", "nfqueue": "", "realtime": "", "locked": ""}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine on which everything works; a test breaks one thing."""
    monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(doctor, "refusal", lambda: None)
    monkeypatch.setattr(doctor, "_probe", lambda: WORKS)
    monkeypatch.setattr(doctor, "probe", lambda prefix: judge(CAPABLE))
    monkeypatch.setattr(doctor.shutil, "which", lambda program, path: f"/bin/{program}")
    monkeypatch.setattr(doctor, "_containers", lambda: Check("containers", "ok", "engine 20.10"))
    return monkeypatch


def by_name(port: int = 8000) -> dict[str, Check]:
    return {check.name: check for check in checks(port)}


def test_a_good_machine_lacks_nothing(machine: pytest.MonkeyPatch) -> None:
    assert [check for check in checks() if check.status == "missing"] == []


def test_what_is_not_ok_has_a_remedy(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor, "_probe", lambda: dict.fromkeys(WORKS, "refused"))
    machine.setattr(doctor, "probe", lambda prefix: judge(dict.fromkeys(CAPABLE, "refused")))
    machine.setattr(doctor.shutil, "which", lambda program, path: None)
    assert [check.name for check in checks() if check.status != "ok" and not check.remedy] == []


def test_refused_namespaces_are_missing_and_the_kernel_is_not_tried(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor, "refusal", lambda: "namespaces cannot be made here (no); --cap-add NET_ADMIN; or root")
    found = by_name()
    assert found["namespaces"].status == "missing"
    assert found["namespaces"].remedy == "--cap-add NET_ADMIN; or root"
    assert "htb" not in found


def test_a_kernel_without_htb_carries_no_testbed(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor, "_probe", lambda: {**WORKS, "htb": "refused"})
    assert by_name()["htb"].status == "missing"
    assert "modprobe sch_htb" in by_name()["htb"].remedy


def test_a_kernel_without_queues_only_limits_scenarios(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor, "probe", lambda prefix: judge({**CAPABLE, "nfqueue": "refused"}))
    assert by_name()["jitter, stall"].status == "warn"
    assert "modprobe" in by_name()["jitter, stall"].remedy


@pytest.mark.parametrize("feature", ["ingress", "ifb"])
def test_a_kernel_without_what_nothing_needs_is_fine(machine: pytest.MonkeyPatch, feature: str) -> None:
    machine.setattr(doctor, "_probe", lambda: {**WORKS, feature: "refused"})
    assert by_name()[feature].status == "ok"


def test_a_missing_program_names_its_package(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor.shutil, "which", lambda program, path: None if program == "nsenter" else "/bin/x")
    assert by_name()["nsenter"] == Check("nsenter", "missing", "not found", "install util-linux")


def test_a_taken_port_is_told(machine: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert by_name(port)[f"port {port}"].status == "warn"
        assert "--port" in by_name(port)[f"port {port}"].remedy


def test_a_docker_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Engine:
        def version(self) -> dict[str, str]:
            return {"Version": "20.10"}

    docker = tmp_path / "docker"
    docker.write_text("#!/nowhere/sh\n")
    docker.chmod(0o755)
    monkeypatch.setattr(doctor.engine, "connect", lambda timeout_s: Engine())
    monkeypatch.setenv("PATH", str(tmp_path))
    told = doctor._containers()
    assert told.status == "warn"
    assert f"{docker} (it does not run" in told.detail
    assert "docker.io" in told.remedy
