"""A small hybrid-attention language model that is really prefilled in one process and decoded in another.

Read `config.py` first (which layers, of what size, and how many bytes their state has), then `model.py` (prefill and
decode), `linear.py` on `delta.py` (the gated delta rule, as a recurrence and chunk-parallel), `attention.py`, and
`state.py` (what crosses the link). That is the model; a worker's backend is `backend.py`, with `prefill.py` and
`decode.py` for its two roles, `parcel.py` for a transfer as a whole, `held.py` for cached prefixes, `sampling.py` and
`text.py` for the answer. Importing this package imports no torch; of its modules `config`, `spec` and `text` do not.
"""
