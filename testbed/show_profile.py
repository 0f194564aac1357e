"""What `prfaas profile` found, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from testbed.show import out


def show_profile(summary: Mapping[str, Any]) -> None:
    prefill = Table(box=SIMPLE_HEAD, title="prefill", title_justify="left")
    for title in ("tokens", "T_prefill, s", "spread", "S_kv, bytes", "Phi_kv, Mbit/s"):
        prefill.add_column(title, justify="right")
    for row in summary["prefill"]:
        prefill.add_row(
            f"{row['tokens']:,}",
            f"{row['seconds']:.4f}",
            f"{row['spread']:.1%}",
            f"{row['kv_bytes']:,}",
            f"{row['kv_bps'] / 1e6:.1f}",
        )
    decode = Table(box=SIMPLE_HEAD, title="decode step, ms", title_justify="left")
    lengths = sorted({row["tokens"] for row in summary["decode"]})
    taken = {(row["requests"], row["tokens"]): row["seconds"] for row in summary["decode"]}
    decode.add_column("requests", justify="right")
    for length in lengths:
        decode.add_column(f"at {length:,} tokens", justify="right")
    for requests in sorted({requests for requests, _ in taken}):
        decode.add_row(str(requests), *(f"{1000 * taken[requests, length]:.2f}" for length in lengths))
    out.print(prefill)
    out.print(decode)
