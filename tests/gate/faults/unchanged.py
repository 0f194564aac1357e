"""No fault at all: what a gate must not flag."""

from __future__ import annotations

from testbed.scheduler.prfaas import Prfaas


class Unchanged(Prfaas):
    """The shipped policy under another name."""
