"""The launcher's parts that need no namespaces: the state directory, specifications, clients, refusals."""

import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.launch import client, handover, launchers, namespaces, processes
from testbed.launch.spec import LaunchSpec, ProcessSpec, signal_number
from testbed.launch.state import ProcessId, Record, StateDir, TestbedError, tail

SPEC = LaunchSpec(
    (ProcessSpec("agent", "wan", ("agent",), config={"a": 1}), ProcessSpec("gateway", "pd", ("gw",), listens=True)),
    topology={"mtu": 1500},
    scenario="toy",
)


def record(outer: ProcessId) -> Record:
    return Record("namespaces", "abcd", outer, 8000, "toy", SPEC.fingerprint, "2026-01-01T00:00:00+00:00")


def own_id() -> ProcessId:
    identity = ProcessId.of(os.getpid())
    assert identity is not None
    return identity


class TestStateDir:
    def test_is_named_by_its_own_variable_first(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "own"))
        assert StateDir().root == tmp_path / "own"

    def test_is_in_the_users_state_home_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        home = Path("/nowhere")  # short: a socket's path has 107 bytes
        monkeypatch.delenv("PRFAAS_STATE", raising=False)
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        assert StateDir().root == home / "prfaas"
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setenv("HOME", str(home))
        assert StateDir().root == home / ".local/state/prfaas"

    def test_is_made_only_on_demand_and_private(self, tmp_path: Path) -> None:
        assert not StateDir(tmp_path / "s").root.exists()
        root = StateDir(tmp_path / "s", create=True).root
        assert stat.S_IMODE(root.stat().st_mode) == 0o700

    def test_an_empty_open_directory_is_closed(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        (tmp_path / "s").chmod(0o755)
        assert stat.S_IMODE(StateDir(tmp_path / "s", create=True).root.stat().st_mode) == 0o700

    def test_a_directory_in_other_use_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "precious").touch()
        tmp_path.chmod(0o755)
        with pytest.raises(TestbedError, match=r"precious.*PRFAAS_STATE"):
            StateDir(tmp_path, create=True)
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755

    def test_a_path_too_long_for_a_socket_is_refused(self) -> None:
        longest = "/" + "x" * (107 - len("//supervisor.sock"))
        StateDir(Path(longest))
        with pytest.raises(TestbedError, match=r"108 bytes of 107.*PRFAAS_STATE"):
            StateDir(Path(longest + "x"))

    def test_keeps_what_was_started(self, tmp_path: Path) -> None:
        state = StateDir(tmp_path / "s", create=True)
        assert state.read() is None
        state.write(record(own_id()))
        assert state.read() == record(own_id())

    def test_a_damaged_record_counts_as_none(self, tmp_path: Path) -> None:
        state = StateDir(tmp_path, create=True)
        for text in ("", "{", "[]", '{"launcher": "namespaces"}'):
            state.record_file.write_text(text)
            assert state.read() is None

    def test_clean_keeps_logs_and_loads(self, tmp_path: Path) -> None:
        state = StateDir(tmp_path / "s", create=True)
        state.fresh()
        state.log("gateway").write_text("x")
        state.write(record(own_id()))
        assert state.clean() == [str(state.record_file)]
        assert sorted(path.name for path in state.root.iterdir()) == ["loads", "logs"]
        assert state.clean() == []

    def test_is_locked_by_one_at_a_time(self, tmp_path: Path) -> None:
        state = StateDir(tmp_path, create=True)
        with state.locked():
            assert state.lock_holder() == str(os.getpid())
            with pytest.raises(TestbedError, match=f"pid {os.getpid()}"), state.locked(timeout_s=0):
                pass
        assert state.lock_holder() is None
        with state.locked(timeout_s=0):
            pass


