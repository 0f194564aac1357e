"""Workloads: public traces, synthetic ones, and the tools that shape them into a load.

Read first: ``request.py`` (the one row), ``load.py`` (a file becomes a Trace), then one format, ``mooncake.py``. A
new format is one file with a ``read`` and one line in ``load.py``; ``tools.py`` and ``info.py`` then work on it
unchanged. This room imports only itself.
"""
