"""A request for a model that computes: the prompt's tokens, a byte each, and how those of the answer are chosen.

Of the timing backend's requests only lengths count; here what a client says about sampling is meant. What this testbed
does not do (penalties, biases, other filters) is refused, and never ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from emulator.computing import Sampling

MOST_STOPS: Final = 4  # OpenAI's own bound
MOST_STOP_CHARACTERS: Final = 256
MOST_TEMPERATURE: Final = 2.0
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "stop_token_ids": (None, []),
    "min_tokens": (None, 0),
}
"""What would change the answer and is not done here, with the values that change nothing."""

Wrong = Callable[[str, str], Exception]
"""(message, field) -> what is raised."""


@dataclass(frozen=True, slots=True)
class Work:
    """prompt: a byte a token. return_token_ids: the answer carries its tokens as well (vLLM's extension)."""

    prompt: bytes
    sampling: Sampling
    return_token_ids: bool


def work_of(body: dict[str, Any], *, chat: bool, wrong: Wrong) -> Work:
    """From a body whose shape was looked at already. Raises what `wrong` makes, naming field, value and remedy."""
    for field, harmless in NEUTRAL.items():
        if body.get(field) not in harmless:
            raise wrong(f"{field} = {body[field]!r}: not supported by this testbed's model; leave it out", field)
    returned = body.get("return_token_ids")
    if returned is not None and not isinstance(returned, bool):
        raise wrong(f"return_token_ids = {returned!r}: must be true or false", "return_token_ids")
    return Work(_prompt(body, chat, wrong), _sampling(body, wrong), bool(returned))


def _prompt(body: dict[str, Any], chat: bool, wrong: Wrong) -> bytes:
    if "prfaas" in body:
        raise wrong(
            "prfaas: a length alone is no prompt for a model that computes; send a prompt (a replay: --text-seed)",
            "prfaas",
        )
    if chat:
        return "".join(f"{one['role']}:{_content(one)}\n" for one in body["messages"]).encode()
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode()
    above = next((token for token in prompt if token > 255), None)
    if above is not None:
        raise wrong(f"prompt: token {above}: this testbed's model reads bytes, 0 to 255", "prompt")
    return bytes(prompt)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _sampling(body: dict[str, Any], wrong: Wrong) -> Sampling:
    temperature = _number(body, "temperature", 1.0, 0.0, MOST_TEMPERATURE, wrong)
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0, wrong)
    if top_p == 0:
        raise wrong("top_p = 0: must be above 0; for the likeliest token take temperature 0", "top_p")
    seed = body.get("seed")
    if seed is None:
        seed = secrets.randbits(63)  # one for the request, so that a second attempt gives the same answer
    elif type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise wrong(f"seed = {seed!r}: must be a whole number of at most 64 bits", "seed")
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(_is_stop(one) for one in stops):
        raise wrong(
            f"stop: must be a text, or a list of at most {MOST_STOPS}, each of 1 to {MOST_STOP_CHARACTERS} characters",
            "stop",
        )
    return Sampling(temperature, top_p, seed, tuple(stops), bool(body.get("ignore_eos")))


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_STOP_CHARACTERS


def _number(body: dict[str, Any], field: str, default: float, low: float, high: float, wrong: Wrong) -> float:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise wrong(f"{field} = {value!r}: must be a number from {low:g} to {high:g}", field)
    return float(value)
