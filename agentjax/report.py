"""Tables and sentences about a cube."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentjax.errors import complaint, shown
from agentjax.metrics import LOAD_REGIMES
from agentjax.statistics import Interval, change_percent, mean_interval

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console, Group
    from rich.table import Table

_MOST_ROWS = 40
_LEVELS = {"jct_mean": "mean JCT", "jct_p50": "median", "jct_p95": "p95", "jct_p99": "p99"}


@dataclass(frozen=True)
class Row:
    """One configuration of a cube, over its seeds.

    Attributes:
        labels: its place along the axes other than seeds.
        jct_mean: mean job completion time, s.
        change: change of the mean job completion time against the baseline, %, paired by seed.
        per_seed: the same, seed by seed.
        published: the published change, %, or None.
        hit_rate, preemptions: means over seeds.
        regimes: number of seeds by load regime.
        failed: number of seeds whose run did not complete.
    """

    labels: dict[str, Any]
    jct_mean: Interval
    change: Interval
    per_seed: np.ndarray
    published: float | None
    hit_rate: float
    preemptions: float
    regimes: Counter[str]
    failed: int
    is_baseline: bool


def check_published(published: Mapping[str, Any]) -> None:
    """Refuses published figures in another form than `source`, `note`, `level` and `change_percent`.

    Raises:
        InputError: an unknown key, or a value of the wrong kind.
    """
    for key in published:
        if key not in ("source", "note", "level", "change_percent"):
            expected = "source, note, level or change_percent"
            raise complaint("grid.published", f"an unknown key {key!r}", expected)
    level = published.get("level", {})
    if not isinstance(level, Mapping) or not all(_is_number(level[key]) and key in _LEVELS for key in level):
        raise complaint("grid.published.level", shown(level), f"numbers by name ({', '.join(_LEVELS)})")
    for index, entry in enumerate(published.get("change_percent", [])):
        if not isinstance(entry, Mapping) or not _is_number(entry.get("value")):
            where = f"grid.published.change_percent[{index}]"
            raise complaint(where, shown(entry), "labels of a configuration and its value")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def seed_dims(cube: "xr.Dataset") -> list[str]:
    """Dimensions that repeat a configuration with other random draws."""
    return [
        str(dim)
        for dim in _axes(cube)
        if str(cube[dim].attrs.get("config_key", dim)).rpartition(".")[2] == "seed"
    ]


def baseline(cube: "xr.Dataset") -> dict[str, Any]:
    """Labels of the configuration that changes are measured against: the cube's own, else the first ones."""
    chosen = json.loads(cube.attrs.get("baseline", "{}"))
    return {dim: chosen.get(dim, cube[dim].values[0]) for dim in _axes(cube) if dim not in seed_dims(cube)}


def rows(cube: "xr.Dataset") -> list[Row]:
    """Every configuration of a cube, in the order of its axes."""
    seeds = seed_dims(cube)
    others = [dim for dim in _axes(cube) if dim not in seeds]
    reference = baseline(cube)
    published = json.loads(cube.attrs.get("published", "{}"))
    flat = (
        cube.drop_dims("program").stack(_seed=seeds)
        if seeds
        else cube.drop_dims("program").expand_dims("_seed", -1)
    )
    flat = flat.transpose(*others, "_seed")
    base = flat.jct_mean.sel(reference).values
    out = []
    for labels in _points(cube, others):
        point = flat.sel(labels)
        changes = change_percent(point.jct_mean.values, base)
        out.append(
            Row(
                labels,
                mean_interval(point.jct_mean.values),
                mean_interval(changes),
                changes,
                _published(published, labels),
                _mean(point.hit_rate.values),
                _mean(point.preemptions.values),
                Counter(LOAD_REGIMES[int(value)] for value in np.atleast_1d(point.load_regime.values)),
                int(np.count_nonzero(point.status.values)),
                labels == reference,
            )
        )
    return out


