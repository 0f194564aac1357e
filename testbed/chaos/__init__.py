"""Chaos: faults as data, and experiments that say what the system has to hold while they happen.

Read first: `faults.py` (what can go wrong, and how it heals), then `experiment.py` (hypothesis, method, rollback). The
same experiment runs in virtual time (`virtual.py`) and on the wire (`wire.py`); `judge.py` looks at the requests of
either, and `journal.py` keeps what was done and when. How to write one: docs/chaos.md.
"""
