"""What may be asked of the live page's controls, as data: checked whole, before anything is touched.

A fault is one of `testbed.chaos.faults` that begins now, for `duration_s`; a step of the link is one kind more. Model
units, as a scenario has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from netem.link import MAX_DELAY_S, MAX_LOSS, MAX_RATE_BPS, MIN_RATE_BPS
from testbed.chaos import faults
from testbed.openai_api import ApiError
from testbed.scenario import Scale
from testbed.scenario_errors import explain
from testbed.scenario_workload import Number, Rate

MIN_WALL_S: Final = 0.1
MAX_WALL_S: Final = 3600.0
"""How long a fault by hand may last, wall seconds: each has its end."""

T = TypeVar("T", bound=faults.Timed)
_LINK_FIELDS: Final = ("rate_bps", "delay_s", "jitter_s", "loss")


class LinkStep(faults.Timed):
    """The link is another for a while, in one direction or both; what is None stays as it is."""

    kind: Literal["link"] = "link"
    direction: Literal["to_pd", "to_prfaas"] | None = None
    rate_bps: Rate | None = None
    delay_s: Annotated[Number, Field(ge=0)] | None = None
    jitter_s: Annotated[Number, Field(ge=0)] | None = None
    loss: Annotated[Number, Field(ge=0, le=MAX_LOSS)] | None = None

    @property
    def says(self) -> dict[str, Any]:
        """What it says of the link; keys as of `netem.link.LinkState`, model units."""
        return {key: value for key in _LINK_FIELDS if (value := getattr(self, key)) is not None}


KINDS: Final[dict[str, type[faults.Timed]]] = {
    "outage": faults.Outage,
    "loss_burst": faults.LossBurst,
    "delay_spike": faults.DelaySpike,
    "slow_worker": faults.SlowWorker,
    "landing_full": faults.LandingFull,
    "killed_worker": faults.KilledWorker,
    "frozen_worker": faults.FrozenWorker,
    "lost_site": faults.LostSite,
}
"""The faults that can be brought about by hand; those of the load's own clock or clients belong to an experiment."""

NEED_SUPERVISOR: Final = ("killed_worker", "frozen_worker", "lost_site")


def link_step(body: dict[str, Any], scale: Scale) -> LinkStep:
    """A step of the link from a request's body. Raises ApiError (400), naming field, value and remedy."""
    step = _validated(LinkStep, body, scale)
    if not step.says:
        raise ApiError(400, f"nothing is asked of the link; give one or more of {', '.join(_LINK_FIELDS)}", "rate_bps")
    return step


def fault(body: dict[str, Any], scale: Scale, roles: dict[str, str]) -> Any:
    """A fault from a request's body. roles: of the workers, by name. Raises ApiError (400)."""
    kind = body.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ApiError(400, f"kind = {kind!r}: no fault that can be made by hand; take {', '.join(KINDS)}", "kind")
    made: Any = _validated(KINDS[kind], body, scale)
    for node in made.nodes:
        if node not in roles:
            raise ApiError(400, f"node = {node!r}: no such worker; there are {', '.join(roles)}", "node")
        if isinstance(made, faults.LandingFull) and roles[node] != "decode":
            raise ApiError(
                400, f"node = {node!r}: a {roles[node]} node has no landing room; take a decode node", "node"
            )
    return made


def limits(scale: Scale) -> dict[str, list[float]]:
    """[least, most] of what may be asked, model units: what the wire of this scale can do."""
    return {
        "duration_s": [MIN_WALL_S * scale.time_scale, MAX_WALL_S * scale.time_scale],
        "rate_bps": [scale.model_bps(MIN_RATE_BPS), scale.model_bps(MAX_RATE_BPS)],
        "delay_s": [0.0, MAX_DELAY_S * scale.time_scale],
        "jitter_s": [0.0, MAX_DELAY_S * scale.time_scale],
    }


def _validated(model: type[T], body: dict[str, Any], scale: Scale) -> T:
    if "at_s" in body:
        raise ApiError(400, "at_s: a fault by hand begins now; leave it out", "at_s")
    try:
        made = model.model_validate({**body, "at_s": 0.0})
    except ValidationError as error:
        known = sorted(set(model.model_fields) - {"at_s"})
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, explain(first, body, lambda place: known), field) from None
    for field, (least, most) in limits(scale).items():
        value = getattr(made, field, None)
        if value is not None and not least <= value <= most:
            raise ApiError(
                400,
                f"{field} = {value:g}: this machine's wire can have {least:g} to {most:g} (at scale.time_scale = "
                f"{scale.time_scale:g}, scale.byte_scale = {scale.byte_scale:g}); give a value between them",
                field,
            )
    return made