def policy_table(cube: "xr.Dataset", most_rows: int = _MOST_ROWS) -> "Group":
    """Mean JCT, change against the baseline with its interval, published figure and load, row by row."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = rows(cube)
    left_out = max(0, len(found) - most_rows)
    if left_out:
        found = sorted(
            found, key=lambda row: (not row.is_baseline, math.isnan(row.jct_mean.mean), row.jct_mean.mean)
        )[:most_rows]
    has_published = any(row.published is not None for row in found)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for dim in found[0].labels:
        table.add_column(dim, no_wrap=True)
    headers = [
        "mean\nJCT, s",
        "change\n%",
        *(["pub-\nlished"] if has_published else []),
        "hits\n%",
        "preemp-\ntions",
    ]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("load", overflow="fold")
    for row in found:
        cells = [str(value) for value in row.labels.values()]
        cells += [_digits(row.jct_mean.mean), _change(row)]
        if has_published:
            cells.append("" if row.published is None else f"{row.published:+.1f}")
        load = load_text(row.regimes) + (f", {row.failed} failed" if row.failed else "")
        cells += [f"{100 * row.hit_rate:.1f}", f"{row.preemptions:.1f}", load]
        table.add_row(*cells, style="bold" if row.is_baseline else None)
    name = label(baseline(cube))
    caption = f"change of the mean JCT against {name}, same seed"
    if any(not math.isnan(row.change.low) for row in found):
        caption += f": mean over {_seeds_text(cube)} ± half the 95 % interval (Student t)"
    caption += f"; {left_out} more in the cube" if left_out else ""
    return Group(Text(title(cube), style="italic"), table, Text(caption, style="dim"))


def level_sentence(cube: "xr.Dataset") -> str | None:
    """The baseline's level beside the published one; None where nothing is published for the cube."""
    published = json.loads(cube.attrs.get("published", "{}"))
    level = published.get("level")
    if not level:
        return None
    point = cube.sel(baseline(cube))
    parts = []
    for name, value in level.items():
        interval = mean_interval(np.atleast_1d(point[name].values).ravel())
        bounds = "" if math.isnan(interval.low) else f" [{_seconds(interval.low)}, {_seconds(interval.high)}]"
        off = 100 * (interval.mean / value - 1)
        parts.append(
            f"{_LEVELS[name]} {_seconds(interval.mean)}{bounds} against {_seconds(value)} ({off:+.0f} %)"
        )
    name = label(baseline(cube))
    note = f" ({published['note']})" if published.get("note") else ""
    return (
        f"Level of {name} against {published.get('source', 'the published one')}{note}: "
        + "; ".join(parts)
        + "."
    )


def label(labels: Mapping[str, Any]) -> str:
    """A configuration in words: option names as they are, numbers with the name of their axis."""
    parts = [value if isinstance(value, str) else f"{dim} {value}" for dim, value in labels.items()]
    return " + ".join(parts) or "the only configuration"


def load_text(regimes: Counter[str]) -> str:
    """The most frequent load regime, with its share of the runs where there are several."""
    (name, count), *others = sorted(regimes.items(), key=lambda item: (-item[1], item[0]))
    return f"{name} {count}/{regimes.total()}" if others else name


def title(cube: "xr.Dataset") -> str:
    """Workload, pool and seeds of a cube in one line."""
    parts = [part for part in (cube.attrs.get("title", ""), _seeds_text(cube)) if part]
    return ", ".join(parts)


def run_table(values: Mapping[str, Any], heading: str) -> "Table":
    """The service metrics of one run."""
    from rich.table import Table

    table = Table(title=heading, title_justify="left")
    for header in ("", "mean", "median", "p95", "p99"):
        table.add_column(header, justify="left" if not header else "right")
    for name, words in (
        ("jct", "JCT"),
        ("ttft", "TTFT"),
        ("tpot", "TPOT"),
        ("itl", "ITL"),
        ("queue_delay", "queue delay"),
        ("e2e", "e2e"),
    ):
        if f"{name}_mean" not in values:
            continue
        unit = 1e3 if name in ("tpot", "itl") else 1.0
        cells = [float(values[f"{name}_{suffix}"]) * unit for suffix in ("mean", "p50", "p95", "p99")]
        table.add_row(f"{words} ({'s' if unit == 1.0 else 'ms'})", *(_digits(cell) for cell in cells))
    return table


def _change(row: Row) -> str:
    if row.is_baseline:
        return ""
    if math.isnan(row.change.mean):
        return "-"
    half = (row.change.high - row.change.low) / 2
    return f"{row.change.mean:+.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}")


def _axes(cube: "xr.Dataset") -> list[str]:
    return [str(dim) for dim in cube.jct_mean.dims]


def _points(cube: "xr.Dataset", dims: Sequence[str]) -> Iterator[dict[str, Any]]:
    for labels in itertools.product(*(cube[dim].values.tolist() for dim in dims)):
        yield dict(zip(dims, labels, strict=True))


def _published(published: Mapping[str, Any], labels: Mapping[str, Any]) -> float | None:
    for entry in published.get("change_percent", []):
        if {key: value for key, value in entry.items() if key != "value"} == dict(labels):
            return float(entry["value"])
    return None


def _mean(values: np.ndarray) -> float:
    values = np.asarray(values, float)
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


def _seeds_text(cube: "xr.Dataset") -> str:
    count = math.prod(cube.sizes[dim] for dim in seed_dims(cube))
    return f"{count} seed{'s' if count != 1 else ''}"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{_digits(value)} s"


def make_console() -> "Console":
    """A console as wide as the terminal; wide enough for the tables where the output goes to a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=110)


def _digits(value: float) -> str:
    """Four significant digits, thousands separated."""
    if math.isnan(value):
        return "-"
    size = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(size, 4)}f}"
