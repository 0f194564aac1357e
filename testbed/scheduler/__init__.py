"""The subject: routing policies and the paper's model. Pure: it imports itself, the standard library and numpy.

Read first: `api.py` (what a policy sees and answers: the whole contract), then `prfaas.py` (the paper's policy, 20
lines) and `rules.py` (what every policy shares), then `model.py` (equations 1-8). `baselines.py` is what to compare
with. A policy of your own is a class with `start` and `route`, named as `--policy package.module:Class`.
"""
