"""The state directory: what is up on this host, for this user, whichever launcher started it. It holds the control
sockets, the logs and `testbed.json`; every command finds the testbed through it. Nothing here starts or stops anything.
"""

import contextlib
import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOCKET_PATH_BYTES = 107  # sun_path holds 108, the last one a NUL
LOCK_TIMEOUT_S = 120.0
CONTAINER_ID = 10001  # user and group of the containers that root starts
OURS = {"supervisor.sock", "agent.sock", "logs", "ready", "config", "loads", "testbed.json", "failure.txt", "lock"}


class TestbedError(ValueError):
    """A testbed cannot be started, reached or stopped. The message alone is the whole text for the user."""

    __test__ = False  # pytest: not a test


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid: `start_ticks` is its start, in clock ticks
    since the boot that `boot_id` names.
    """

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has this pid now; None if there is none, or only its zombie."""
        fields = proc_stat(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]), boot_id())

    def alive(self) -> bool:
        """Whether that very process still runs (a zombie does not)."""
        return ProcessId.of(self.pid) == self

    def signal(self, number: int) -> bool:
        """Send a signal to that very process; False if it is gone. Raises PermissionError for another user's."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)


@dataclass(frozen=True, slots=True)
class Record:
    """`testbed.json`: what was started. `outer` is the launcher's outermost process (for `namespaces`: unshare)."""

    launcher: str
    run_id: str
    outer: ProcessId
    port: int
    scenario: str
    fingerprint: str
    started_at: str


