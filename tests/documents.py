"""The commands and snippets that the documents show, in their order, to the letter."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [ROOT / "README.md"]
    + [path for folder in ("docs", "sweeps", "calibration") for path in (ROOT / folder).rglob("*.md")]
)
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
HELP = sorted((ROOT / "conf").glob("*.yaml"))

_PROGRAM = re.compile(r"(\S*/)?(python3?|pip) ")
_INLINE = re.compile(r"`(python \S+\.py[^`\n]*)`")


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Fenced and indented blocks: their language ("" for none) and lines."""
    language, lines, fenced = "", [], False
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            if lines:
                yield language, lines
            fenced, language, lines = not fenced, "" if fenced else line[3:].strip(), []
        elif fenced:
            lines.append(line)
        elif line.startswith("    "):
            lines.append(line[4:])
        elif lines:
            yield "", lines
            lines = []


def shell_commands(text: str) -> Iterator[str]:
    """Commands of a text: those of its blocks, line by line, and scripts named in its prose."""
    for language, lines in blocks(text):
        if language in ("", "bash", "sh"):
            for line in "\n".join(lines).replace("\\\n", " ").splitlines():
                for part in line.partition("  #")[0].split(" && "):
                    command = " ".join(part.removesuffix("&").split())
                    if _PROGRAM.match(command):
                        yield command
    yield from _INLINE.findall(text)


def commands() -> list[str]:
    """All commands: of the documents, of the benchmarks' own words, and of what `--help` prints."""
    found = [command for path in DOCUMENTS for command in shell_commands(path.read_text("utf-8"))]
    for path in BENCHMARKS:
        found += shell_commands(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
    for path in HELP:
        shown = yaml.safe_load(path.read_text("utf-8"))["hydra"]["help"]
        _, _, examples = shown["template"].partition("examples:\n")
        lines = examples.partition("\n\n")[0].splitlines()
        found += [line.strip().replace("${hydra.help.app_name}", shown["app_name"]) for line in lines]
    return list(dict.fromkeys(found))


def snippets(path: Path) -> list[str]:
    """The Python snippets of a document."""
    return ["\n".join(lines) for language, lines in blocks(path.read_text("utf-8")) if language == "python"]
