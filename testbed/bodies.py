"""What the gateway's own endpoints are asked, from the bodies of the requests: policies, parameters, times."""

from __future__ import annotations

from typing import Any

from testbed.json_http import check_finite
from testbed.openai_api import ApiError
from testbed.policies import load_policy
from testbed.scenario import ScenarioError
from testbed.scheduler.api import Policy


def policy_of(body: dict[str, Any], otherwise: str) -> tuple[str, Policy]:
    """The policy that a body asks for, or `otherwise`: its name, and a new one. Raises ApiError."""
    name = body.get("policy") or otherwise
    if not isinstance(name, str):
        raise ApiError(400, f"policy = {name!r}: must be a policy's name, or package.module:Class", "policy")
    try:
        return name, load_policy(name)
    except ScenarioError as error:
        raise ApiError(400, str(error), "policy") from None


def parameters_of(body: dict[str, Any]) -> dict[str, float]:
    """The policy's parameters that a body gives. Raises ApiError."""
    given = body.get("parameters") or {}
    if not isinstance(given, dict):
        raise ApiError(400, f"parameters = {given!r}: must be an object of numbers", "parameters")
    for key, value in given.items():
        check_finite(value, f"parameters.{key}")
    return {key: float(value) for key, value in given.items()}


def lead_of(body: dict[str, Any]) -> float:
    """Wall seconds until t = 0. Raises ApiError."""
    lead_s = body.get("lead_s", 1.0)
    if isinstance(lead_s, bool) or not isinstance(lead_s, int | float) or not 0 <= lead_s <= 60:
        raise ApiError(400, f"lead_s = {lead_s!r}: must be 0 to 60 wall seconds", "lead_s")
    return lead_s
