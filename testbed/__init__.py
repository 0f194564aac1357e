"""What people run and what is under test: one scheduler, in closed form, in virtual time and on the wire.

Read first: `scheduler/` (the subject; it needs nothing else of this package), then `control/` (a request's life,
pure), then its two edges, `simulate.py` (virtual time) and `gateway.py` (HTTP). `scenario.py` is what one experiment
is, `assemble.py` turns it into what the rooms take, `fleet.py` into processes; `cli` is the command `prfaas`.
`load.py` offers a load on the wire, `report/` judges a run, `launch/` owns the processes.
"""

from testbed import fast

COMPILED = fast.install()
"""Whether virtual time's innermost modules are compiled ones (`testbed.fast`)."""
