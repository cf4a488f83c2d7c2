"""A measured run: the requests that a real engine served, when it served them, and the engine's settings.

A folder with

- `requests.csv`, a request a line: `index`, `input_tokens`, `output_tokens`, `arrival_s` (client's clock),
  `queued_s`, `scheduled_s`, `first_token_s`, `last_token_s` (engine's clock); and, where known,
  `shared_prefix_blocks` and `shared_with_index`: how many whole blocks the prompt has in common with the
  beginning of an earlier prompt, and whose (-1: nobody's);
- `meta.json`: `vllm_meta` with `model`, `vllm_version` and the `engine_kwargs` of the run, which decide how
  it is scheduled (`EngineSettings`, `Measured.vllm`, `Measured.async_scheduling`);
- `timeseries.csv`, optional: `t` (s), `gen_throughput` (tokens/s), `running`, `waiting`, as the engine logged
  them;
- `peer_prediction.json`, optional: the errors that another simulator states for the same run.
"""

import csv
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentjax.cluster import VERSIONS
from agentjax.errors import complaint, expecting, from_validation, shown

_COUNTS = ("index", "input_tokens", "output_tokens")
_TIMES = ("arrival_s", "queued_s", "scheduled_s", "first_token_s", "last_token_s")
_SHARED = ("shared_prefix_blocks", "shared_with_index")
_ENGINE_EVENTS = _TIMES[1:]
_SERIES = ("t", "gen_throughput", "running", "waiting")
_Count = Annotated[int, Field(ge=1), expecting("an integer from 1")]
_Flag = Annotated[bool | None, expecting("null, true or false")]

_ASYNCHRONOUS_SINCE = (0, 14)
"""vLLM's first version that schedules asynchronously where its arguments do not say."""


class EngineSettings(BaseModel):
    """The engine arguments that decide how a run is scheduled; others are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    max_num_seqs: _Count
    max_num_batched_tokens: _Count
    tensor_parallel_size: _Count = 1
    data_parallel_size: _Count = 1
    max_model_len: Annotated[int | None, expecting("null or an integer")] = None
    block_size: Annotated[int | None, Field(ge=1), expecting("null or an integer from 1")] = None
    async_scheduling: _Flag = None
    scheduler_reserve_full_isl: _Flag = None
    watermark: Annotated[float | None, Field(ge=0, lt=1), expecting("null or a share from 0 to 1")] = None
    long_prefill_token_threshold: Annotated[
        int | None, Field(ge=0), expecting("null or an integer from 0")
    ] = None


class _VllmMeta(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: Annotated[str, Field(min_length=1), expecting("a string that is not empty")]
    vllm_version: Annotated[str, Field(min_length=1), expecting("a string that is not empty")]
    engine_kwargs: EngineSettings


class _Meta(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    hardware: Annotated[str, expecting("a string")] = "unknown hardware"
    vllm_meta: _VllmMeta


@dataclass(frozen=True)
class Series:
    """What the engine logged, tick by tick."""

    time_s: Float[np.ndarray, " ticks"]
    generation_tokens_per_s: Float[np.ndarray, " ticks"]
    running: Float[np.ndarray, " ticks"]
    waiting: Float[np.ndarray, " ticks"]


@dataclass(frozen=True)
class Measured:
    """A measured run; requests in order of `index`, times in s from the first arrival."""

    name: str
    hardware: str
    model: str
    engine: str
    vllm_version: str
    settings: EngineSettings
    index: Int[np.ndarray, " requests"]
    input_tokens: Int[np.ndarray, " requests"]
    output_tokens: Int[np.ndarray, " requests"]
    arrival_s: Float[np.ndarray, " requests"]
    queued_s: Float[np.ndarray, " requests"]
    scheduled_s: Float[np.ndarray, " requests"]
    first_token_s: Float[np.ndarray, " requests"]
    last_token_s: Float[np.ndarray, " requests"]
    shared_blocks: Int[np.ndarray, " requests"]  # whole blocks of the prompt that an earlier prompt has
    shared_with: Int[np.ndarray, " requests"]  # row of that prompt, -1: none
    series: Series | None
    peer_error_pct: Mapping[str, float]
    """Errors that another simulator states, by metric (`ttft_mean`, ...); empty where none are known."""
    peer_source: str

    @property
    def vllm(self) -> str:
        """Whose rules the engine scheduled by, as `Cluster.vllm` names them. Versions before 0.19 stand with
        it; a version that cannot be read, and any newer one, with the newest."""
        version = _version(self.vllm_version)
        known = [each for each in VERSIONS if version is None or (_version(each) or ()) <= version]
        return known[-1] if known else VERSIONS[0]

    @property
    def async_scheduling(self) -> bool:
        """Whether the engine scheduled asynchronously: as its arguments say, else by default, since 0.14."""
        if self.settings.async_scheduling is not None:
            return self.settings.async_scheduling
        version = _version(self.vllm_version)
        return version is None or version >= _ASYNCHRONOUS_SINCE


def read_measured(folder: str | Path) -> Measured:
    """Read and check a measured run.

    Raises:
        InputError: a missing folder, file, column or field, or a value that cannot be; names the place.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise complaint(str(folder), "no such folder", "a folder with requests.csv and meta.json")
    meta = _meta(folder / "meta.json")
    columns = _requests(folder / "requests.csv")
    series = folder / "timeseries.csv"
    peer, source = _peer(folder / "peer_prediction.json")
    vllm = meta.vllm_meta
    return Measured(
        name=folder.resolve().name,
        hardware=meta.hardware,
        model=vllm.model,
        engine=f"vLLM {vllm.vllm_version}",
        vllm_version=vllm.vllm_version,
        settings=vllm.engine_kwargs,
        series=_series(series) if series.is_file() else None,
        peer_error_pct=peer,
        peer_source=source,
        **columns,
    )


