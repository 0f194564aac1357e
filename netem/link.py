"""The state of the shaped link, and what it takes to get it: pure values, in wall units (s, bytes, bit/s)."""

from __future__ import annotations


class LinkError(ValueError):
    """A link that cannot be had. The message alone is for the user: field, value, remedy."""
