"""Energy and cost of runs, computed by hand."""

import numpy as np
import pytest

import agentjax as ajx
from agentjax.config.build import build_cluster
from agentjax.energy import (
    ENERGY,
    Power,
    busy_cost_usd,
    cost_usd,
    decode_context_tokens,
    energy_j,
    memory_traffic_bytes,
    per,
    run_energy,
)
from agentjax.errors import InputError
from agentjax.performance import read_config, read_device

S = 1_000_000_000  # ns


def test_energy_of_one_run():
    # 2 replicas of 4 GPUs for 100 s: 8 · 50 W · 100 s = 40,000 J idle; 30 + 10 s busy:
    # 4 · (300 − 50) W · 40 s = 40,000 J more; 5e12 bytes at 1e-10 J: 500 J
    power = Power(idle_w=50, active_w=300, memory_j_per_byte=1e-10)
    run = {"replicas": 2, "gpus_per_replica": 4}
    assert energy_j(power, [30 * S, 10 * S], 100 * S, **run) == pytest.approx(80_000)
    assert energy_j(power, [30 * S, 10 * S], 100 * S, **run, memory_bytes=5e12) == pytest.approx(80_500)


def test_energy_of_many_runs():
    # a run that is never busy draws idle power only; replicas that a run does not have draw nothing
    power = Power(idle_w=10, active_w=110, memory_j_per_byte=0)
    busy = np.array([[0, 0, 0], [5 * S, 0, 0], [5 * S, 5 * S, 5 * S]])
    found = energy_j(power, busy, np.array([10, 10, 10]) * S, replicas=np.array([3, 1, 3]))
    assert found.tolist() == [300, 100 + 500, 300 + 1500]


def test_power_of_a_gpu():
    # H100 SXM: 3.35e12 bytes/s at 40 pJ take 134 W of the limit of 700 W
    power = Power.of(read_device("h100_sxm"))
    assert (power.idle_w, power.active_w) == (70, pytest.approx(566))
    # 1 s of an iteration that uses all of the bandwidth is 700 J
    assert energy_j(power, [S], S, replicas=1, memory_bytes=3.35e12) == pytest.approx(700)
    with pytest.raises(InputError, match=r"^power\.idle_w: found -1, expected a finite number >= 0"):
        Power(idle_w=-1, active_w=1)


def test_context_that_decodes_read():
    # prompt 10, output 4: decodes over 11, 12 and 13 tokens; prompt 7, output 1: none
    assert decode_context_tokens([10, 7], [4, 1]) == 11 + 12 + 13
    assert decode_context_tokens([[10, 7], [1, 1]], [[4, 1], [2, 3]]).tolist() == [36, 2 + (2 + 3)]


def test_memory_traffic():
    # 3 iterations of 100 bytes of weights, 36 tokens of context of 8 bytes
    assert memory_traffic_bytes(100, 3, 8, 36) == 588
    model = read_config("llama_3_1_8b")
    found = memory_traffic_bytes(model.weight_bytes, [1, 2], model.kv_bytes_per_token, [0, 1000])
    assert found.tolist() == [16_060_522_496, 2 * 16_060_522_496 + 131_072_000]


def test_cost():
    # 8 GPUs for half an hour at 2.50 dollars: 10 dollars; busy for 6 + 3 minutes on 4 GPUs each: 1.50
    assert cost_usd(2.5, 8, 1800 * S) == pytest.approx(10)
    assert busy_cost_usd(2.5, [360 * S, 180 * S], 4) == pytest.approx(1.5)
    found = busy_cost_usd(1.0, np.array([[3600, 0], [3600, 1800]]) * S)
    assert found.tolist() == pytest.approx([1, 1.5])


def test_per_program_and_token():
    assert per(10.0, 4) == 2.5
    found = per([10.0, 10.0], [4, 0])
    assert found[0] == 2.5
    assert np.isnan(found[1])


def test_energy_and_cost_of_a_run_by_name():
    # 2 replicas of 4 H100 for 100 s, busy for 30 + 10 s: 8 · 70 W · 100 s + 4 · 630 W · 40 s = 156,800 J;
    # 800 GPU seconds at 3.60 dollars an hour: 0.80
    device = read_device("h100_sxm").model_copy(update={"price_usd_per_gpu_hour": 3.6})
    run = {"busy_s": 40.0, "makespan_s": 100.0, "replicas": 2, "gpus_per_replica": 4}
    found = run_energy(device, **run, programs=4, output_tokens=1000)
    assert found == pytest.approx(dict(zip(ENERGY, (156_800, 39_200, 156.8, 0.8, 0.2), strict=True)))
    nothing = run_energy(device, **run | {"makespan_s": float("nan")}, programs=0, output_tokens=0)
    assert all(np.isnan(value) for value in nothing.values())


def test_energy_of_a_simulated_run():
    call = ajx.workloads.Call(new_tokens=100, output_tokens=20, kept_tokens=None, tool=None, tool_s=0.0)
    programs = [ajx.workloads.Program(str(i), 5.0 + i, (((call,),),), None) for i in range(3)]
    gpu = read_device("rtx_pro_6000")
    run = ajx.simulate(programs, ajx.Cluster(hardware=gpu, gpus=2))
    busy_s, makespan_s = run.busy_s.sum().item(), run.makespan_s.item()
    energy = 2 * (gpu.idle_w * makespan_s + (gpu.tdp_w - gpu.idle_w) * busy_s)
    cost = 2 * gpu.price_usd_per_gpu_hour * makespan_s / 3600
    expected = (energy, energy / 3, energy / 60, cost, cost / 3)
    assert [run[name].item() for name in ENERGY] == pytest.approx(expected)
    assert [run[name].attrs["units"] for name in ENERGY] == ["J", "J", "J", "USD", "USD"]
    unknown = ajx.simulate(programs, ajx.Cluster())
    assert not set(ENERGY) & set(unknown)
    assert unknown.equals(run.drop_vars(list(ENERGY)))


def test_hardware_of_a_configured_cluster():
    affine = {"c0_s": 0.04}
    estimate = {"model": "llama_3_1_8b", "hardware": "h200", "tensor_parallel": 4}
    assert build_cluster({}, affine).hardware is None
    built = build_cluster({"hardware": "l40s", "gpus": 2}, affine)
    assert (built.hardware, built.gpus) == (read_device("l40s"), 2)
    for cluster in ({"gpus": 2}, {"hardware": "h200"}):
        built = build_cluster(cluster, estimate)
        assert (built.hardware, built.gpus) == (read_device("h200"), 4)


@pytest.mark.parametrize(
    ("cluster", "performance", "message"),
    [
        ({"hardware": "h100"}, {"c0_s": 0.04}, r"^hardware: found 'h100', expected .*h100_pcie, h100_sxm"),
        ({"hardware": 5}, {"c0_s": 0.04}, r"^cluster\.hardware: found 5, expected null, a name"),
        ({"gpus": 0}, {"c0_s": 0.04}, r"^cluster\.gpus: found 0, expected an integer from 1"),
        (
            {"hardware": "l40s"},
            {"model": "llama_3_1_8b", "hardware": "h200"},
            r'^cluster\.hardware: found "l40s", expected null, or "h200" as performance\.hardware',
        ),
    ],
)
def test_hardware_that_a_cluster_cannot_have(cluster, performance, message):
    with pytest.raises(InputError, match=message):
        build_cluster(cluster, performance)


def test_hardware_is_a_gpu():
    with pytest.raises(InputError, match=r"^cluster\.hardware: found 'h200', expected a GPU"):
        ajx.Cluster(hardware="h200")  # pyright: ignore[reportArgumentType]
