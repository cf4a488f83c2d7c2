"""Reading a workload file in any known format."""

from pathlib import Path

from agentjax.errors import closest, complaint, shown
from agentjax.workloads.jsonl import read_jsonl, records
from agentjax.workloads.llmservingsim import read_llmservingsim
from agentjax.workloads.program import Program

READERS = {"native": read_jsonl, "llmservingsim": read_llmservingsim}
_MARKS = {
    "native": {"program", "calls", "stages"},
    "llmservingsim": {"sub_requests", "input_toks", "output_toks"},
}


def read_programs(path: str | Path, format: str = "auto") -> list[Program]:
    """Read the programs of a file, `format` being native, llmservingsim, or auto (told by the first line)."""
    if format == "auto":
        format = _format(path)
    if format not in READERS:
        raise complaint(f"{path}, format", shown(format), closest(format, ("auto", *READERS)))
    return READERS[format](path)


def _format(path: str | Path) -> str:
    where, record = next(records(path))
    for format, marks in _MARKS.items():
        if marks & record.keys():
            return format
    fields = ", ".join(sorted(record)) or "none"
    raise complaint(
        where, f"the fields {fields}", "program and calls (native) or sub_requests (LLMServingSim)"
    )
