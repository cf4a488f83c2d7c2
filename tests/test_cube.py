"""The dataset of a grid: labels, units, what is on disk, and the tables made of it.

Most tests look at one small cube. All tiles that are simulated here have 4 lanes: one compilation does.
"""

import functools
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agentjax.cluster import Cluster
from agentjax.energy import ENERGY
from agentjax.errors import InputError
from agentjax.metrics import LOAD_REGIMES, SUMMARIES
from agentjax.performance import Affine, read_device
from agentjax.plotting import change_figure, jct_figure, save_figure
from agentjax.policies import Policy
from agentjax.report import check_published, level_sentence, load_text, policy_table, rows
from agentjax.store import save_dataset, tree_digest
from agentjax.sweep import open_cube, sweep
from agentjax.workloads import Call, Program, swebench
from tests.stub_engine import stub_stream_lanes

WORKLOAD = functools.partial(swebench, programs=4, calls_median=3.0, calls_max=5)
GRID = {"retention": ["lru", "ttl"], "scheduling": ["fcfs", "plas"], "seed": [3, 5, 8]}


def made(lanes_per_tile: int = 4, **keywords: Any) -> Any:
    """A small cube."""
    return sweep(WORKLOAD, Cluster(), Policy(), grid=GRID, lanes_per_tile=lanes_per_tile, **keywords)


@pytest.fixture(scope="module")
def cube() -> Any:
    return made()


def test_every_metric_is_there_with_unit_and_name(cube: Any):
    for metric in ("jct", "ttft", "tpot", "queue_delay", "e2e"):
        for suffix in SUMMARIES:
            variable = cube[f"{metric}_{suffix}"]
            assert variable.dims == ("retention", "scheduling", "seed")
            assert variable.attrs["units"] == "s"
            assert variable.attrs["long_name"]
    others = ("throughput", "hit_rate", "preemptions", "utilization", "completed", "status", "load_regime")
    assert all(cube[name].dims == ("retention", "scheduling", "seed") for name in others)
    assert cube.load_regime.attrs["flag_meanings"].split() == list(LOAD_REGIMES)
    assert set(cube.load_regime.values.ravel().tolist()) <= set(cube.load_regime.attrs["flag_values"])
    assert cube.jct.dims == ("retention", "scheduling", "seed", "program")


def test_labels_select(cube: Any):
    one = cube.sel(retention="ttl", scheduling="plas", seed=5)
    assert one.jct_mean.item() == pytest.approx(one.jct.mean().item())
    assert cube.seed.attrs["config_key"] == "workload.seed"
    assert cube.attrs["seeds"] == [3, 5, 8]
    assert (cube.completed == 4).all()
    assert (cube.status == 0).all()


def test_a_point_does_not_depend_on_the_rest_of_the_grid(cube: Any):
    grid = {"scheduling": ["plas"], "retention": ["ttl"], "seed": [8, 5, 2]}
    alone = sweep(WORKLOAD, Cluster(), Policy(), grid=grid)
    place = {"retention": "ttl", "scheduling": "plas", "seed": [5, 8]}
    np.testing.assert_array_equal(
        alone.sel(place).transpose("seed", ...).jct, cube.sel(place).transpose("seed", ...).jct
    )


def test_workloads_of_different_lengths_are_padded_with_nan():
    workload = functools.partial(swebench, 0, calls_median=3.0, calls_max=5)
    cube = sweep(workload, Cluster(), Policy(), grid={"programs": [2, 5, 3, 8]})
    assert cube.jct.notnull().sum("program").values.tolist() == [2, 5, 3, 8]
    assert cube.completed.values.tolist() == [2, 5, 3, 8]


def test_a_tile_reports_what_is_done_of_it():
    shares: list[tuple[float, int]] = []
    workload = functools.partial(swebench, programs=8, calls_median=45.0, calls_max=60)
    sweep(
        workload,
        Cluster(),
        Policy(),
        grid={"seed": range(4)},
        progress=lambda done, total: shares.append((done, total)),
    )
    assert shares[0] == (0, 4)
    assert shares[-1] == (4, 4)
    assert shares == sorted(shares)
    assert any(0 < done < 4 for done, _ in shares)


def test_the_store_is_consolidated_zarr_3_and_reads_back(tmp_path: Path):
    cube = made(out=tmp_path)
    metadata = json.loads((tmp_path / "cube.zarr" / "zarr.json").read_text())
    assert metadata["zarr_format"] == 3
    assert "jct_mean" in metadata["consolidated_metadata"]["metadata"]
    back = open_cube(tmp_path / "cube.zarr")
    assert back.equals(cube)
    assert back.attrs == cube.attrs
    assert back.sel(retention="ttl", scheduling="plas", seed=5).jct_mean.attrs["units"] == "s"


def test_equal_inputs_give_equal_bytes(tmp_path: Path):
    made(out=tmp_path / "a")
    made(out=tmp_path / "b", lanes_per_tile=3)
    assert tree_digest(tmp_path / "a" / "cube.zarr") == tree_digest(tmp_path / "b" / "cube.zarr")


