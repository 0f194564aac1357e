"""The request table: one row a request (`requests.csv`).

The gateway's rows know the inside of a request's life, the client's rows its outside; they are joined by request id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from testbed.report.rows import PARTS, REQUEST_COLUMNS, WORDS

_CLIENT_STAMPS = ("sched", "send", "headers", "first_token", "last_token", "done")
_TEXTS = ("request_id", *WORDS)
"""Texts, whatever they look like: a request of the id NA has an id."""
_LIFE = ("sched_s", "arrive_s", "prefill_start_s", "prefill_end_s", "landed_s", "admitted_s", "first_token_s")
"""The stamps between which the PARTS of a TTFT lie."""


def request_table(
    gateway_rows: Path, client_rows: Path | None, *, t0_ns: int, time_scale: float, warmup_s: float, duration_s: float
) -> pd.DataFrame:
    """One row a request, columns REQUEST_COLUMNS, model seconds from t = 0, in the order of their schedule.

    A request the client scheduled and the gateway never saw has a row too (status failed, the client's error). Without
    client rows the schedule is the arrival, and a TTFT ends where the first token left the decode node.
    """
    gateway = _read(gateway_rows, _TEXTS)
    if client_rows is None:
        table = gateway.copy()
        for stamp in _CLIENT_STAMPS:
            table[f"{stamp}_s"] = np.nan
        table["sched_s"], table["first_token_s"] = table["arrive_s"], table["admitted_s"]
        table["last_token_s"] = table["done_s"] = table["finished_s"]
        table["client_error"] = ""
    else:
        stamps_ns = {f"t_{stamp}_ns": "Int64" for stamp in _CLIENT_STAMPS}  # exact, and with gaps
        client = _read(client_rows, ("request_id", "error"), stamps_ns)
        for stamp in _CLIENT_STAMPS:
            since_ns = (client[f"t_{stamp}_ns"] - t0_ns).to_numpy(dtype=np.float64, na_value=np.nan)
            client[f"{stamp}_s"] = since_ns * 1e-9 * time_scale
        client["client_error"] = client["error"]
        client = client[
            [
                "request_id",
                *(f"{stamp}_s" for stamp in _CLIENT_STAMPS),
                "client_error",
                "input_tokens",
                "output_tokens_asked",
            ]
        ]
        table = client.merge(gateway, on="request_id", how="left", suffixes=("_client", ""))
        unseen = table["status"].isna()
        for column in ("input_tokens", "output_tokens_asked"):
            table[column] = table[column].fillna(table.pop(f"{column}_client")).astype(int)
        table.loc[unseen, "status"] = "failed"
        for column in _TEXTS:
            table[column] = table[column].fillna("")
    add_figures(table, warmup_s=warmup_s, duration_s=duration_s)
    table = table.sort_values(["sched_s", "request_id"], ignore_index=True)
    return table[list(REQUEST_COLUMNS)]


def add_figures(table: pd.DataFrame, *, warmup_s: float, duration_s: float) -> None:
    """Add the columns that follow from the stamps: the same formulas for virtual time and for the wire."""
    table["late_s"] = table["send_s"] - table["sched_s"]
    table["ttft_s"] = table["first_token_s"] - table["sched_s"]
    tokens = table["output_tokens"].where(table["output_tokens"] > 1)
    table["tpot_s"] = (table["last_token_s"] - table["first_token_s"]) / (tokens - 1)
    table["e2e_s"] = table["done_s"] - table["sched_s"]
    for part, (start, end) in zip(PARTS, pairwise(_LIFE), strict=True):
        table[f"ttft_{part}_s"] = table[end] - table[start]
    table["in_window"] = (table["sched_s"] >= warmup_s) & (table["sched_s"] < duration_s)


def _read(path: Path, words: Sequence[str], types: Mapping[str, str] | None = None) -> pd.DataFrame:
    """A CSV whose `words` are texts, empty where there is none, and whose other columns are numbers, NaN where none."""
    numbers = [name for name in pd.read_csv(path, nrows=0).columns if name not in words]
    return pd.read_csv(
        path,
        dtype={**dict.fromkeys(words, "str"), **(types or {})},
        keep_default_na=False,
        na_values={name: [""] for name in numbers},
    )
