"""Policies by name: the shipped ones, and anybody's own as `package.module:Class`."""

from __future__ import annotations

import importlib
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
        module = importlib.import_module(module_name)
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


def wants_future(policy: Policy) -> bool:
    """Whether the policy is to be told what is to come; it is then no scheduler, but an upper bound for one."""
    return bool(getattr(policy, "wants_future", False))


def start_policy(policy: Policy, name: str, setup: Setup) -> None:
    """Start a policy, without a time limit. Raises ScenarioError where it raises."""
    try:
        policy.start(setup)
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"policy {name!r}: cannot start: {type(error).__name__}: {error}") from error
