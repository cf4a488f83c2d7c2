"""The results of a grid as one labelled dataset."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentjax.energy import ENERGY
from agentjax.metrics import LOAD_REGIMES, SUMMARIES
from agentjax.results import Record
from agentjax.sweep.grid import Axis

if TYPE_CHECKING:
    import xarray as xr

_WORDS = {
    "jct": "job completion time",
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "queue_delay": "release of a call to its first scheduling",
    "e2e": "release of a call to its last token",
}
_SUFFIXES = {"mean": "mean", "p50": "median", "p95": "95th percentile", "p99": "99th percentile"}
_ITL_SUFFIXES = {**_SUFFIXES, "max": "longest"}
_OTHERS = {
    "throughput": ("completed programs over makespan", "programs/s"),
    "hit_rate": ("prompt tokens found in the prefix cache", "1"),
    "preemptions": ("preempted calls", "1"),
    "utilization": ("share of the makespan that a replica spends in iterations", "1"),
    "makespan": ("first arrival to last completion", "s"),
    "completed": ("programs completed", "1"),
    "queue_share": ("share of the calls' time in the system spent waiting to be scheduled", "1"),
    "backlog_growth": ("waiting calls late against early in the arrival window", "1"),
    "load_regime": ("load regime of the run", ""),
    "status": ("0 where the run completed", "1"),
}


def build_cube(axes: Sequence[Axis], records: Sequence[Record], attrs: Mapping[str, Any]) -> "xr.Dataset":
    """The dataset of a grid: one dimension per axis, one variable per metric, units and names in the
    attributes.

    Args:
        axes: the axes of the grid.
        records: results of the points, row by row; energy and cost are NaN where a point has none.
        attrs: attributes of the dataset.
    """
    import xarray as xr

    shape = tuple(len(axis.values) for axis in axes)
    dims = tuple(axis.name for axis in axes)
    variables: dict[str, Any] = {}
    programs = max(len(record["jct"]) for record in records)
    jct = np.full((len(records), programs), np.nan)
    for row, record in enumerate(records):
        jct[row, : len(record["jct"])] = record["jct"]
    names = [f"{metric}_{suffix}" for metric in _WORDS for suffix in SUMMARIES]
    optional = [*ENERGY, *(f"itl_{suffix}" for suffix in _ITL_SUFFIXES)]
    known = [name for name in optional if any(name in record for record in records)]
    for name in [*names, *_OTHERS, *known]:
        unknown = {name: np.nan} if name in optional else {}
        values = np.array([(unknown | record)[name] for record in records])
        if name == "load_regime":
            values = np.array([LOAD_REGIMES.index(value) for value in values], np.int8)
        variables[name] = (dims, values.reshape(shape), _describe(name))
    variables["jct"] = (
        (*dims, "program"),
        jct.reshape(*shape, programs),
        {"long_name": "job completion time of each program", "units": "s"},
    )
    coords: dict[str, Any] = {
        axis.name: (axis.name, _labels(axis.values), {"config_key": axis.key}) for axis in axes
    }
    coords["program"] = ("program", np.arange(programs), {"long_name": "program, in order of the workload"})
    return xr.Dataset(variables, coords, dict(attrs))


def _describe(name: str) -> dict[str, Any]:
    metric, _, suffix = name.rpartition("_")
    if metric in _WORDS and suffix in _SUFFIXES:
        return {"long_name": f"{_SUFFIXES[suffix]} {_WORDS[metric]}", "units": "s"}
    if metric == "itl":
        return {"long_name": f"{_ITL_SUFFIXES[suffix]} time between two tokens of a call", "units": "s"}
    long_name, units = (_OTHERS | ENERGY)[name]
    if name == "load_regime":  # the conventions of CF for a variable of named states
        return {"long_name": long_name, "flag_values": [0, 1, 2], "flag_meanings": " ".join(LOAD_REGIMES)}
    return {"long_name": long_name, "units": units} if units else {"long_name": long_name}


def _labels(values: Sequence[Any]) -> np.ndarray:
    if all(isinstance(value, bool) for value in values):
        return np.array(values)
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return np.array(values, np.int64)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return np.array(values, np.float64)
    return np.array([str(value) for value in values], np.dtypes.StringDType())
