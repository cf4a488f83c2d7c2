"""Which axes a grid can have, and which configuration each point gets."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from agentjax.cluster import Cluster
from agentjax.config import run_command
from agentjax.config.compose import Groups, plain
from agentjax.errors import InputError
from agentjax.policies import Policy
from agentjax.sweep import sweep
from agentjax.sweep.command import _baseline, _published
from agentjax.sweep.grid import Grid, check_values, expand, labels_of, make_axes
from agentjax.workloads import swebench
from tests.stub_engine import stub_stream_lanes


def expanded(*arguments: str) -> Grid:
    """The grid that a command line asks for."""
    found: list[Grid] = []

    def task(config: Any, line: Any) -> None:
        found.append(expand(plain(config), line.axes, Groups(line.overrides), lambda point: point))

    assert run_command(task, "sweep", arguments, has_grid=True) == 0
    return found[0]


def test_the_published_grid():
    grid = expanded("grid=retention_x_sched")
    assert [axis.name for axis in grid.axes] == ["retention", "scheduling", "seed"]
    assert grid.shape[:2] == (3, 2)
    assert grid.shape[2] >= 8
    assert len(grid.configs) == grid.shape[0] * grid.shape[1] * grid.shape[2]
    assert grid.configs[0]["workload"]["rate"] == 0.02
    assert grid.configs[-1]["retention"] == {"name": "pressure_ttl", "tau_s": 2.0, "low": 0.7, "high": 0.9}
    assert grid.configs[-1]["scheduling"]["name"] == "plas"


def test_plus_grid_means_the_same():
    assert expanded("+grid=retention_x_sched") == expanded("grid=retention_x_sched")


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("grid.axes.retention=[lru,ttl]", ("lru", "ttl")),
        ("+grid.axes.retention=[lru,ttl]", ("lru", "ttl")),
        ("grid.axes.retention=lru,ttl", ("lru", "ttl")),
        ("grid.axes.retention=ttl", ("ttl",)),
        ("grid.axes.workload.seed=range(3)", (0, 1, 2)),
        ("grid.axes.seed=[0,1,2]", (0, 1, 2)),
        ("grid.axes.cluster.kv_blocks=[3586,7173]", (3586, 7173)),
        ("grid.axes.workload.rate=[0.02,0.1]", (0.02, 0.1)),
    ],
)
def test_axes_from_the_command_line(argument: str, values: tuple):
    assert expanded(argument).axes[0].values == values


def test_the_command_line_replaces_and_removes_axes():
    grid = expanded("grid=retention_x_sched", "grid.axes.workload.seed=[5]", "~grid.axes.scheduling")
    assert [(axis.key, axis.values) for axis in grid.axes] == [
        ("retention", ("lru", "ttl", "pressure_ttl")),
        ("workload.seed", (5,)),
    ]
    assert {config["workload"]["seed"] for config in grid.configs} == {5}


def test_values_of_the_command_line_reach_the_options_that_have_the_key():
    grid = expanded("grid.axes.retention=[lru,ttl,pressure_ttl]", "retention=ttl", "retention.tau_s=7")
    assert [config["retention"].get("tau_s") for config in grid.configs] == [None, 7, 7]


def test_an_axis_leaves_options_alone_that_lack_the_key():
    grid = expanded("grid.axes.retention=[lru,ttl]", "grid.axes.tau=[1,5]")
    assert [axis.key for axis in grid.axes] == ["retention", "retention.tau_s"]
    assert [config["retention"].get("tau_s") for config in grid.configs] == [None, None, 1, 5]


def test_any_group_can_be_an_axis():
    for group in ("workload", "cluster", "performance", "retention", "scheduling", "routing", "admission"):

        def task(config: Any, line: Any, group: str = group) -> None:
            options = [option for option in Groups(line.overrides).options(group) if option != "file"]
            grid = expand(plain(config), {group: options}, Groups(line.overrides), lambda point: point)
            assert grid.axes[0].values == tuple(options)

        assert run_command(task, "sweep", [], has_grid=True) == 0


@pytest.mark.parametrize(
    ("arguments", "labels", "has_published"),
    [
        ([], {"retention": "lru", "scheduling": "fcfs"}, True),
        (["grid.axes.workload.seed=[1,2]"], {"retention": "lru", "scheduling": "fcfs"}, True),
        (["~grid.axes.retention"], {"scheduling": "fcfs"}, True),
        (["grid.axes.retention=[ttl,pin]"], {"scheduling": "fcfs"}, True),
        (["workload.rate=0.1"], {"retention": "lru", "scheduling": "fcfs"}, False),
        (["grid.axes.cluster.kv_blocks=[3586]"], {"retention": "lru", "scheduling": "fcfs"}, False),
        (["grid.baseline.scheduling=sjf"], {"retention": "lru", "scheduling": "sjf"}, True),
    ],
)
def test_what_changes_are_measured_against(arguments: list[str], labels: dict, has_published: bool):
    def task(config: Any, line: Any) -> None:
        grid = expand(plain(config), line.axes, Groups(line.overrides), lambda point: point)
        assert _baseline(config, line, grid) == labels
        assert bool(_published(config, line, grid)) == has_published

    assert run_command(task, "sweep", ["grid=retention_x_sched", *arguments], has_grid=True) == 0


def test_points_are_in_row_major_order():
    axes = make_axes({"retention": ["lru", "ttl"], "workload.seed": [0, 1]})
    assert list(labels_of(axes)) == [
        {"retention": "lru", "workload.seed": 0},
        {"retention": "lru", "workload.seed": 1},
        {"retention": "ttl", "workload.seed": 0},
        {"retention": "ttl", "workload.seed": 1},
    ]


def test_dimension_names_are_short_where_they_are_clear():
    axes = make_axes({"retention.tau_s": [1], "workload.seed": [0], "x.seed": [1], "a.program": [1]})
    assert [axis.name for axis in axes] == ["tau_s", "workload.seed", "x.seed", "a.program"]


@pytest.mark.parametrize("values", [[], {"a": 1}, [[1]], [1, 1], None])
def test_values_that_are_no_list_of_distinct_scalars(values: Any):
    with pytest.raises(InputError, match=r"grid axis 'retention\.tau_s'"):
        check_values("retention.tau_s", values)


WORKLOAD: Callable[..., Any] = functools.partial(swebench, programs=3, calls_median=3.0, calls_max=5)


def test_axes_over_objects():
    cube = sweep(
        WORKLOAD,
        Cluster(),
        Policy(retention="ttl"),
        grid={
            "retention": ["lru", "ttl"],
            "tau": [1, 2, 5],
            "cluster.kv_blocks": [4000, 7173],
            "scheduling": ["fcfs", "plas"],
            "seed": range(2),
        },
        stream_lanes=stub_stream_lanes,
    )
    assert dict(cube.sizes) == {
        "retention": 2,
        "tau_s": 3,
        "kv_blocks": 2,
        "scheduling": 2,
        "seed": 2,
        "program": 3,
    }
    assert cube.attrs["seeds"] == [0, 1]
    lru = cube.jct_mean.sel(retention="lru", scheduling="plas", seed=1, kv_blocks=7173)
    assert lru.values.min() == lru.values.max()  # tau does not apply
    assert cube.jct_mean.attrs["units"] == "s"


def test_axes_over_labelled_objects():
    clusters = {"one": Cluster(), "two": Cluster(replicas=2)}
    cube = sweep(WORKLOAD(0), Cluster(), Policy(), grid={"cluster": clusters}, stream_lanes=stub_stream_lanes)
    assert cube.cluster.values.tolist() == ["one", "two"]


def test_equal_configurations_are_simulated_once():
    lanes: list[int] = []

    def counting(workloads: Any, specs: Any, **keywords: Any) -> Any:
        lanes.append(len(specs))
        yield from stub_stream_lanes(workloads, specs, **keywords)

    grid = {"retention": ["lru", "ttl"], "tau": [1, 2, 5]}
    sweep(WORKLOAD(0), Cluster(), Policy(), grid=grid, stream_lanes=counting)
    assert sum(lanes) == 1 + 3


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({}, "no axes"),
        ({"retention": ["tll"]}, "closest: ttl"),
        ({"retnetion": ["ttl"]}, "closest: retention"),
        ({"retention": []}, "an empty list"),
        ({"kv_block": [1]}, "cluster.kv_blocks"),
        ({"seed": [1]}, "a function of the seed"),
        ({"cluster": [Cluster()]}, "a mapping from labels to objects"),
        ({"kv_blocks": [0]}, "kv_blocks"),
    ],
)
def test_objects_that_cannot_be_swept(grid: dict, words: str):
    with pytest.raises(InputError, match=words):
        sweep(WORKLOAD(0), Cluster(), Policy(), grid=grid, stream_lanes=stub_stream_lanes)


def test_a_baseline_must_lie_on_the_axes():
    grid = {"retention": ["lru", "ttl"]}
    with pytest.raises(InputError, match=r"grid\.baseline\.retention"):
        sweep(
            WORKLOAD(0),
            Cluster(),
            Policy(),
            grid=grid,
            baseline={"retention": "pin"},
            stream_lanes=stub_stream_lanes,
        )
