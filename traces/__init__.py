"""Workloads: public traces, synthetic ones, the tools that shape them into a load, and the client that replays it.

Read first: ``request.py`` (the one row), ``load.py`` (a file becomes a Trace), then one format, ``mooncake.py``. A
new format is one file with a ``read`` and one line in ``load.py``; ``tools.py`` and ``info.py`` then work on it
unchanged. ``synthetic.py`` draws workloads: when requests come (``arrivals.py``) and conversations (``sessions.py``).
Of the replay, ``shard.py`` (the schedule), ``sse.py`` (one request), ``client_rows.py`` (what came of it);
``replay.py`` puts them under Locust. This room imports only itself.
"""
