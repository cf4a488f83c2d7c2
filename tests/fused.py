"""Prints a digest of the results of several compiled programs: `python -m tests.fused`, with or without the
options of `agentjax.compilation` in XLA_FLAGS. `tests/test_fusion.py` compares them.
"""

import hashlib

import numpy as np

from agentjax import Cluster, Policy, pack
from agentjax.compilation import prepare
from agentjax.engine.run import LaneSpec, run_lanes
from agentjax.performance import Affine
from agentjax.workloads import Call, Program
from agentjax.workloads.program import Prefix

PERFORMANCE = Affine(c0_s=0.01, c_tok_s=2e-6, c_seq_s=1e-5, c_kv_s=1e-8)
MANY = {
    "retention": ("pin", "ttl", "lru"),
    "scheduling": ("plas", "fcfs"),
    "routing": ("least_loaded", "session_affinity"),
    "admission": ("kv_gate", "always"),
}
ONE = {"retention": ("lru",), "scheduling": ("fcfs",), "routing": ("round_robin",), "admission": ("always",)}
CASES = {
    "lean, alone": (ONE, 1, {}, 0),
    "lean, 3 replicas": (ONE, 8, {"replicas": 3, "async_scheduling": False}, 0),
    "many policies, 2 replicas, prefixes": (MANY, 6, {"replicas": 2}, 2),
    "slots": (ONE, 4, {"slots": True, "block_size": 1, "kv_blocks": 2400, "max_num_seqs": 4}, 0),
}


def workload(prefixes: int):
    """Twelve programs that compete for the cache."""
    draw = np.random.default_rng(0)

    def program(index: int) -> Program:
        calls = [Call(*draw.integers(5, 90, 2).tolist(), None, None, draw.exponential()) for _ in range(4)]
        prefix = Prefix(f"prefix {index % prefixes}", 40) if prefixes else None
        return Program(f"program {index}", draw.exponential(), ((tuple(calls),),), prefix)

    return pack([program(index) for index in range(12)])


def digest(policies: dict, lanes: int, limits: dict, prefixes: int) -> str:
    """Digest of the call records of some lanes."""
    names = [{plane: members[i % len(members)] for plane, members in policies.items()} for i in range(lanes)]
    cluster = Cluster(**{"kv_blocks": 80, "block_size": 8, **limits}, performance=PERFORMANCE)
    specs = [LaneSpec(0, cluster, Policy(**each)) for each in names]
    found = hashlib.sha256()
    outcome = run_lanes([workload(prefixes)], specs)
    assert not outcome.status.any()
    for array in (outcome.call_finished_ns, outcome.call_cached_tokens, outcome.evicted_blocks):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    prepare()
    for name, case in CASES.items():
        print(name, digest(*case), flush=True)
