"""The command `prfaas`.

Every command is thin: it reads options, calls the room that does the work, and prints. Imports are inside the commands,
so that `--help` is quick. Exit codes: 0 pass, 1 failed, 2 usage, 3 invalid measurement, 4 inconclusive.

Read first: the table below (which command is where), then `clocks.py`; `options.py` and `shared.py` serve them all.
"""

from __future__ import annotations

import errno
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer

from testbed.cli import chaos, clocks, gate, logs, operate, parts, policy, profile, results, studies
from testbed.cli.shared import say

app = typer.Typer(
    help="A testbed for Prefill-as-a-Service: one scheduler, solved, simulated, and run on a really shaped wire.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AGAIN_S = 0.02
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
ROOM = "make room there, or name another place: --out for results, PRFAAS_STATE for the testbed, TMPDIR for a load"

COMMANDS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Clocks": (clocks.plan, clocks.run, clocks.simulate),
    "Studies": (studies.sweep, studies.figure, studies.fidelity, gate.gate, chaos.chaos),
    "Results": (results.explain, results.replay_decisions),
    "Testbed": (operate.up, operate.load, operate.status, logs.logs, operate.down, operate.doctor),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(results.report_app, name="report", rich_help_panel="Results")
app.add_typer(parts.link_app, name="link", rich_help_panel="Parts")
app.add_typer(policy.policy_app, name="policy", rich_help_panel="Parts")
app.add_typer(parts.trace_app, name="trace", rich_help_panel="Parts")
app.command(rich_help_panel="Parts")(profile.profile)


def main(arguments: list[str] | None = None) -> None:
    """Entry of the `prfaas` script. A user's error is one message on standard error and exit code 2."""
    code = 0
    sys.unraisablehook = _half_made
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup stays nohup
                signal.signal(number, _ended)
        from emulator.profile import ProfileError
        from netem.link import LinkError
        from testbed.launch.state import TestbedError
        from testbed.runs import RunError
        from testbed.scenario import ScenarioError
        from testbed.scheduler.model import ModelError
        from traces.request import TraceError

        app(args=arguments, prog_name="prfaas")  # a usage error is its own: exit code 2
    except KeyboardInterrupt:  # first: it may come while the others are imported
        say("interrupted")
        code = 130
    except (ProfileError, LinkError, TestbedError, RunError, ScenarioError, ModelError, TraceError) as error:
        say(f"error: {error}")
        code = 2
    except BrokenPipeError:
        sys.stderr.close()
        code = 141
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            say(f"error: {error.filename2 or error.filename or 'a file'}: cannot be written ({error.strerror}); {ROOM}")
            code = 2
        elif _of_interrupt(error):
            say("interrupted")
            code = 130
        else:
            what = f"{type(error).__name__}: {error}"
            say(f"error: a defect of the testbed: {what}; the traceback is in {_keep_traceback()}")
            code = 70
    sys.exit(code)


def _of_interrupt(error: BaseException | None) -> bool:
    """Whether it is what became of Ctrl-C on its way out: asyncio has lines where that makes another error of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _half_made(unraisable: Any) -> None:
    """An event loop that Ctrl-C caught while it was being made complains as it is thrown away: nobody's business.

    Ctrl-C itself, where Python can only ignore it (in a callback, in a finaliser), comes again at once.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        signal.signal(signal.SIGALRM, _ended)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    elif getattr(unraisable.object, "__qualname__", "") != "BaseEventLoop.__del__":
        sys.__unraisablehook__(unraisable)


def _ended(number: int, frame: FrameType | None) -> None:
    """SIGTERM, or the terminal is gone: leave as with Ctrl-C, taking down what this command started."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a script
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _keep_traceback() -> str:
    """Write the exception being handled where it can be found for a bug report."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="prfaas-traceback-", suffix=".txt", delete=False) as file:
        file.write(traceback.format_exc())
    return file.name
