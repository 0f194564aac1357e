"""What has to hold in every run, whatever the policy: the accounts agree, nothing is lost, and the system is stable.

Read `finding.py` first (what an invariant is given and what it says), then `check.py` (all of them, in order). Each
invariant is a function of one `Run`, with its definition in its docstring: `life.py` (requests conserved, stamps in
their order), `accounts.py` (bytes conserved), `little.py` (L = lambda W), `work.py` (no idle instance beside its own
queue), `queues.py` (drained, no starvation), `calm.py` (changes of threshold and roles, no limit cycle), `recovery.py`
(after a step of the link) and `decisions.py` (deterministic).
"""

from testbed.invariants.check import INVARIANTS, check, judge
from testbed.invariants.decisions import Twin
from testbed.invariants.finding import Finding, Run

__all__ = ["INVARIANTS", "Finding", "Run", "Twin", "check", "judge"]
