"""Starting and stopping a testbed. Read `spec.py` (what to start), `launchers.py` (`up`, `down`, `status`, whichever
launcher) and `supervisor.py` (owns everything started). What differs between launchers: `namespaces.py`, `pid1.py` and
`local.py` run processes of this host, the `compose*.py`, `containers.py` and `contained.py` run containers.
`state.py` and `client.py` do not depend on the launcher.
"""