def _version(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as 0.19.0, v0.19.1 or 0.20.0rc1.dev3; None: it does not say."""
    found = re.match(r"v?(\d+)\.(\d+)", text.strip())
    return None if found is None else (int(found[1]), int(found[2]))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or "an unreadable file"
        raise complaint(str(path), reason[0].lower() + reason[1:], "a file of a measured run") from None
    except UnicodeDecodeError:
        raise complaint(str(path), "bytes that are not UTF-8", "text") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise complaint(f"{path}, line {error.lineno}", "text that is not JSON", error.msg) from None


def _meta(path: Path) -> _Meta:
    content = _json(path)
    try:
        return _Meta.model_validate(content)
    except ValidationError as error:
        raise from_validation(error, str(path), {}) from None


def _table(path: Path, needed: tuple[str, ...]) -> tuple[list[str], list[tuple[str, dict[str, str]]]]:
    """Names of the columns, and the rows with the place of each."""
    reader = csv.DictReader(_text(path).splitlines())
    names = list(reader.fieldnames or ())
    for name in needed:
        if name not in names:
            raise complaint(f"{path}, line 1", f"no column {name}", f"the columns {', '.join(needed)}")
    rows = []
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if None in row or None in row.values():
            raise complaint(where, "another number of values than columns", f"{len(names)} values")
        rows.append((where, row))
    if not rows:
        raise complaint(str(path), "no rows", "at least one")
    return names, rows


def _number(where: str, row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise complaint(f"{where}, {name}", shown(row[name]), "a number")
    return value


def _integer(where: str, row: dict[str, str], name: str, least: int) -> int:
    value = _number(where, row, name)
    if value != int(value) or not least <= value < 2**31:
        raise complaint(f"{where}, {name}", shown(row[name]), f"an integer from {least}")
    return int(value)


def _requests(path: Path) -> dict[str, np.ndarray]:
    names, rows = _table(path, (*_COUNTS, *_TIMES))
    has_shared = all(name in names for name in _SHARED)
    records = []
    for where, row in rows:
        index, prompt, output = (
            _integer(where, row, name, least) for name, least in zip(_COUNTS, (0, 1, 1), strict=True)
        )
        times = [_number(where, row, name) for name in _TIMES]
        _check_order(where, dict(zip(_TIMES, times, strict=True)))
        blocks, donor = (
            (_integer(where, row, _SHARED[0], 0), _integer(where, row, _SHARED[1], -1))
            if has_shared
            else (0, -1)
        )
        records.append((where, index, prompt, output, *times, blocks, donor))
    place_of: dict[int, str] = {}
    for where, index, *_ in records:
        if index in place_of:
            raise complaint(f"{where}, index", str(index), f"another one than {place_of[index]}")
        place_of[index] = where
    for where, index, *_, blocks, donor in records:
        if blocks and (donor not in place_of or donor == index):
            raise complaint(f"{where}, shared_with_index", str(donor), "the index of another request")
    records.sort(key=lambda record: record[1])
    row_of = {record[1]: row for row, record in enumerate(records)}
    columns = list(zip(*(record[1:] for record in records), strict=True))
    counts = dict(zip(_COUNTS, (np.asarray(column) for column in columns), strict=False))
    times = {name: np.asarray(columns[3 + k], float) for k, name in enumerate(_TIMES)}
    shared = {
        "shared_blocks": np.asarray(columns[-2]),
        "shared_with": np.asarray(
            [row_of[donor] if blocks else -1 for blocks, donor in zip(*columns[-2:], strict=True)]
        ),
    }
    return counts | times | shared


def _check_order(where: str, times: dict[str, float]) -> None:
    """The events of a request follow each other; the client's clock is another one and is not compared."""
    for before, after in itertools.pairwise(_ENGINE_EVENTS):
        if times[after] < times[before]:
            raise complaint(f"{where}, {after}", f"{times[after]:g}", f"at least {before}, {times[before]:g}")


def _series(path: Path) -> Series:
    _, rows = _table(path, _SERIES)
    columns = [np.asarray([_number(where, row, name) for where, row in rows]) for name in _SERIES]
    return Series(*columns)


def _peer(path: Path) -> tuple[dict[str, float], str]:
    """Stated errors by our names of the metrics, and where they are stated."""
    if not path.is_file():
        return {}, ""
    content = _json(path)
    metrics = content.get("metrics") if isinstance(content, dict) else None
    if not isinstance(metrics, dict):
        raise complaint(f"{path}, metrics", shown(metrics), "an object of metrics")
    errors: dict[str, float] = {}
    for name, values in metrics.items():
        error = values.get("diff_pct") if isinstance(values, dict) else None
        if isinstance(error, bool) or not isinstance(error, int | float):
            raise complaint(f"{path}, metrics.{name}.diff_pct", shown(error), "a number of per cent")
        ours = name.removesuffix("_ms").replace("latency", "e2e").replace("median", "p50")
        errors[ours] = float(error)
    return errors, str(content.get("source", path.name))
