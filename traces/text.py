"""Text for a trace that has none: prompts of exactly the rows' lengths, for a model that really reads them.

A token is a byte. What a row says about its content is kept: blocks of the same hash have the same text, so prompts
that shared a prefix share it again. The same row, seed and place in the trace give the same text.
"""

from __future__ import annotations

import random

from traces.request import Request

_LEXICON = (
    "a all and are as at away back be before bridge by carry city cloud cold come day down each eight far "
    "first five for from garden give go green have he her here high house in into is it keep land last leave "
    "letter light line little long make many market more morning most mountain near never new night no north "
    "not now of often old on one open or other our out over page part people place quiet rain read river road "
    "round sea see seven she ship side six small so some south station still stone street summer table take "
    "ten than that the their then there they this three time to town train tree turn two under up us voice "
    "walk wall was water way we west what when where which white who wind window winter with word work year "
    "you young"
)
WORDS = _LEXICON.split(" ")


def prompt_text(request: Request, index: int, seed: int) -> str:
    """The prompt of a row, request.input_tokens bytes of ASCII. index: its place in the trace, which tells rows without
    hashes apart."""
    if not request.block_hashes:
        return _words(f"{seed} row {index}", request.input_tokens)
    blocks = [_words(f"{seed} block {one}", request.block_size) for one in request.block_hashes]
    return "".join(blocks)[: request.input_tokens]


def _words(of: str, size: int) -> str:
    chance = random.Random(of)
    told = " ".join(chance.choices(WORDS, k=size // 2 + 1))  # the shortest word and its space are two characters
    return told[:size]
