"""Reading a workload file in any known format."""

from pathlib import Path

from agentjax.errors import closest, complaint, shown
from agentjax.readers import read_recording
from agentjax.workloads.jsonl import read_jsonl, records
from agentjax.workloads.llmservingsim import read_llmservingsim
from agentjax.workloads.program import Program, check_program
from agentjax.workloads.recorded import recorded_programs


def read_recorded(path: str | Path) -> list[Program]:
    """The programs that `agentjax.bench` has played, with the arrivals, lengths and tool gaps it recorded."""
    programs = list(recorded_programs(read_recording(path, "native")).programs)
    for program in programs:
        check_program(program, f"{path}, program {program.name!r}")
    return programs


READERS = {"native": read_jsonl, "llmservingsim": read_llmservingsim, "recording": read_recorded}
_MARKS = {
    "native": {"program", "calls", "stages"},
    "llmservingsim": {"sub_requests", "input_toks", "output_toks"},
    "recording": {"agentjax_bench"},
}


def read_programs(path: str | Path, format: str = "auto") -> list[Program]:
    """Read the programs of a file, `format` being one of `READERS`, or auto (told by the first line)."""
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
        where,
        f"the fields {fields}",
        "program and calls (native), sub_requests (LLMServingSim) or a recording",
    )
