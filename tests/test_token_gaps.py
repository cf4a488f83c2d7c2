"""One long prompt slows a stream that decodes: its longest time between tokens says by how much."""

import numpy as np
import pytest

import agentjax as ajx
from agentjax.config.build import build_performance
from agentjax.workloads import Call, Program
from tests.batches import iteration

MODEL = {"model": "llama_3_1_70b", "weights": "fp8", "hardware": "h100_sxm", "tensor_parallel": 8}


def program(name, arrival_s, new, output):
    return Program(name, arrival_s, (((Call(new, output, None, None, 0.0),),),))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_prompt_slows_a_stream(asynchronous):
    """`shared/cases/08_itl_hidden`: while the prompt of B is computed, A gets a token an iteration.

    Those take about 340 ms with 8,192 tokens and 100 ms with 2,048. The one with the last whole chunk takes
    longest: its context is the longest.
    """
    performance = build_performance(MODEL)
    programs = [program("A", 0.0, 4094, 2000), program("B", 5.0, 65_535, 1)]
    for budget, iterations, each_s in ((8192, 9, 0.34), (2048, 33, 0.10)):
        cluster = ajx.Cluster(
            kv_blocks=60_000,
            max_num_batched_tokens=budget,
            async_scheduling=asynchronous,
            performance=performance,
        )
        run = ajx.simulate(programs, cluster)
        chunk = budget - 1  # A has one token of each batch
        assert -(-65_535 // chunk) == iterations
        stalled_s = (run.finished_s - run.scheduled_s).values[1]
        assert stalled_s / iterations == pytest.approx(each_s, rel=0.1)
        last = iteration(chunk, (iterations - 2) * chunk, decodes=1, context=4500)
        longest_s = float(performance.iteration_ns(last)) / 1e9
        np.testing.assert_allclose(run.longest_itl_s, [longest_s, np.nan], rtol=2e-3)
        assert run.itl_max.item() == run.longest_itl_s[0].item()
        assert run.itl_p50.item() < 0.02
