"""The shaped link, real and modelled. Imports only itself; speaks wall units only.

Read first: `link.py` (what is asked of a link, and the plan that gives it, pure), then `tc.py` (plan -> kernel, read
back), then `agent.py` (the process beside the link). Delay, jitter and loss are the delay line's: `holding.py` (when
a packet leaves, pure), `delay.py` (its process), `keeper.py` (who starts and watches it). `fluid.py` is the same link
in virtual time, in its caller's units; `schedule.py` is a link that varies in time, for both (its models:
`courses.py`). `cross.py` is what else crosses it, for both, and `rivals.py` the process that makes it on
the wire. `topology.py` makes the sites, `probe.py` measures what was asked, `capabilities.py` says what a kernel
can do of it.
"""
