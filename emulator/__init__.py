"""The serving fleet being emulated: prefill and decode instances, live or in virtual time. Imports only itself.

Read first: `messages.py` (what the machines accept and emit), then `instance.py` and `decode_instance.py` (the pure
machines), then `worker.py` (the process that carries one on the wall clock). `profile.py` says what a prefill and a
decode step cost, `clock.py` is where model time meets the wall, `transfer` where KV meets the network; `channel.py`
carries the control messages, `kvcache.py` is a node's pool of cached prefixes, `prefix_cache.py` what moves between
pools, `batching.py` and `decode_step.py` a decode step that depends on its batch. `backend.py` is what a worker needs
of whoever computes; where a model really does, `computed.py` has the machines and `computing.py` what they say to it.
"""
