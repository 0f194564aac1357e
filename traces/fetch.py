"""Public traces by name: where they are, under which licence, and their sha256 where it is known for certain.

What is fetched is kept only when its sum is the expected one; a trace whose sum nobody wrote down here needs one from
the caller, who has it from a source of trust.
"""

from __future__ import annotations

import difflib
import hashlib
import http.client
import os
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from traces.load import check_target
from traces.request import TraceError

TIMEOUT_S = 60.0
"""Of silence, before a download is given up."""
CHUNK_BYTES = 1 << 20
UNKNOWN_SUM = "not known here: --sha256 is needed"
FROM_FILE = "computed from the file"
FROM_POINTER = "from the repository's Git LFS pointer"


@dataclass(frozen=True, slots=True)
class Public:
    """A public trace. sha256 is None where no sum is known, sum_from says where one is from."""

    name: str
    url: str
    licence: str
    source: str
    sha256: str | None = None
    sum_from: str = UNKNOWN_SUM

    @property
    def file_name(self) -> str:
        """The file's own name."""
        return Path(urlsplit(self.url).path).name


_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces/"
_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data/"
_AZURE_2024 = "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace/"
_BURSTGPT = "https://media.githubusercontent.com/media/HPMLL/BurstGPT/5d93d820d9b6bee4e26914df003e5713538164ae/data/"
_QWEN = "https://media.githubusercontent.com/media/alibaba-edu/qwen-bailian-usagetraces-anon/"
_QWEN_PINNED = _QWEN + "0b4273a1d8a83935b9d9356e78f95c31f2ac64cf/"

PUBLIC = {
    trace.name: trace
    for trace in (
        Public(
            "mooncake-conversation", _MOONCAKE + "conversation_trace.jsonl", "Apache-2.0", "Mooncake, FAST'25",
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df", FROM_FILE,
        ),
        Public("mooncake-toolagent", _MOONCAKE + "toolagent_trace.jsonl", "Apache-2.0", "Mooncake, FAST'25"),
        Public(
            "azure-2023-conv", _AZURE + "AzureLLMInferenceTrace_conv.csv", "CC-BY-4.0", "Azure, Splitwise, ISCA'24",
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8", FROM_FILE,
        ),
        Public("azure-2023-code", _AZURE + "AzureLLMInferenceTrace_code.csv", "CC-BY-4.0", "Azure, Splitwise, ISCA'24"),
        Public("azure-2024-code", _AZURE_2024 + "AzureLLMInferenceTrace_code_1week.csv", "CC-BY-4.0", "Azure, 2024"),
        Public(
            "burstgpt-1", _BURSTGPT + "BurstGPT_1.csv", "CC-BY-4.0", "BurstGPT, first two months",
            "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122", FROM_POINTER,
        ),
        Public(
            "burstgpt-3", "https://github.com/HPMLL/BurstGPT/releases/download/v2.0/BurstGPT_3.csv", "CC-BY-4.0",
            "BurstGPT, with Session ID",
        ),
        Public("qwen-bailian-a", _QWEN + "main/qwen_traceA_blksz_16.jsonl", "Apache-2.0", "Qwen-Bailian, ATC'25, to-C"),
        Public("qwen-bailian-b", _QWEN + "main/qwen_traceB_blksz_16.jsonl", "Apache-2.0", "Qwen-Bailian, ATC'25, to-B"),
        Public(
            "qwen-bailian-thinking", _QWEN_PINNED + "qwen_thinking_blksz_16.jsonl", "Apache-2.0", "Qwen-Bailian",
            "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906", FROM_POINTER,
        ),
        Public(
            "qwen-bailian-coder", _QWEN_PINNED + "qwen_coder_blksz_16.jsonl", "Apache-2.0", "Qwen-Bailian",
            "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff", FROM_POINTER,
        ),
    )
}  # fmt: skip


def find(name: str) -> Public:
    """A public trace by name. Raises TraceError, naming those there are, for another."""
    if name not in PUBLIC:
        near = difflib.get_close_matches(name, PUBLIC, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TraceError(f"trace {name!r}: no public trace of that name is known; {hint}known: {', '.join(PUBLIC)}")
    return PUBLIC[name]


def expected_sum(trace: Public, given: str | None) -> str:
    """The sha256 that the file must have: the one given, else the known one. Raises TraceError without one."""
    if given is None:
        if trace.sha256 is None:
            raise TraceError(
                f"trace {trace.name}: its sha256 is not known here, so a wrong file would not be noticed; give the one "
                f"that you expect with --sha256 (source: {trace.url})"
            )
        return trace.sha256
    if not re.fullmatch(r"[0-9a-fA-F]{64}", given):
        raise TraceError(f"--sha256 = {given!r}: must be 64 hexadecimal digits, as sha256sum prints them")
    return given.lower()


def fetch(url: str, sha256: str, out: Path) -> int:
    """Download a file to ``out``, in one piece or not at all, whatever interrupts it. Returns its bytes.

    sha256: what its content must be, so http will do as well as https. Raises TraceError when out exists, the download
    fails, or the content is another.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise TraceError(f"{url}: not an address to fetch from; give one that begins with https://")
    check_target(out, "remove it, or name another file with --out")
    partial = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            found, size = _download(url, file)
        if found != sha256:
            raise TraceError(
                f"{url}: the sha256 of its {size} bytes is {found}, expected {sha256}: another file, or a damaged one; "
                "nothing was kept"
            )
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return size


def _download(url: str, file: BinaryIO) -> tuple[str, int]:
    """The body of ``url`` into ``file``; its sha256 and its length in bytes."""
    digest, size = hashlib.sha256(), 0
    remedy = "look at the network, or give another address with --url"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            announced = answer.headers.get("Content-Length")
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
    except urllib.error.HTTPError as error:
        raise TraceError(f"{url}: the server answered {error.code} {error.reason}; {remedy}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error
        raise TraceError(f"{url}: cannot be fetched ({reason}); {remedy}") from None
    if announced is not None and size < int(announced):
        raise TraceError(f"{url}: the connection ended after {size} of {announced} bytes; try again")
    return digest.hexdigest(), size