class StateDir:
    """Paths in the state directory, and the few files every launcher shares.

    `StateDir(create=True)` makes the directory (mode 0700); without it a missing directory is simply empty.
    Raises `TestbedError` where the directory belongs to someone else, holds other things, or is too deep for a Unix
    socket.
    """

    def __init__(self, root: Path | None = None, *, create: bool = False) -> None:
        self.root = (root or default_root()).resolve()
        self.supervisor_sock = self.root / "supervisor.sock"
        self.agent_sock = self.root / "agent.sock"
        self.listener_sock = self.root / "listener.sock"
        self.compose_file = self.root / "compose.yaml"
        self.compose_env = self.root / "compose.env"
        self.cross_socks = {site: self.root / f"cross.{site}" for site in ("prfaas", "pd")}
        self.logs = self.root / "logs"
        self.ready = self.root / "ready"
        self.config = self.root / "config"
        self.loads = self.root / "loads"
        self.record_file = self.root / "testbed.json"
        self.failure_file = self.root / "failure.txt"
        self.lock_file = self.root / "lock"
        length = len(os.fsencode(self.supervisor_sock))
        if length > SOCKET_PATH_BYTES:
            raise TestbedError(
                f"the state directory's path is too long for a Unix socket ({length} bytes of {SOCKET_PATH_BYTES}): "
                f"{self.supervisor_sock}; set PRFAAS_STATE to a shorter directory, such as /tmp/prfaas-{os.getuid()}"
            )
        if create:
            self._create()

    def log(self, name: str) -> Path:
        """The log of one process (stdout and stderr)."""
        return self.logs / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        """The file a process creates, holding its pid, once it serves."""
        return self.ready / name

    def config_file(self, name: str) -> Path:
        """The JSON configuration a process was started with."""
        return self.config / f"{name}.json"

    def read(self) -> Record | None:
        """What was started last and not taken down; it may be dead by now (`Record.outer.alive()`). None: nothing."""
        try:
            data = json.loads(self.record_file.read_text())
            return Record(**{**data, "outer": ProcessId(**data["outer"])})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError):  # half written by something that was killed, or of another version
            return None
        except PermissionError:
            raise TestbedError(
                f"{self.record_file} is not readable; set PRFAAS_STATE to a directory of your own"
            ) from None

    def write(self, record: Record) -> None:
        """Replace `testbed.json`, whole or not at all."""
        write_json(self.record_file, asdict(record))

    def fresh(self) -> None:
        """Empty what belongs to one start: logs, ready files, configurations, sockets. Loads stay."""
        self.clean()
        for directory in (self.logs, self.ready, self.config, self.loads):
            directory.mkdir(mode=0o700, exist_ok=True)
        for path in self.logs.glob("*.log"):
            path.unlink()

    def clean(self) -> list[str]:
        """Remove what only a running testbed needs; logs and loads stay. Returns what was removed, in words."""
        removed = []
        of_the_line = [self.root / f"delay-line.{ending}" for ending in ("sock", "json")]
        sockets = (self.supervisor_sock, self.agent_sock, self.listener_sock, *self.cross_socks.values())
        composed = (self.compose_file, self.compose_env)
        for path in (*sockets, *of_the_line, *composed, self.failure_file, self.record_file):
            if _unlink(path):
                removed.append(str(path))
        for directory in (self.ready, self.config):
            files = sorted(directory.glob("*")) if directory.is_dir() else []
            for path in files:
                _unlink(path)
            if directory.is_dir():
                with contextlib.suppress(OSError):
                    directory.rmdir()
        return removed

    def share(self) -> tuple[int, int]:
        """Let containers use the directory, which never run as root: the user and the group for them to run as. A
        user's own; root gives the group CONTAINER_ID, which is nobody's on the host, what they need."""
        if os.geteuid() != 0:
            return os.geteuid(), os.getegid()
        for directory in (self.root, self.logs, self.ready, self.config, self.loads):
            os.chown(directory, -1, CONTAINER_ID)
            directory.chmod(0o2750 if directory == self.config else 0o2770)
        for path in self.loads.rglob("*"):  # of a testbed in namespaces that was up here before
            if path.is_symlink():  # not ours: a container may have made it, and it may lead out of the directory
                continue
            os.chown(path, -1, CONTAINER_ID)
            path.chmod(0o2770 if path.is_dir() else 0o660)
        return CONTAINER_ID, CONTAINER_ID

    @contextlib.contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold the directory's lock: one `up` or `down` at a time. The kernel frees it if the holder dies.

        Raises `TestbedError` after `timeout_s` seconds.
        """
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + timeout_s
            while not _flock(descriptor):
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise TestbedError(
                        f"another prfaas command (pid {holder}) has been starting or stopping a testbed for over "
                        f"{timeout_s:.0f} s; wait for it, or end it, and try again ({self.lock_file})"
                    )
                time.sleep(0.05)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def lock_holder(self) -> str | None:
        """The pid written by the command that holds the lock now; None if it is free."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return None if _flock(descriptor) else os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        finally:
            os.close(descriptor)

    def _create(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.root.stat()
        except OSError as error:
            raise TestbedError(
                f"the state directory {self.root} cannot be made ({error.strerror}); set PRFAAS_STATE to your own"
            ) from None
        if status.st_uid != os.geteuid():
            raise TestbedError(
                f"the state directory {self.root} belongs to uid {status.st_uid}; set PRFAAS_STATE to your own"
            )
        if stat.S_IMODE(status.st_mode) & (0o007 if status.st_gid == CONTAINER_ID else 0o077):
            others = sorted(entry.name for entry in self.root.iterdir() if entry.name not in OURS)
            if others:
                raise TestbedError(
                    f"the state directory {self.root} is open to other users and holds other things ({others[0]}); "
                    "set PRFAAS_STATE to a directory of its own"
                )
            self.root.chmod(0o700)


def default_root() -> Path:
    """`$PRFAAS_STATE`, else `$XDG_STATE_HOME/prfaas`, else `~/.local/state/prfaas`."""
    if chosen := os.environ.get("PRFAAS_STATE"):
        return Path(chosen)
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "prfaas"
    try:
        return Path.home() / ".local" / "state" / "prfaas"
    except RuntimeError:
        raise TestbedError("you have no home directory; set PRFAAS_STATE to a directory you may write") from None


def proc_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on (index 0 is proc(5) field 3); None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split() or None


def boot_id() -> str:
    """The kernel's name of this boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part; for this user's eyes only."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
