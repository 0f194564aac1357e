"""A small hybrid-attention language model that is really prefilled in one process and decoded in another.

Read `config.py` first (which layers, of what size, and how many bytes their state has), then `model.py` (prefill and
decode), `linear.py` on `delta.py` (the gated delta rule, as a recurrence and chunk-parallel), `attention.py`, and
`state.py` (what crosses the link). Importing this package imports no torch; its modules but `config` do.
"""
