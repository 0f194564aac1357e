"""Policies by name: the shipped ones, and anybody's own as `package.module:Class`.

A testbed that is up outlives many edits of a policy, so a module is loaded afresh when its file's content is another
than what was loaded; the modules that it imports stay as they are.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from testbed.scenario_data import ScenarioError, did_you_mean
from testbed.scheduler.api import Policy, Setup
from testbed.scheduler.baselines import Homogeneous, Naive, Static
from testbed.scheduler.oracle import Oracle
from testbed.scheduler.prfaas import Prfaas

SHIPPED: Final[dict[str, type]] = {
    "prfaas": Prfaas,
    "static": Static,
    "naive": Naive,
    "homogeneous": Homogeneous,
    "oracle": Oracle,
}

CAVEAT: Final = "knows what no scheduler can"
"""What has to be said wherever results of a policy are shown that is told the future."""


_loaded: dict[str, str] = {}
"""The digest of each policy module's file as it was loaded."""


def unknown(name: str) -> str | None:
    """Why there can be no policy of that name, with the remedy; None for a shipped one and for anybody's own."""
    if name in SHIPPED or ":" in name:
        return None
    return f"{did_you_mean(name, SHIPPED)}use one of {', '.join(SHIPPED)}, or your own as package.module:Class"


def load_policy(name: str) -> Policy:
    """A new policy object. Raises ScenarioError when there is none of that name, or it cannot be imported or made."""
    if name in SHIPPED:
        shipped: Policy = SHIPPED[name]()
        return shipped
    if why := unknown(name):
        raise ScenarioError(f"policy {name!r}: {why}")
    module_name, _, class_name = name.partition(":")
    try:
        module = _module(module_name)
    except ModuleNotFoundError as error:
        raise ScenarioError(
            f"policy {name!r}: {error}; the module must be importable from the folder where you call prfaas, "
            "or installed"
        ) from None
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"policy {name!r}: cannot be imported: {type(error).__name__}: {error}") from error
    make = getattr(module, class_name, None)
    if make is None:
        raise ScenarioError(f"policy {name!r}: module {module_name} has no class {class_name!r}")
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"policy {name!r}: cannot be made: {type(error).__name__}: {error}") from error
    missing = [method for method in ("start", "route") if not callable(getattr(made, method, None))]
    if missing:
        raise ScenarioError(
            f"policy {name!r}: has no method {' and no method '.join(missing)}; see testbed.scheduler.api.Policy"
        )
    policy: Policy = made
    return policy


def _module(name: str) -> ModuleType:
    """The module as its file is now. Raises whatever its code does; what was loaded before then stays."""
    known = sys.modules.get(name)
    if known is None:
        importlib.invalidate_caches()  # the file may be newer than the last look into its folder
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.has_location and spec.origin is not None:
            _loaded[name] = _digest(Path(spec.origin))
        return importlib.import_module(name)
    if not known.__file__ or Path(known.__file__).suffix != ".py":
        return known
    source = Path(known.__file__)
    digest = _digest(source)
    if _loaded.setdefault(name, digest) == digest:
        return known
    assert known.__spec__ is not None
    fresh = importlib.util.module_from_spec(known.__spec__)
    code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True)  # never a cached one
    sys.modules[name] = fresh
    try:
        exec(code, fresh.__dict__)
    except BaseException:
        sys.modules[name] = known
        raise
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, fresh)
    _loaded[name] = digest
    return fresh


def _digest(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def wants_future(policy: Policy) -> bool:
    """Whether the policy is to be told what is to come; it is then no scheduler, but an upper bound for one."""
    return bool(getattr(policy, "wants_future", False))


def start_policy(policy: Policy, name: str, setup: Setup) -> None:
    """Start a policy, without a time limit. Raises ScenarioError where it raises."""
    try:
        policy.start(setup)
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"policy {name!r}: cannot start: {type(error).__name__}: {error}") from error
