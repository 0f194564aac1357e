"""A testbed of stub processes, started and ended in every way there is."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from testbed.launch import client, launchers, namespaces, processes
from testbed.launch.spec import LaunchSpec, ProcessSpec
from testbed.launch.state import StateDir, TestbedError

REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

STUB = """
import json, os, signal, socket, sys, time
config = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
how = config.get("how")
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stubborn" else lambda *_: sys.exit(0))
print("stub says", how, flush=True)
if how == "fail" or (how == "good once" and os.path.exists(config["ready_file"] + ".once")):
    sys.exit(3)
if how == "orphan":
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.waitpid(parent, 0)
if how != "never ready":
    with open(config["ready_file"], "w") as file:
        file.write(str(os.getpid()))
if how == "good once":
    open(config["ready_file"] + ".once", "w").close()
if "listen_fd" in config:
    listener = socket.socket(fileno=config["listen_fd"])
    while True:
        with listener.accept()[0] as connection:
            connection.sendall(b"hello")
while True:
    time.sleep(1)
"""


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[StateDir]:
    """A state directory of the test's own; whatever the test leaves is ended."""
    root = Path(tempfile.mkdtemp(prefix="prf"))
    monkeypatch.setenv("PRFAAS_STATE", str(root))
    yield StateDir()
    launchers.down()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def make(state: StateDir, tmp_path: Path) -> Callable[..., LaunchSpec]:
    """Makes the specification of a testbed: `how` each of its stub processes behaves, by name."""
    (tmp_path / "stub.py").write_text(STUB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def stub(name: str, how: str, site: str | None, stage: int) -> ProcessSpec:
        config = {"ready_file": str(state.ready_file(name)), "how": how}
        argv = (sys.executable, "-I", "-S", str(tmp_path / "stub.py"))
        return ProcessSpec(name, site, argv, config=config, listens=name == "gateway", stage=stage)

    def spec(topology: dict[str, Any] | None = None, **how: str) -> LaunchSpec:
        sites = {"agent": "wan", "worker": "prfaas", "gateway": "pd"} if topology is not None else {}
        names = how or {"worker": "good", "gateway": "good"}
        stubs = [stub(name, names[name], sites.get(name), stage) for stage, name in enumerate(names)]
        return LaunchSpec(tuple(stubs), topology, port, "stubs", ready_timeout_s=10.0)

    return spec


def told(name: str) -> dict[str, Any]:
    listed = launchers.status()["supervisor"]["processes"]
    found: dict[str, Any] = next(process for process in listed if process["name"] == name)
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def outer_pid(state: StateDir) -> int:
    record = state.read()
    assert record is not None
    return record.outer.pid


def supervisor_pid(state: StateDir) -> int:
    return processes.host_pids(state.root)[1]


def hello(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        return connection.recv(16)


def host_network() -> list[object]:
    with IPRoute() as ip:
        links = [(link["index"], link.get_attr("IFLA_IFNAME"), link["flags"]) for link in ip.get_links()]
        qdiscs = [(q["index"], q["handle"], q["parent"], q.get_attr("TCA_KIND")) for q in ip.get_qdiscs()]
    return [links, qdiscs, sorted(path.name for path in Path("/run").glob("netns/*"))]


def assert_nothing_left(state: StateDir) -> None:
    assert processes.find(state.root) == []
    assert sorted(path.name for path in state.root.iterdir()) == ["loads", "lock", "logs"]


def test_a_testbed_with_sites_comes_up_and_goes_without_a_trace(
    state: StateDir, make: Callable[..., LaunchSpec]
) -> None:
    before = host_network()
    spec = make({"mtu": 1500}, agent="good", worker="good", gateway="good")
    up = launchers.up(spec)
    assert (up.already, up.scenario, up.dead) == (False, "stubs", ())
    assert hello(spec.port) == b"hello"
    assert told("worker")["site"] == "prfaas"
    script = "import socket; s = socket.socket(); s.bind(('10.77.1.1', 0)); print('bound')"
    command = {"site": "prfaas", "argv": [sys.executable, "-c", script], "timeout_s": 20}
    assert client.supervisor().post("/run", command)["stdout"] == "bound\n"
    assert client.supervisor().post("/run", {**command, "site": "pd"})["rc"] == 1
    assert host_network() == before

    assert launchers.down() != []
    assert_nothing_left(state)
    assert host_network() == before
    with pytest.raises(ConnectionRefusedError):
        hello(spec.port)
    assert launchers.down() == []


def test_a_second_up_finds_the_first(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    first, second = launchers.up(make()), launchers.up(make())
    assert second == replace(first, already=True)


def test_another_specification_is_refused_while_one_is_up(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    with pytest.raises(TestbedError, match=r"another specification .*prfaas down"):
        launchers.up(make(worker="good"))
    assert told("gateway")["state"] == "running"


def test_two_ups_at_once_start_one_testbed(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    with ThreadPoolExecutor(2) as pool:
        ups = list(pool.map(launchers.up, [make(), make()]))
    assert sorted(up.already for up in ups) == [False, True]
    assert ups[0].run_id == ups[1].run_id


def test_it_outlives_the_command_that_started_it(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    program = (
        "import json, sys; from testbed.launch.spec import LaunchSpec; from testbed.launch import launchers;"
        "launchers.up(LaunchSpec.from_json(json.load(sys.stdin)))"
    )
    subprocess.run([sys.executable, "-c", program], input=json.dumps(make().to_json()), text=True, check=True)
    assert launchers.status()["up"]
    assert hello(make().port) == b"hello"


def test_ctrl_c_while_starting_leaves_nothing(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    program = (
        "import json, signal, sys; from testbed.launch.spec import LaunchSpec; from testbed.launch import launchers\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever runs the tests may ignore it
        "try: launchers.up(LaunchSpec.from_json(json.loads(sys.argv[1])))\n"
        "except KeyboardInterrupt: sys.exit(42)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, json.dumps(make(worker="never ready").to_json())])
    until(lambda: state.log("worker").exists() and "says" in state.log("worker").read_text())
    starter.send_signal(signal.SIGINT)
    assert starter.wait(timeout=30) == 42
    assert_nothing_left(state)


def test_down_ends_a_start_that_still_waits(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(launchers.up, make(worker="never ready"))
        until(lambda: state.log("worker").exists())
        assert launchers.down() != []
        with pytest.raises(TestbedError, match="stopped while it started"):
            starting.result()
    assert_nothing_left(state)


@pytest.mark.parametrize(
    "victim",
    [outer_pid, supervisor_pid, lambda state: told("worker")["host_pid"]],
    ids=["unshare", "supervisor", "child"],
)
def test_down_leaves_nothing_after_kill_9(
    state: StateDir, make: Callable[..., LaunchSpec], victim: Callable[[StateDir], int]
) -> None:
    launchers.up(make({}, worker="good", gateway="good"))
    os.kill(victim(state), signal.SIGKILL)
    assert launchers.down() != []
    assert_nothing_left(state)


def test_the_kernel_ends_all_when_the_supervisor_dies(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    os.kill(supervisor_pid(state), signal.SIGKILL)
    until(lambda: processes.find(state.root) == [])
    assert (launchers.status()["up"], launchers.status()["stale"]) == (False, True)
    assert any("is dead" in text for text in processes.leftovers(state))
    assert launchers.up(make()).already is False


def test_down_ends_a_supervisor_that_does_not_answer(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    os.kill(supervisor_pid(state), signal.SIGSTOP)
    assert launchers.down() != []
    assert_nothing_left(state)


def test_down_finds_the_processes_without_the_state_directory(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    shutil.rmtree(state.root)
    assert len(launchers.down()) >= 1
    assert processes.find(state.root) == []


def test_a_process_that_ignores_sigterm_is_killed(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make(worker="stubborn"))
    launchers.down()
    assert_nothing_left(state)
    assert "worker did not leave" in state.log("supervisor").read_text()


def test_a_dead_process_is_told(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    client.supervisor().post("/signal", {"name": "worker", "signal": "KILL"})
    until(lambda: told("worker")["state"] == "dead")
    assert (told("worker")["signal"], told("worker")["exit_code"]) == ("SIGKILL", None)
    os.kill(told("gateway")["host_pid"], signal.SIGTERM)
    until(lambda: told("gateway")["state"] == "dead")
    assert (told("gateway")["signal"], told("gateway")["exit_code"]) == (None, 0)
    assert launchers.up(make()).dead == ("worker", "gateway")


def test_a_dead_process_is_started_again_as_it_was(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make({}, worker="good", gateway="good"))
    supervisor, before = client.supervisor(), told("worker")
    with pytest.raises(TestbedError, match="worker runs; end it first"):
        supervisor.post("/restart", {"name": "worker"})
    os.kill(before["host_pid"], signal.SIGKILL)
    until(lambda: told("worker")["state"] == "dead")
    again = supervisor.post("/restart", {"name": "worker"})
    assert (again["state"], again["ready"], again["site"]) == ("running", True, before["site"])
    assert again["pid"] != before["pid"]
    assert state.log("worker").read_text() == "stub says good\n" * 2
    with pytest.raises(TestbedError, match="no process 'nobody'; there are: worker, gateway"):
        supervisor.post("/restart", {"name": "nobody"})


def test_one_that_does_not_start_again_is_told(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make(worker="good once", gateway="good"))
    os.kill(told("worker")["host_pid"], signal.SIGKILL)
    for _ in range(2):  # and it may be tried again
        until(lambda: told("worker")["state"] == "dead")
        with pytest.raises(TestbedError, match=r"worker ended with exit code 3 while starting; .*worker\.log:"):
            client.supervisor().post("/restart", {"name": "worker"})


def test_a_gateway_is_not_restarted_since_its_port_is_closed(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    os.kill(told("gateway")["host_pid"], signal.SIGKILL)
    until(lambda: told("gateway")["state"] == "dead")
    with pytest.raises(TestbedError, match=r"gateway cannot be restarted: .*prfaas down, prfaas up"):
        client.supervisor().post("/restart", {"name": "gateway"})


def test_without_its_gateway_the_port_refuses(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    os.kill(told("gateway")["host_pid"], signal.SIGKILL)
    until(lambda: told("gateway")["state"] == "dead")
    with pytest.raises(ConnectionRefusedError):
        hello(make().port)


def test_a_taken_port_is_refused_before_anything_starts(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", make().port))
        other.listen()
        with pytest.raises(TestbedError, match=rf"port {make().port} .*process {os.getpid()} .*--port"):
            launchers.up(make())
    assert processes.find(state.root) == []
    assert state.read() is None


def test_a_process_that_is_never_ready_shows_its_log(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    spec = replace(make(worker="good", gateway="never ready"), ready_timeout_s=1.0)
    with pytest.raises(TestbedError, match=r"gateway: not ready within 1 s; .*gateway\.log:\nstub says never ready"):
        launchers.up(spec)
    assert_nothing_left(state)


def test_a_process_that_ends_while_starting_shows_its_log(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    with pytest.raises(TestbedError, match=r"worker ended with exit code 3 .*worker\.log:\nstub says fail"):
        launchers.up(make(worker="fail", gateway="good"))
    assert_nothing_left(state)
    assert not state.log("gateway").exists()  # a later stage


def test_a_program_that_is_not_there_is_named(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    with pytest.raises(TestbedError, match=r"worker: cannot be started: No such file .*/none/such"):
        launchers.up(LaunchSpec((ProcessSpec("worker", None, ("/none/such",)),), None, make().port))


def test_a_topology_that_the_kernel_refuses_says_why(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    with pytest.raises(TestbedError, match=r"congestion_control: .*'sprint'"):
        launchers.up(make({"congestion_control": "sprint"}, worker="good"))
    assert_nothing_left(state)


def test_processes_are_placed_on_cores(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    spec = make()
    core = max(os.sched_getaffinity(0))
    first = replace(spec.processes[0], cpus=(core,), nice=5)
    launchers.up(replace(spec, processes=(first, *spec.processes[1:])))
    pid = told("worker")["host_pid"]
    assert os.sched_getaffinity(pid) == {core}
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5


def test_orphans_are_reaped(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make(worker="orphan"))
    script = (
        "import glob; print([open(p).read().rpartition(')')[2].split()[0] for p in glob.glob('/proc/[0-9]*/stat')])"
    )
    command = {"site": None, "argv": [sys.executable, "-c", script], "timeout_s": 20}

    def states() -> str:
        return str(client.supervisor().post("/run", command)["stdout"])

    until(lambda: states().count("'") == 2 * 3 and "Z" not in states())  # supervisor, worker, the script itself


def test_helpers_are_bounded(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    supervisor = client.supervisor()
    slow = supervisor.post("/run", {"site": None, "argv": ["sh", "-c", "echo so far; sleep 60"], "timeout_s": 0.3})
    assert (slow["rc"], slow["stdout"], slow["timed_out"]) == (-signal.SIGKILL, "so far\n", True)
    quick = supervisor.post("/run", {"site": None, "argv": ["sh", "-c", "echo no >&2; exit 7"], "timeout_s": 20})
    assert quick == {"rc": 7, "stdout": "", "stderr": "no\n", "timed_out": False}
    for wrong in ({"site": "pd"}, {"argv": []}, {"timeout_s": 0}, {"argv": ["/none/such"]}, {"user": "root"}):
        with pytest.raises(TestbedError):
            supervisor.post("/run", {"site": None, "argv": ["true"], "timeout_s": 1, **wrong})


def test_asyncio_reaches_the_supervisor_too(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    asynchronous = client.AsyncUnixClient(state.supervisor_sock)
    assert asyncio.run(asynchronous.get("/status"))["phase"] == "ready"
    with pytest.raises(TestbedError, match="no process 'nobody'; there are: worker, gateway"):
        asyncio.run(asynchronous.post("/signal", {"name": "nobody", "signal": "TERM"}))


def test_the_control_socket_is_the_users_own(state: StateDir, make: Callable[..., LaunchSpec]) -> None:
    launchers.up(make())
    assert state.supervisor_sock.stat().st_mode & 0o077 == 0


def test_a_testbed_holds_nothing_that_its_launcher_was_started_with(
    state: StateDir, make: Callable[..., LaunchSpec], tmp_path: Path
) -> None:
    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        launchers.up(make())
        name = os.readlink(f"/proc/self/fd/{lock.fileno()}")
        held = [
            os.readlink(descriptor)
            for process in processes.find(state.root)
            for descriptor in Path(f"/proc/{process.id.pid}/fd").iterdir()
        ]
    assert held
    assert name not in held
