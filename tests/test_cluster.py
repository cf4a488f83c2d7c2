"""Limits of a cluster, and lanes that cannot be run."""

import pytest

from agentjax import Cluster, InputError, Policy, pack
from agentjax.engine.run import LaneSpec, run_lanes
from agentjax.workloads import Call, Prefix, Program


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"kv_blocks": 3_000_000_000},
            r"kv_blocks: found 3000000000, expected an integer from 1 to 1073741824",
        ),
        ({"kv_blocks": 0}, r"kv_blocks: found 0, expected an integer from 1"),
        ({"kv_blocks": 10.0}, r"kv_blocks: found 10\.0, expected an integer"),
        (
            {"max_num_batched_tokens": 100, "max_num_seqs": 101},
            r"max_num_batched_tokens: found 100, expected at least the 101 of max_num_seqs",
        ),
        ({"vllm": "0.5"}, r"vllm: found '0\.5', expected one of 0\.19, 0\.24, 0\.33"),
        ({"watermark": 1.5}, r"watermark: found 1\.5, expected a share from 0 to less than 1"),
        ({"watermark": 1}, r"watermark: found 1, expected a share"),
        ({"watermark": float("nan")}, r"watermark: found nan, expected a share"),
        ({"watermark": True}, r"watermark: found True, expected a share"),
        ({"reserve_full_isl": 1}, r"reserve_full_isl: found 1, expected true or false"),
        ({"async_scheduling": "no"}, r"async_scheduling: found 'no', expected true or false"),
        (
            {"long_prefill_token_threshold": -1},
            r"long_prefill_token_threshold: found -1, expected an integer from 0",
        ),
        (
            {"slots": True, "block_size": 1, "async_scheduling": True},
            r"async_scheduling: found true, expected false, for contexts stay in slots",
        ),
    ],
)
def test_a_cluster_refuses(limits, message):
    with pytest.raises(InputError, match=rf"^cluster\.{message}"):
        Cluster(**limits)


def test_versions_are_texts_and_slots_are_scheduled_synchronously():
    assert Cluster().vllm == "0.33"
    assert Cluster(vllm=0.24).vllm == "0.24"  # as YAML reads it
    assert Cluster().async_scheduling is True
    assert Cluster(slots=True, block_size=1).async_scheduling is False
    assert Cluster(max_num_batched_tokens=101, max_num_seqs=101).max_num_seqs == 101


def lane(prefix=None, **limits):
    program = Program("job", 0.0, (((Call(10, 1, None, None, 0.0),),),), prefix)
    return pack([program]), LaneSpec(0, Cluster(**limits), Policy())


def test_short_chunks_do_not_go_with_shared_prefixes():
    workload, spec = lane(Prefix("system", 100), long_prefill_token_threshold=64)
    with pytest.raises(InputError) as error:
        run_lanes([workload], [spec])
    assert str(error.value) == (
        "cluster.long_prefill_token_threshold: found 64, expected 0, for programs have a shared prefix"
    )


def test_lanes_of_both_modes_are_not_run_together():
    workload, spec = lane()
    _, other = lane(async_scheduling=False)
    with pytest.raises(
        InputError, match=r"^cluster\.async_scheduling: found true and false, expected the same"
    ):
        run_lanes([workload], [spec, other])
