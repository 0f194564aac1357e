"""Small trace files that the tests of this room write, and where the real ones may lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traces.load import Trace, load
from traces.request import Request

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
MOONCAKE = REAL / "mooncake-fast25" / "conversation_trace.jsonl"
AZURE = REAL / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv"

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROWS = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_ROWS = "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n"
TABLE_MAP = {"arrival_s": "Time", "input_tokens": "In", "output_tokens": "Out"}


def needs(path: Path) -> pytest.MarkDecorator:
    """Skip a test of a real trace that this machine does not hold."""
    return pytest.mark.skipif(not path.exists(), reason=f"{path.name} is not on this machine")


def mooncake_row(
    timestamp: object = 0, tokens: object = 1000, output: object = 10, ids: object = (0, 1)
) -> dict[str, object]:
    """One row in Mooncake's format; 1000 tokens are two blocks."""
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": list(ids) if isinstance(ids, tuple) else ids,
    }


def qwen_row(
    chat_id: object = 0, timestamp: object = 0.0, tokens: object = 20, ids: object = (1, 2), **changed: object
) -> dict[str, object]:
    """One row in Qwen-Bailian's format; 20 tokens are two blocks."""
    return {
        "chat_id": chat_id,
        "parent_chat_id": -1,
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": 10,
        "type": "text",
        "turn": 1,
        "hash_ids": list(ids) if isinstance(ids, tuple) else ids,
    } | changed


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    """A JSON-lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write(path: Path, content: str | bytes) -> Path:
    """A file with exactly this content."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def table(path: Path, stamps: list[object], map_key: str = "arrival_s", *, check_units: bool = True) -> Trace:
    """Load a generic CSV with these stamps, every request 100 tokens in and 10 out."""
    write(path, "Time,In,Out\n" + "".join(f"{stamp},100,10\n" for stamp in stamps))
    return load(path, {map_key: "Time", "input_tokens": "In", "output_tokens": "Out"}, check_units=check_units)


def trace_at(*arrivals_s: float) -> Trace:
    """A trace with these arrivals; request i has i + 1 input tokens, so that it can be told apart."""
    requests = [Request(arrival, i + 1, 1) for i, arrival in enumerate(arrivals_s)]
    return Trace(requests, len(requests), {}, [], "test", "0" * 64, "table")
