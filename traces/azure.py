"""Azure LLM inference traces, 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

TIMESTAMP is a date with up to 7 fractional digits (100 ns), in 2024 with ``+00:00``. The trace says nothing about
content, so its requests carry no block hashes. Source: github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

from traces.rows import Rows, Table, from_columns

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(table: Table) -> Rows:
    """Requests in the file's order, arrival_s seconds after the earliest row; rows of zero tokens are dropped, named.

    Raises TraceError for a missing column, a date that is none, or a length that is no count.
    """
    for name in COLUMNS:
        table.column(name)
    return from_columns(table, table.stamps_s("TIMESTAMP"), "ContextTokens", "GeneratedTokens")
