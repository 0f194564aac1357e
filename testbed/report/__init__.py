"""From what a run left behind to its figures and its verdict.

Read first: `rows.py` (the columns, stable), then `tables.py` (rows joined into the request table), then `summary.py`
(the verdict, and everything put together: `window.py` has the figures of a span of time, `changes.py` what the
scheduler did, `phases.py` both phase by phase). `collect.py` is where virtual time's rows come from, `little.py` its
check on itself;
`link_axis.py` puts link and load on one axis of time, `link_doctor.py` says what limited what on it (`link_checks.py`:
what is wrong), `link_page.py` draws it;
`write.py` makes the results folder, `provenance.py` says what it depends on, `intervals.py` averages over repeats.
"""
