"""`prfaas policy new`: the skeleton of a policy of one's own, which runs as it is."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Final

from testbed.policies import SHIPPED
from testbed.scenario_data import ScenarioError

SKELETON: Final = '''"""{name}: a routing policy. Say here what it does, and why that should be better."""

from testbed.scheduler.api import Note, Setup
from testbed.scheduler.rules import by_threshold, solve_threshold


class {made}:
    """Prompts longer than t are prefilled remotely, and t follows the link."""

    def start(self, setup: Setup) -> None:
        """A load begins: this is what an operator knows of it."""
        self.setup = setup
        self.solved_bps = setup.link_nominal_bps
        self.threshold_tokens = solve_threshold(setup)  # equation (7)

    def route(self, request, view):
        """Where one request goes: a Decision, or a Reject. It is on the request's path: microseconds."""
        return by_threshold(request, view, self.threshold_tokens)

    def tick(self, view):
        """Every second: look around, and say what is to change. It may take milliseconds."""
        link_bps = view.observed.link.bps  # estimated from what transfers achieve
        if abs(link_bps - self.solved_bps) < 0.1 * self.solved_bps:
            return ()
        before, self.solved_bps = self.threshold_tokens, link_bps
        self.threshold_tokens = solve_threshold(self.setup, link_bps=link_bps)
        return (Note("threshold", before, self.threshold_tokens, f"{{link_bps / 1e9:.3g}} Gbps"),)
'''


def new_policy(name: str, folder: Path) -> tuple[Path, str]:
    """Write the skeleton; its file, and the policy's name for `--policy`, as called from where one stands.

    Raises ScenarioError for a name that no module can have, one that is taken, or a folder that cannot be written to.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.lower() != name:
        raise ScenarioError(
            f"NAME = {name!r}: it becomes a module and a class; use small letters, digits and underscores, such as "
            "my_policy"
        )
    if name in SHIPPED or name in ("testbed", "emulator", "netem", "traces"):
        raise ScenarioError(f"NAME = {name!r}: taken; choose another")
    path = folder / f"{name}.py"
    if path.exists():
        raise ScenarioError(f"{path}: is there already; choose another name, nothing is overwritten")
    made = "".join(part.capitalize() for part in name.split("_"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(SKELETON.format(name=name, made=made), encoding="utf-8")
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be written ({error.strerror}); name another --dir") from None
    here, where = Path.cwd(), folder.resolve()
    package = ".".join([*where.relative_to(here).parts, name]) if where.is_relative_to(here) else name
    return path, f"{package}:{made}"
