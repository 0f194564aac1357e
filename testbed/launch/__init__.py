"""Starting and stopping a testbed. Read `spec.py` (what to start), `namespaces.py` (how it is started) and
`supervisor.py` (pid 1 of everything started). `state.py` and `client.py` do not depend on the launcher.
"""
