"""`prfaas gate`: is a changed policy better, the same, worse, or can that not be told? A verdict with stated errors.

Read first: `result.py` (what a gate says), then `statistics.py` (how it knows: pure) and `judge.py` (from runs to
verdicts: pure). `suite.py` has what is compared, `arms.py` the two policies, `run.py` the rounds of paired runs.
"""