def test_energy_and_cost_where_the_hardware_is_known(cube: Any, tmp_path: Path):
    assert not set(ENERGY) & set(cube)
    gpu = read_device("rtx_pro_6000")
    dearer = gpu.model_copy(update={"price_usd_per_gpu_hour": 2 * gpu.price_usd_per_gpu_hour})
    clusters = {
        "a pair": Cluster(hardware=gpu, gpus=2),
        "a dearer pair": Cluster(hardware=dearer, gpus=2),
        "unknown": Cluster(),
    }
    shares: list[float] = []
    found = sweep(
        WORKLOAD,
        Cluster(),
        Policy(),
        grid={"cluster": clusters, "seed": [3, 5, 8, 13]},
        out=tmp_path,
        progress=lambda done, total: shares.append(total),
    )
    assert shares[-1] == 4  # hardware changes nothing that is simulated
    known, other = found.sel(cluster="a pair"), found.sel(cluster="a dearer pair")
    busy_s = known.utilization * known.makespan
    energy = 2 * (gpu.idle_w * known.makespan + (gpu.tdp_w - gpu.idle_w) * busy_s)
    np.testing.assert_allclose(known.energy_j, energy)
    np.testing.assert_allclose(known.energy_per_program_j, energy / 4)
    tokens = known.energy_j / known.energy_per_token_j
    np.testing.assert_allclose(tokens, np.round(tokens))
    np.testing.assert_allclose(known.cost_usd, 2 * gpu.price_usd_per_gpu_hour * known.makespan / 3600)
    np.testing.assert_allclose(other.cost_per_program_usd, known.cost_usd / 2)
    assert all(found[name].sel(cluster="unknown").isnull().all() for name in ENERGY)
    assert found.energy_j.attrs["units"] == "J"
    assert open_cube(tmp_path / "cube.zarr").equals(found)


def test_saving_replaces_a_store_as_a_whole(cube: Any, tmp_path: Path):
    path = tmp_path / "cube.zarr"
    assert save_dataset(cube, path)
    assert not save_dataset(cube, path)  # the same bytes: left alone
    assert save_dataset(cube.isel(seed=[0]), path)
    assert open_cube(path).sizes["seed"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["cube.zarr"]


def test_rows_compare_with_the_same_seed():
    cube = made(baseline={"scheduling": "plas"})
    base = cube.jct_mean.sel(retention="lru", scheduling="plas")
    found = {tuple(row.labels.values()): row for row in rows(cube)}
    assert found["lru", "plas"].is_baseline
    expected = 100 * (cube.jct_mean.sel(retention="ttl", scheduling="fcfs") / base - 1)
    np.testing.assert_allclose(found["ttl", "fcfs"].per_seed, expected)
    assert found["ttl", "fcfs"].change.mean == pytest.approx(expected.mean().item())


def with_published(cube: Any) -> Any:
    """The cube with invented published figures."""
    published = {
        "source": "A Paper, table 1",
        "level": {"jct_mean": 100.0},
        "change_percent": [{"retention": "ttl", "scheduling": "plas", "value": -7.5}],
    }
    return cube.assign_attrs(published=json.dumps(published))


def printed(table: Any, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_table_and_sentence(cube: Any):
    assert level_sentence(cube) is None
    cube = with_published(cube)
    text = printed(policy_table(cube))
    assert "-7.5" in text
    assert "3 seeds" in text
    assert " ± " in text
    assert text.count("lru") >= 2
    sentence = level_sentence(cube)
    assert sentence is not None
    assert "A Paper, table 1" in sentence
    assert "100.0 s" in sentence


def test_tables_fit_into_a_terminal(cube: Any):
    lines = printed(policy_table(with_published(cube)), width=80).splitlines()
    assert not any("…" in line for line in lines)


def test_long_tables_are_cut_and_say_so(cube: Any):
    text = printed(policy_table(cube, most_rows=2))
    assert "2 more in the cube" in text


def test_a_grid_without_seeds_has_no_intervals():
    cube = sweep(
        WORKLOAD(0), Cluster(), Policy(), grid={"retention": ["lru", "ttl"]}, stream_lanes=stub_stream_lanes
    )
    assert np.isnan(rows(cube)[1].change.low)
    assert "±" not in printed(policy_table(cube))
    change_figure(cube)


def test_load_of_several_runs_in_words():
    assert load_text(Counter({"stable": 3})) == "stable"
    assert load_text(Counter({"stable": 1, "overloaded": 3})) == "overloaded 3/4"


def test_figures_are_written_reproducibly(cube: Any, tmp_path: Path):
    cube = with_published(cube)
    for name in ("a.png", "b.png"):
        save_figure(change_figure(cube), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    save_figure(jct_figure(cube.jct.values[0, 0, 0], "a run"), tmp_path / "jct.svg")
    jct_figure(np.array([np.nan]), "nothing completed")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.png", "b.png", "jct.svg"]
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        save_figure(change_figure(cube), tmp_path / "a.gif")


def test_many_configurations_still_make_a_figure(tmp_path: Path):
    grid = {"retention": ["ttl"], "tau": list(range(1, 60))}
    cube = sweep(WORKLOAD(0), Cluster(), Policy(), grid=grid, stream_lanes=stub_stream_lanes)
    save_figure(change_figure(cube), tmp_path / "many.png")


@pytest.mark.parametrize(
    "published",
    [
        {"sauce": "x"},
        {"level": {"jct_mean": "high"}},
        {"level": {"nope": 1}},
        {"change_percent": [{"value": None}]},
    ],
)
def test_published_figures_are_checked(published: dict):
    with pytest.raises(InputError, match=r"grid\.published"):
        check_published(published)


def test_a_coefficient_is_an_axis_of_the_python_function() -> None:
    programs = [Program("job", 0.0, (((Call(4, 2, None, None, 0.0),),),))]
    cluster = Cluster(performance=Affine(0.01))
    cube = sweep(programs, cluster, Policy(), grid={"c0_ns": [1e7, 2e7]})
    assert cube.jct_mean.values.tolist() == pytest.approx([0.02, 0.04])
