"""Reading a recording in any known format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentjax.errors import InputError, among, complaint, shown
from agentjax.readers.aiperf import read_aiperf
from agentjax.readers.files import parse, read_bytes
from agentjax.readers.guidellm import read_guidellm
from agentjax.readers.native import HEADER, read_native
from agentjax.readers.vllm import MARKS, read_vllm
from agentjax.records import Recording

READERS: dict[str, Callable[[str | Path], Recording]] = {
    "native": read_native,
    "vllm": read_vllm,
    "guidellm": read_guidellm,
    "aiperf": read_aiperf,
}
_KNOWN = "a recording of agentjax.bench, vllm bench serve, guidellm or aiperf"


def read_recording(path: str | Path, format: str = "auto") -> Recording:
    """Read the requests that a benchmark client recorded.

    Args:
        path: the file, plain or gzip.
        format: native (`agentjax.bench`), vllm, guidellm, aiperf, or auto: told by the fields.

    Returns:
        The requests in order of sending, warm-up and failed ones included; `about` has the tool, the file
        and, where known, version, model and url. In files of other tools times count from the first sending.

    Raises:
        InputError: one sentence with file, line or index, and field.
    """
    if format == "auto":
        format = _format(path)
    if format not in READERS:
        raise complaint("format", shown(format), among(format, ("auto", *READERS)))
    return READERS[format](path)


def _format(path: str | Path) -> str:
    content = read_bytes(path)
    if not content.strip():
        raise complaint(str(path), "an empty file", _KNOWN)
    document = _first_object(content, str(path))
    if HEADER in document or {"request", "sent_s"} <= document.keys():
        return "native"
    if {"metadata", "metrics"} <= document.keys():
        return "aiperf"
    if "benchmarks" in document:
        return "guidellm"
    if MARKS & document.keys():
        return "vllm"
    if "aiperf_version" in document:
        raise complaint(str(path), "the summary of an AIPerf run", "its profile_export.jsonl")
    fields = ", ".join(sorted(document)[:8]) or "none"
    raise complaint(str(path), f"the fields {fields}", _KNOWN)


def _first_object(content: bytes, where: str) -> dict[str, Any]:
    """The object on the first line, or the one that the whole file is."""
    first = content.lstrip().partition(b"\n")[0]
    try:
        return parse(first, f"{where}, line 1")
    except InputError as error:
        try:
            return parse(content, where)
        except InputError as whole:
            raise (whole if first.strip() in (b"{", b"[") else error) from None