class TestProcessId:
    def test_a_reused_pid_is_another_process(self) -> None:
        assert own_id().alive()
        assert not replace(own_id(), start_ticks=own_id().start_ticks - 1).alive()
        assert not replace(own_id(), boot_id="another boot").alive()

    def test_a_reused_pid_is_never_signalled(self) -> None:
        assert replace(own_id(), start_ticks=1).signal(9) is False

    def test_a_zombie_is_gone(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ProcessId.of(process.pid) is None
        process.wait()


class TestSpec:
    def test_survives_json(self) -> None:
        assert LaunchSpec.from_json(SPEC.to_json()) == SPEC

    def test_fingerprint_tells_specifications_apart(self) -> None:
        assert replace(SPEC, fingerprint="").fingerprint == SPEC.fingerprint
        assert replace(SPEC, fingerprint="", topology={"mtu": 9000}).fingerprint != SPEC.fingerprint

    @pytest.mark.parametrize("name", ["", "../gateway", "a b", "x" * 65])
    def test_refuses_names_that_are_no_file_names(self, name: str) -> None:
        with pytest.raises(TestbedError, match="process name"):
            ProcessSpec(name, None, ("true",))

    def test_refuses_a_name_twice(self) -> None:
        with pytest.raises(TestbedError, match="'agent' is used more than once"):
            replace(SPEC, processes=SPEC.processes[:1] * 2)

    def test_refuses_two_listeners(self) -> None:
        listeners = tuple(ProcessSpec(name, None, ("true",), listens=True) for name in "ab")
        with pytest.raises(TestbedError, match="listening socket"):
            replace(SPEC, processes=listeners)

    @pytest.mark.parametrize("port", [0, 65536])
    def test_refuses_no_port(self, port: int) -> None:
        with pytest.raises(TestbedError, match="--port"):
            replace(SPEC, port=port)

    @pytest.mark.parametrize("value", ["KILL", "SIGKILL", "sigkill", "9", 9])
    def test_signals_are_named_in_many_ways(self, value: object) -> None:
        assert signal_number(value) == 9

    @pytest.mark.parametrize("value", ["FOO", 0, 4000, None])
    def test_refuses_no_signal(self, value: object) -> None:
        with pytest.raises(TestbedError, match="no such signal"):
            signal_number(value)


class TestClient:
    def test_says_that_nothing_is_up(self, tmp_path: Path) -> None:
        with pytest.raises(TestbedError, match="no testbed is up; start one with `prfaas up`"):
            client.supervisor(StateDir(tmp_path)).get("/status")

    async def test_says_that_nothing_is_up_in_asyncio_too(self, tmp_path: Path) -> None:
        with pytest.raises(TestbedError, match="no testbed is up"):
            await client.AsyncUnixClient(StateDir(tmp_path).agent_sock).get("/status")

    def test_says_that_a_socket_is_dead(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "supervisor.sock"))
        with pytest.raises(TestbedError, match=r"does not answer.*prfaas down"):
            client.supervisor(StateDir(tmp_path)).get("/status")


class TestNamespaces:
    def test_administrators_need_no_user_namespace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(namespaces, "_may_administer", lambda: True)
        assert "--user" not in namespaces.unshare_argv()
        monkeypatch.setattr(namespaces, "_may_administer", lambda: False)
        assert {"--user", "--map-root-user", "--kill-child"} <= set(namespaces.unshare_argv())

    @pytest.mark.parametrize(
        ("knob", "value", "remedy"),
        [
            ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor.*sysctl"),
            ("kernel/unprivileged_userns_clone", "0", "unprivileged_userns_clone=1"),
            ("user/max_user_namespaces", "0", "max_user_namespaces=10000"),
            ("none", "", "--cap-add NET_ADMIN"),
        ],
    )
    def test_a_refusal_names_the_knob(
        self, monkeypatch: pytest.MonkeyPatch, knob: str, value: str, remedy: str
    ) -> None:
        monkeypatch.setattr(namespaces, "_sysctl", lambda name: value if name == knob else None)
        monkeypatch.setattr(namespaces, "unshare_argv", lambda: ["sh", "-c", "echo not permitted >&2; exit 1"])
        refused = namespaces.refusal()
        assert refused is not None
        with pytest.raises(TestbedError, match=rf"not permitted\); .*{remedy}"):
            raise TestbedError(refused)

    def test_a_taken_port_is_refused_with_its_holder(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(TestbedError, match=rf"port {port} .* process {os.getpid()} .*--port"):
                handover.open_port(port)

    def test_nothing_up_is_no_error(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "s"))
        assert launchers.status() == {"up": False, "stale": False, "state_dir": str(tmp_path / "s")}
        assert launchers.down() == []
        assert not (tmp_path / "s").exists()


class TestLeftovers:
    def test_finds_a_process_by_its_marks(self, tmp_path: Path) -> None:
        marks = {"PRFAAS_TESTBED": "abcd", "PRFAAS_STATE": str(tmp_path)}
        process = subprocess.Popen(["sleep", "60"], env={**os.environ, **marks})
        try:
            assert [(found.id.pid, found.run_id) for found in processes.find(tmp_path)] == [(process.pid, "abcd")]
            assert [found.id.pid for found in processes.end(tmp_path)] == [process.pid]
        finally:
            process.kill()
            process.wait()
        assert processes.find(tmp_path) == []

    def test_finds_a_process_by_its_module(self) -> None:
        process = subprocess.Popen(["sh", "-c", "sleep 60", "-m", "netem.agent"])
        try:
            assert process.pid in [found.id.pid for found in processes.find()]
        finally:
            process.kill()
            process.wait()

    def test_finds_files_of_a_dead_testbed(self, tmp_path: Path) -> None:
        state = StateDir(tmp_path, create=True)
        state.write(record(replace(own_id(), start_ticks=1)))
        state.agent_sock.touch()
        left = [text for text in processes.leftovers(state) if str(tmp_path) in text]
        assert left == [f"socket {state.agent_sock}", f"{state.record_file}: the testbed toy is dead"]


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(map(str, range(100))))
    assert tail(tmp_path / "log", 2) == "98\n99"
    assert tail(tmp_path / "none") == ""
