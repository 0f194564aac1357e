"""The timing backend: no model runs, time passes as the profile says, and the answer's tokens are their own numbers.

Token k reads " k", so that a client can check that an answer is whole and in order.
"""


def text_of(first: int, count: int) -> str:
    """The text of tokens first .. first + count - 1 (from 0)."""
    return "".join([f" {k}" for k in range(first, first + count)])
