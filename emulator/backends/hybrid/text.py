"""Tokens become text: bytes into characters, however they are cut, up to a stop text or the end.

Text comes later than its tokens where a character is not whole yet, or where a stop text may have begun. No torch here.
"""

from __future__ import annotations

import codecs

from emulator.backends.hybrid.config import BYTES, EOS
from emulator.computing import Sampling


class Answer:
    """The answer of one request as it is made. ended: why it is over, OpenAI's finish_reason; "" while it is not."""

    def __init__(self, output_tokens: int, sampling: Sampling) -> None:
        self.count = 0
        self.ended = ""
        self._most = output_tokens
        self._stop = sampling.stop
        self._ignore_eos = sampling.ignore_eos
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, and perhaps the beginning of a stop text
        self._text = ""  # to leave
        self._ids: list[int] = []

    def push(self, token: int) -> str:
        """One token more; why it was the last, "" when it was not."""
        self.count += 1
        self._ids.append(token)
        self._held += self._decoder.decode(bytes([token]) if token < BYTES else b"")
        if self._stopped():
            return self.ended
        if token == EOS and not self._ignore_eos:
            self.ended = "stop"
        elif self.count == self._most:
            self.ended = "length"
        if self.ended:
            self._held += self._decoder.decode(b"", True)
            if not self._stopped():
                self._text, self._held = self._text + self._held, ""
            return self.ended
        safe = len(self._held) - max((_begun(self._held, stop) for stop in self._stop), default=0)
        self._text, self._held = self._text + self._held[:safe], self._held[safe:]
        return ""

    def take(self) -> tuple[str, tuple[int, ...]]:
        """What may leave now and has not left: text, and the tokens made since."""
        text, ids = self._text, tuple(self._ids)
        self._text = ""
        self._ids.clear()
        return text, ids

    def _stopped(self) -> bool:
        """Whether a stop text is there: then what is before it leaves, and nothing else."""
        places = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not places:
            return False
        self._text += self._held[: min(places)]
        self._held, self.ended = "", "stop"
        return True


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of a stop text."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)
