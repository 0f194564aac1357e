"""Schedulers that are wrong: each the shipped policy with the smallest change that makes one mistake that schedulers
really make. A gate that is worth its minute tells them from the right one (`python -m tests.gate.mutants`).

Each is a policy of its own, `tests.gate.faults.MODULE:Class`; its docstring says what is wrong, and `hurts_in` names
the situation in which it has to hurt: a suite without that situation cannot see it.

- `link.py`: what is believed of the link (hurts when the link is short, falls, comes back, or is out)
- `solving.py`: equations (7) and (8) (hurts in a steady load near capacity, on a short link, when the mix shifts)
- `routing.py`: which site and which node (hurts in bursts, with hot prefixes, in an outage, where decode is short)
- `timing.py`: when something is changed (hurts in its stability: what a scenario promises in `bounds`)
"""

from __future__ import annotations

from typing import Final

FAULTS: Final = (
    "link:BytesForBits",
    "link:StaleEstimate",
    "link:NeverDecays",
    "link:EgressForCapacity",
    "link:TrustsNominal",
    "link:IgnoresBacklog",
    "link:ForgetsTheReturn",
    "solving:WrongSign",
    "solving:KilotokensForTokens",
    "solving:MillisecondsForSeconds",
    "solving:P90ForMean",
    "solving:ClippedToTheWrongSide",
    "solving:TenLengths",
    "solving:BelowOneDecodeWorker",
    "solving:ForgetsPrefillNodes",
    "routing:MostLoaded",
    "routing:FirstDecodeNode",
    "routing:IgnoresReservations",
    "routing:StaleQueues",
    "routing:DeadNodes",
    "routing:TotalForIncremental",
    "routing:HitCountedTwice",
    "routing:ScarceRuleWhenAbundant",
    "routing:FetchesAreFree",
    "timing:NoHysteresis",
    "timing:RecallsEverything",
)
"""All of them, as `tests.gate.faults.` + name."""
