"""The reference simulator against recorded vLLM runs and small hand-worked cases, and its invariants."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests import strategies
from tests.reference import golden, policies
from tests.reference.simulator import Simulation, simulate

# Recorded runs


def test_all_recordings_are_there():
    assert len(golden.NAMES) == 10


def check_against(recording):
    """The reference decides as the recorded scheduler did."""
    log = []
    result = simulate(*golden.convert(recording), log=log)
    expected = golden.expected(recording)
    for kind in ("calls", "programs"):
        for index, (got, want) in enumerate(zip(result[kind], expected[kind], strict=True)):
            assert {field: got[field] for field in want} == want, f"{kind}[{index}]"
    assert {key: result["totals"][key] for key in expected["totals"]} == expected["totals"]

    results = recording["results"]
    for entry, row in zip(log, results["iterations"], strict=False):
        start, duration, sequences, tokens, free, running, waiting, preempted, *asynchronous = row
        assert (entry["start_ns"], entry["duration_ns"]) == (golden.to_ns(start), golden.to_ns(duration))
        assert (len(entry["batch"]), sum(n for _, _, n, _ in entry["batch"])) == (sequences, tokens)
        assert (entry["free_blocks"], entry["running"], entry["waiting"]) == (free, running, waiting)
        assert len(entry["preempted"]) == preempted
        if asynchronous:
            scheduled, wasted = asynchronous
            assert (entry["scheduled_ns"], entry["wasted_tokens"]) == (golden.to_ns(scheduled), wasted)
    for entry, (batch, preempted) in zip(log, results.get("trace", []), strict=False):
        assert entry["batch"] == [tuple(row) for row in batch]
        assert sorted(entry["preempted"]) == [tuple(row) for row in preempted]
    preempted = [(entry["scheduled_ns"], sorted(entry["preempted"])) for entry in log if entry["preempted"]]
    logged = [(golden.to_ns(time), [tuple(row) for row in rows]) for time, rows in results["preemption_log"]]
    if result["totals"]["empty_schedules"]:  # those that only preempt are no iterations
        assert all(entry in logged for entry in preempted)
    else:
        assert preempted == logged
    if "final_free_queue" in results:
        assert result["final_free_queue"] == [results["final_free_queue"]]
        assert result["final_cached_blocks"] == [results["final_cached_blocks"]]


@pytest.mark.parametrize("name", golden.NAMES)
def test_equals_the_recorded_vllm_run(name):
    check_against(golden.load(name))


# Small cases worked out by hand: blocks of 4 tokens, and 10 ns an iteration unless a case says otherwise.
# vLLM 0.19: blanks join the tail of the queue; test_reference_versions.py has what came later.
# A call of prompt p and output o takes o iterations and ends with p + o - 1 tokens computed.


def program(arrival, *calls, prefix=None):
    """A program; a call is (new, output, gap) or (new, output, kept, gap)."""
    full = [call if len(call) == 4 else (call[0], call[1], None, call[2]) for call in calls]
    return {"arrival_ns": arrival, "prefix": prefix, "calls": full}


def run(programs, cost=None, log=None, **changes):
    """Simulate a small case with all invariants checked."""
    config = {
        "kv_blocks": 100,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1000,
        "max_model_len": 1000,
        "replicas": 1,
        "prefix_tokens": [],
        "cost": {"c0": 10, "c_tok": 0, "c_seq": 0, "c_kv": 0, "c_prefill": 0, "wakeup": 0} | (cost or {}),
        "retention": ("lru", {}),
        "scheduling": "fcfs",
        "routing": ("round_robin", {}),
        "admission": ("always", {}),
        "vllm": "0.19",
        "check": True,
    }
    return simulate(programs, config | changes, log)


def field(result, name):
    """One field of every call, in (program, call) order."""
    return [call[name] for call in result["calls"]]


def test_one_program():
    # Call 1: prompt 8, output 5: released 0, tokens at 10, 20, 30, 40, 50; 12 tokens computed = 3 full
    # blocks. Call 2 at 150: prompt 8 + 5 + 4 = 17, hits 3 blocks = 12 tokens, computes 5, first and only
    # token at 160.
    result = run([program(0, (8, 5, 100), (4, 1, 0))])
    assert field(result, "prompt") == [8, 17]
    assert field(result, "released") == [0, 150]
    assert field(result, "first_token") == [10, 160]
    assert field(result, "finished") == [50, 160]
    assert field(result, "cached_tokens") == [0, 12]
    assert field(result, "service_ns") == [50, 10]
    assert result["programs"] == [{"arrival": 0, "finished": 160, "service": 60}]
    totals = result["totals"]
    assert (totals["prompt_tokens"], totals["hit_tokens"]) == (25, 12)
    assert (totals["prefill_tokens"], totals["decode_tokens"]) == (13, 4)
    assert (totals["iterations"], totals["busy_ns"], totals["makespan_ns"]) == (6, [60], 160)


def test_evict_keeps_nothing():
    result = run([program(0, (8, 5, 100), (4, 1, 0))], retention=("evict", {}))
    assert field(result, "cached_tokens") == [0, 0]
    assert result["totals"]["evicted_blocks"] == 0  # blanks are not evicted


def test_evict_leaves_the_shared_prefix():
    # Prefix of 8 tokens = 2 blocks; the private third block becomes a blank.
    result = run([program(0, (4, 1, 100), (4, 1, 0), prefix=0)], retention=("evict", {}), prefix_tokens=[8])
    assert field(result, "cached_tokens") == [0, 8]


# A holds blocks 1-3 until 50. B (4 blocks, 60-70) and C (2 blocks, 80-90) come in A's gap; A's call 2 is
# released at 150.
A_B_C = [program(0, (8, 5, 100), (4, 1, 0)), program(60, (16, 1, 0)), program(80, (8, 1, 0))]


def test_lru_evicts_in_order_of_giving_back():
    # Queue after A: 4-8 3 2 1; B takes 4-7: 8 3 2 1 7 6 5 4; C takes 8 and 3, A's last block: A hits 2
    # blocks. evicted: block 3 by C; A's call 2 (17 tokens: 5 blocks, 2 hits) takes 7 6 5, content of B: 4 in
    # all.
    result = run(A_B_C, kv_blocks=8)
    assert field(result, "cached_tokens") == [0, 8, 0, 0]
    assert result["totals"]["evicted_blocks"] == 4


@pytest.mark.parametrize("tau_ns", [1000, 1])
def test_ttl_protects_until_the_release_even_when_expired(tau_ns):
    # Protected 1-3; queue 8 7 6 5 4 when C comes: it takes 8 (never used) and 7 (content of B). A hits all 3
    # blocks, whether its deadline (50 + tau) is over or not, and takes two more: at 90 C gave back 7 8 behind
    # 6 5 4, so 6 and 5 (of B).
    result = run(A_B_C, kv_blocks=8, retention=("ttl", {"tau_s": tau_ns / 1e9}))
    assert field(result, "cached_tokens") == [0, 12, 0, 0]
    assert result["totals"]["evicted_blocks"] == 3


@pytest.mark.parametrize(("tau_ns", "cached"), [(100, {"A": 8, "B": 4}), (5, {"A": 4, "B": 8})])
def test_order_of_breaking(tau_ns, cached):
    # A (done at 10) and B (done at 20) have 2 protected blocks each; at 30 C needs 4 blocks, the queue has 3:
    # one is broken. tau 100: both unexpired at 30, the latest deadline goes first: B's last block. tau 5:
    # both expired, the earliest: A's.
    programs = [
        program(0, (8, 1, 1000), (4, 1, 0)),
        program(10, (8, 1, 1000), (4, 1, 0)),
        program(30, (16, 1, 0)),
    ]
    result = run(programs, kv_blocks=7, retention=("ttl", {"tau_s": tau_ns / 1e9}))
    assert field(result, "scheduled")[4] == 30
    assert field(result, "cached_tokens") == [0, cached["A"], 0, cached["B"], 0]


def test_an_expired_protection_is_broken_before_an_unexpired_one():
    # tau 15: at 30 A (deadline 25) is expired, B (deadline 35) is not: A's last two blocks, that is all of
    # it, go.
    programs = [
        program(0, (8, 1, 1000), (4, 1, 0)),
        program(10, (8, 1, 1000), (4, 1, 0)),
        program(30, (20, 1, 0)),
    ]
    result = run(programs, kv_blocks=7, retention=("ttl", {"tau_s": 15e-9}))
    assert field(result, "cached_tokens") == [0, 0, 0, 8, 0]


def test_an_ended_protection_joins_the_tail_of_the_queue():
    # One call at a time, 6 blocks. A done at 10 (1 2 protected), B at 20 (its last call: queue 5 6 4 3). C
    # runs 20-120 (prompt 1, output 10) and takes 5, 6 and 4 one after another. A's call 2 is released at 30:
    # queue 6 4 3 then, and 2 1 behind them. C ends with 10 tokens computed and gives back 4 (partial), 6, 5:
    # queue 3 2 1 4 6 5. D (2 blocks, released at 25) runs at 120 and takes 3 2: A, at 130, hits block 1.
    programs = [
        program(0, (8, 1, 20), (4, 1, 0)),
        program(1, (8, 1, 0)),
        program(2, (1, 10, 0)),
        program(25, (8, 1, 0)),
    ]
    result = run(programs, kv_blocks=6, max_num_seqs=1, retention=("ttl", {}))
    assert field(result, "scheduled") == [0, 130, 10, 20, 120]
    assert field(result, "cached_tokens") == [0, 4, 0, 0, 0]


def test_pressure_ttl_rule():
    def deadline(utilization, **params):
        return policies.retain("pressure_ttl", params, 100, utilization)

    assert deadline(0.5) == (True, 100 + 2_000_000_000)
    assert deadline(0.7) == (True, 100 + 2_000_000_000)
    assert deadline(1.0) == (True, 100 + 1_000_000_000)
    assert deadline(0.5, low=0.25, high=0.75) == (True, 100 + 1_500_000_000)  # m = 0.5
    assert deadline(1.0, tau_s=5e-9) == (True, 100 + 2)  # 2.5 rounds to even
    assert deadline(1.0, tau_s=7e-9) == (True, 100 + 4)  # 3.5 rounds to even


def test_retention_sees_the_call_that_completes_and_protections(monkeypatch):
    # 10 blocks. A and B (2 and 3 blocks) complete together at 10: A sees 5/10, B still 5/10 (A's are
    # protected now). C (4 blocks, out 1) completes at 30: 5 protected + 4. A's second call at 110: protection
    # of A ended, C's blocks are in the queue: it hits 2 and takes 2 more (9 + 4 = 13 tokens): 4 in use + 3
    # protected.
    seen = []
    retain = policies.retain
    monkeypatch.setattr(policies, "retain", lambda *a: seen.append((a[2], a[3])) or retain(*a))
    programs = [
        program(0, (8, 1, 100), (4, 1, 0)),
        program(0, (12, 1, 1000), (4, 1, 0)),
        program(20, (16, 1, 0)),
    ]
    run(programs, kv_blocks=10, retention=("pressure_ttl", {}))
    # B's second call at 1010: A's are in the queue now; B hits 3 and takes 2 (13 + 4 = 17 tokens).
    assert seen == [(10, 0.5), (10, 0.5), (30, 0.9), (120, 0.7), (1020, 0.5)]


@pytest.mark.parametrize(("retention", "cached"), [("ttl", 0), ("pin", 8)])
def test_pin_protects_until_the_admission(retention, cached):
    # 6 blocks, one call at a time. A done at 10 (blocks 1 2), B runs 10-100 (8 tokens + output 9: 4 blocks),
    # A's call 2 is released at 15, behind D, which was released at 12. ttl: at 15 queue 5 6 2 1; B takes 5 6;
    # at 100 queue 2 1 6 5 4 3; D takes 2 1 6: nothing left of A. pin: at 100 queue 6 5 4 3, protected 1 2; D
    # takes 6 5 4; A, at 110, hits both.
    programs = [
        program(0, (8, 1, 5), (4, 1, 0)),
        program(5, (8, 9, 0)),
        program(12, (12, 1, 0)),
    ]
    result = run(programs, kv_blocks=6, max_num_seqs=1, retention=(retention, {}))
    assert field(result, "scheduled") == [0, 110, 10, 100]
    assert field(result, "cached_tokens") == [0, cached, 0, 0]


def test_pin_ends_on_other_replicas_at_the_admission():
    # A's call 1 runs on replica 0 (2 blocks pinned at 10), call 2 on replica 1 (15-25), C on replica 0
    # (20-30; 1 block, its only call). When C has ended all 4 blocks of replica 0 are in the queue.
    log = []
    programs = [program(0, (8, 1, 5), (4, 1, 0)), program(20, (4, 1, 0))]
    result = run(programs, kv_blocks=4, replicas=2, retention=("pin", {}), log=log)
    assert field(result, "replica") == [0, 1, 0]
    assert [(e["replica"], e["start_ns"], e["free_blocks"]) for e in log] == [
        (0, 0, 2),
        (1, 15, 4),
        (0, 20, 4),
    ]


def test_an_admission_that_breaks_protections_keeps_its_hits():
    # 6 blocks, pinned: A 1 2 (done at 10), B 3 4 (done at 20), queue 5 6. A's call 2 at 110: prompt 9 + 10 =
    # 19, 5 blocks, hits 2, takes 5 6 and breaks one: B's last (its own blocks are in use by then). B's call 2
    # at 1020 hits 1 block.
    programs = [program(0, (8, 1, 100), (10, 1, 0)), program(10, (8, 1, 1000), (4, 1, 0))]
    result = run(programs, kv_blocks=6, retention=("pin", {}))
    assert field(result, "scheduled") == [0, 110, 10, 1020]
    assert field(result, "cached_tokens") == [0, 8, 0, 4]


# Shared prefixes: 8 tokens = 2 blocks.


def test_a_shared_prefix_is_hit_in_the_schedule_that_fills_it():
    programs = [
        program(0, (4, 1, 0), prefix=0),
        program(0, (4, 1, 0), prefix=0),
        program(0, (4, 1, 0), prefix=1),
    ]
    result = run(programs, prefix_tokens=[8, 8])
    assert field(result, "scheduled") == [0, 0, 0]
    assert field(result, "cached_tokens") == [0, 8, 0]


@pytest.mark.parametrize(("kv_blocks", "cached"), [(4, 4), (5, 8)])
def test_a_broken_shared_prefix_goes_back_to_the_queue(kv_blocks, cached):
    # A (1 2 | 3) and B (1 2 | 4) end at 10, protected with equal deadlines. C needs 3 blocks at 20. 4 blocks:
    # queue empty. Break A's 3 (lower index), B's 4: both are broken up, so 2 1 join the queue, and 2 is
    # taken. 5 blocks: C takes 5, 3, 4; then 2 1 join the queue but stay: A's call 2 hits 2 blocks.
    programs = [
        program(0, (4, 1, 1000), (4, 1, 0), prefix=0),
        program(0, (4, 1, 2000), (4, 1, 0), prefix=0),
        program(20, (12, 1, 0)),
    ]
    # The last call of A needs 5 blocks, more than 4: with 4 blocks A's second call has 1 new token (14 in
    # all).
    if kv_blocks == 4:
        for p in programs[:2]:
            p["calls"][1] = (1, 1, None, 0)
    result = run(programs, kv_blocks=kv_blocks, prefix_tokens=[8], retention=("ttl", {}))
    assert field(result, "scheduled")[4] == 20
    assert field(result, "cached_tokens")[1] == cached


def test_a_context_without_private_blocks_protects_its_shared_prefix():
    # A: prefix 8 + 2 new: 2 shared blocks and a partial one, given back as a blank. B and C (8 tokens: 2
    # blocks) at 20 and 40. ttl: protected 1 2, queue 4 3: B takes 4 3 and gives back 3 4; C takes 3 4 again:
    # A hits its 2 blocks. lru: queue 4 3 2 1; B takes 4 3 and gives back 3 4: 2 1 3 4; C takes 2 1: A hits
    # nothing.
    programs = [program(0, (2, 1, 1000), (2, 1, 0), prefix=0), program(20, (8, 1, 0)), program(40, (8, 1, 0))]
    small = {"kv_blocks": 4, "prefix_tokens": [8]}
    assert field(run(programs, retention=("ttl", {}), **small), "cached_tokens")[1] == 8
    assert field(run(programs, retention=("lru", {}), **small), "cached_tokens")[1] == 0


def test_a_context_without_private_blocks_can_be_broken():
    # As above with 3 blocks: queue 3, protected 1 2. B needs 2: takes 3, then A's turn: nothing private to
    # take, but 2 1 join the queue and 2 is taken. A hits 1 block.
    programs = [program(0, (2, 1, 1000), (1, 1, 0), prefix=0), program(20, (8, 1, 0))]
    result = run(programs, kv_blocks=3, prefix_tokens=[8], retention=("ttl", {}))
    assert field(result, "scheduled")[2] == 20
    assert field(result, "cached_tokens")[1] == 4


# Compaction


@pytest.mark.parametrize("retention", ["lru", "ttl", "pin"])
def test_compaction_leaves_blanks(retention):
    # Call 1: 16 tokens computed = 4 blocks, context 17. Call 2 keeps 9: prompt 9 + 4 = 13, 2 full blocks
    # survive. The other two blocks of the pool are blanks then, so that nothing is evicted. Call 3 keeps all:
    # prompt 13 + 1 + 1 = 15, hits 3.
    result = run([program(0, (16, 1, 5), (4, 1, 9, 5), (1, 1, 0))], kv_blocks=4, retention=(retention, {}))
    assert field(result, "prompt") == [16, 13, 15]
    assert field(result, "cached_tokens") == [0, 8, 12]
    assert result["totals"]["evicted_blocks"] == 0


def test_kept_of_the_first_call_and_more_than_the_context_mean_all():
    result = run([program(0, (8, 1, 3, 5), (4, 1, 99, 0))])
    assert field(result, "prompt") == [8, 13]


# Scheduling and preemption


def test_priorities():
    # The service before call 2: 5 iterations of 10,000 ns. At its release 17 prompt tokens, 12 of them
    # cached.
    programs = [program(7_999, (8, 5, 100), (4, 1, 0))]
    expected = {
        "fcfs": [0, 0],
        "program_fcfs": [7, 7],
        "plas": [0, 50],
        "sjf": [8, 5],
        "call_index": [0, 1],
        "reverse_arrival": [-7, -7],
        "zero": [0, 0],
    }
    for name, priorities in expected.items():
        assert field(run(programs, cost={"c0": 10_000}, scheduling=name), "priority") == priorities


def test_sjf_counts_no_more_than_what_is_kept():
    # 4 blocks of the old context are cached; 9 of 17 tokens are kept: 2 blocks count. Prompt 13.
    result = run([program(0, (16, 1, 5), (4, 1, 9, 0))], scheduling="sjf")
    assert field(result, "priority") == [16, 5]


def test_a_victim_already_scheduled_leaves_content_in_the_block_it_fills():
    # 10,000 ns an iteration, 4 blocks, the earlier arrival is the victim. X (prompt 6, output 4) from 0, Y
    # (8, 2) from 10,000. Iteration 3: X fills its block 2; Y needs a third block: X, already scheduled, is
    # preempted, and Y takes its block 2, which has content: 1 evicted. Y ends at 30,000. X has 8 tokens
    # known, hits block 1, takes the same block again, a blank now, and in iteration 5 a block of Y's content:
    # 2 evicted.
    programs = [program(0, (6, 4, 0)), program(10_000, (8, 2, 0))]
    result = run(programs, cost={"c0": 10_000}, kv_blocks=4, scheduling="reverse_arrival")
    assert field(result, "preemptions") == [1, 0]
    assert field(result, "resume_hit_tokens") == [4, 0]
    assert field(result, "finished") == [50_000, 30_000]
    assert field(result, "service_ns") == [40_000, 20_000]
    assert result["totals"]["recompute_tokens"] == 4
    assert result["totals"]["evicted_blocks"] == 2


# Iteration time


def test_wake_up():
    # First iteration 10 + 7, the next one follows at once, call 2 comes after a pause, call 3 (gap 0) does
    # not.
    result = run([program(0, (4, 2, 5), (4, 1, 0), (4, 1, 0))], cost={"wakeup": 7})
    assert field(result, "finished") == [27, 32 + 17, 49 + 10]
    assert result["totals"]["busy_ns"] == [54]


def test_affine_iteration_time():
    # Prefill of 8: 10 + 8*3 + 2 + 8*1 + 0.5*(8*4) = 60. Decode on 8: 10 + 3 + 2 + 9 = 24.
    # Call 2 (prompt 8 + 2 + 3 = 13, 8 cached): 5 tokens on 8: 10 + 15 + 2 + 13 + 0.5*5*(8 + 2.5) = 66.25.
    cost = {"c_tok": 3, "c_seq": 2, "c_kv": 1, "c_prefill": 0.5}
    result = run([program(0, (8, 2, 0), (3, 1, 0))], cost=cost)
    assert field(result, "first_token") == [60, 84 + 66]
    assert field(result, "finished") == [84, 150]


def test_an_iteration_takes_at_least_a_nanosecond():
    assert run([program(0, (8, 3, 0))], cost={"c0": 0})["totals"]["makespan_ns"] == 3


# Routing


def test_round_robin_counts_releases():
    result = run(
        [program(0, (4, 1, 0), (4, 1, 0)), program(0, (4, 1, 100)), program(50, (4, 1, 0))], replicas=2
    )
    assert field(result, "replica") == [0, 0, 1, 1]  # releases: A1, B, A2 at 10, C at 50


def test_least_loaded():
    # A -> 0, B -> 1 (0 has A), C -> 0 (equal). B ends at 15, so D at 16 -> 1 (0 has A and C).
    programs = [program(0, (4, 9, 0)), program(5, (4, 1, 0)), program(6, (4, 9, 0)), program(16, (4, 1, 0))]
    assert field(run(programs, replicas=2, routing=("least_loaded", {})), "replica") == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("limit", "replicas", "cached"), [(1, [0, 1, 1], [0, 0, 12]), (2, [0, 0, 0], [0, 8, 12])]
)
def test_session_affinity(limit, replicas, cached):
    # A's call 2 is released at 20, while B is on A's home: with a limit of 1 A moves to replica 1 and stays
    # there.
    programs = [program(0, (8, 1, 10), (4, 1, 100), (4, 1, 0)), program(15, (4, 9, 0))]
    result = run(programs, replicas=2, routing=("session_affinity", {"capacity_limit": limit}))
    assert field(result, "replica") == [*replicas, 0]
    assert field(result, "cached_tokens")[:3] == cached


def test_events_of_one_instant():
    # At 10 A ends on replica 0 and is released again at once: least loaded sees A gone from 0. B, arriving at
    # 10 with a higher index, sees A on 0 and goes to 1. Both start at 10.
    programs = [program(0, (4, 1, 0), (4, 1, 0)), program(10, (4, 1, 0))]
    result = run(programs, replicas=2, routing=("least_loaded", {}))
    assert field(result, "replica") == [0, 0, 1]
    assert field(result, "scheduled") == [0, 10, 10]


# Admission


@pytest.mark.parametrize(
    ("admission", "threshold", "scheduled"),
    [("always", 0.5, [0, 50, 50]), ("kv_gate", 0.5, [0, 50, 10]), ("kv_gate", 0.7, [0, 50, 50])],
)
def test_kv_gate_skips_held_calls(admission, threshold, scheduled):
    # 10 blocks. A runs 0-50 with 6, then 7 blocks. At 10, u = 0.7 and 3 blocks = 12 tokens are free: B (20
    # tokens) is held if 0.7 > threshold, and then C (8 tokens) passes; if not, B is a blocked head and C
    # waits behind it.
    programs = [program(0, (24, 5, 0)), program(1, (20, 1, 0)), program(2, (8, 1, 0))]
    result = run(programs, kv_blocks=10, admission=(admission, {"threshold": threshold}))
    assert field(result, "scheduled") == scheduled


def test_kv_gate_never_holds_a_preempted_call():
    # 7 blocks. X (8 tokens, output 17) runs 0-170; Y (16 tokens) is preempted at 10, when both need a block.
    # X takes more of Y's 4 blocks at 50, 90 and 130. At 140 Y hits 1 block: 16 - 4 tokens > 1 free block, so
    # the gate would hold it, and Z (4 tokens) would start. But Y is the head, and blocked: both start at 170.
    programs = [program(0, (8, 17, 0)), program(0, (16, 2, 0)), program(132, (4, 1, 0))]
    result = run(programs, kv_blocks=7, admission=("kv_gate", {"threshold": 0.5}))
    assert field(result, "preemptions") == [0, 1, 0]
    assert field(result, "resume_hit_tokens") == [0, 4, 0]
    assert field(result, "scheduled") == [0, 0, 170]


def test_kv_gate_lets_one_pass_on_an_idle_replica():
    # 4 blocks, 2 of them pinned by A: u = 0.5 > 0.4, and 12 tokens do not fit into 2 free blocks. Nothing
    # runs, so B passes.
    programs = [program(0, (8, 1, 1000), (1, 1, 0)), program(20, (12, 1, 0))]
    result = run(programs, kv_blocks=4, retention=("pin", {}), admission=("kv_gate", {"threshold": 0.4}))
    assert field(result, "scheduled") == [0, 1010, 20]
    assert field(result, "cached_tokens") == [0, 4, 0]


def test_kv_gate_needs_both_conditions():
    # 8 blocks. At 10 A holds 3 (u = 0.375). B needs 4 blocks = 16 tokens, 5 are free: passes at any
    # threshold.
    programs = [program(0, (8, 5, 0)), program(1, (16, 1, 0))]
    for threshold in (0.0, 0.9):
        result = run(programs, kv_blocks=8, admission=("kv_gate", {"threshold": threshold}))
        assert field(result, "scheduled") == [0, 10]


# Refusals, invariants, random cases


@pytest.mark.parametrize("changes", [{"kv_blocks": 2}, {"max_model_len": 12}])
def test_a_call_that_can_never_fit_is_refused(changes):
    with pytest.raises(ValueError, match="program 0, call 0"):
        run([program(0, (8, 5, 0))], **changes)
    assert run([program(0, (8, 5, 0))], kv_blocks=3, max_model_len=13)["totals"]["makespan_ns"] == 50


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(strategies.cases(kept_below_prefix=True, prefix_twice=True))
def test_invariants_hold_at_every_event(case):
    programs, config = case
    log = []
    result = simulate(programs, config | {"check": True}, log)
    totals, calls = result["totals"], iter(result["calls"])
    tokens = waiting = too_many = 0
    service = Counter()
    computed = Counter()
    for entry in log:
        for p, k, n, _ in entry["batch"]:
            service[p, k] += entry["duration_ns"]
            computed[p, k] += n
    for p, program_ in enumerate(programs):
        released = program_["arrival_ns"]
        for k, (_, output, _, gap) in enumerate(program_["calls"]):
            call = next(calls)
            assert call["released"] == released
            assert released <= call["scheduled"] < call["first_token"] <= call["finished"]
            assert (call["first_token"] == call["finished"]) == (output == 1)
            assert call["service_ns"] == service[p, k]
            assert (call["longest_gap"] == -1) == (output == 1)
            tokens += output - 1
            waiting += call["finished"] - call["first_token"]
            if not call["preemptions"]:
                more = computed[p, k] + call["cached_tokens"] - (call["prompt"] + output - 1)
                finish = program_.get("finish", [config["finish"]] * (k + 1))[k]
                known = finish == "max_tokens" or call["prompt"] + output == config["max_model_len"]
                assert more == 0 or (config["async_scheduling"] and not known and more == 1)
                too_many += more
            released = call["finished"] + gap
    assert totals["prefill_tokens"] + totals["decode_tokens"] == sum(computed.values())
    assert sum(totals["busy_ns"]) == sum(entry["duration_ns"] for entry in log)
    gaps = result["token_gaps"]
    assert (sum(gaps.values()), sum(gap * count for gap, count in gaps.items())) == (tokens, waiting)
    assert max(gaps, default=-1) == max(call["longest_gap"] for call in result["calls"])
    assert totals["wasted_tokens"] == sum(entry["wasted_tokens"] for entry in log)
    if not totals["preemptions"]:
        assert totals["wasted_tokens"] == too_many
        assert totals["prefill_tokens"] + totals["hit_tokens"] == totals["prompt_tokens"]
        assert totals["recompute_tokens"] == totals["resume_hit_tokens"] == 0


def test_random_cases_reach_every_rule():
    reached = Counter()
    for seed in range(300):
        programs, config = strategies.random_case(random.Random(seed))
        result = simulate(programs, config)
        totals = result["totals"]
        reached["preemption"] += totals["preemptions"] > 0
        reached["eviction"] += totals["evicted_blocks"] > 0
        reached["hit"] += totals["hit_tokens"] > 0
        reached["empty schedule"] += totals["empty_schedules"] > 0
        for plane in ("retention", "routing", "admission"):
            reached[config[plane][0]] += 1
        reached[config["scheduling"]] += 1
        reached[config["vllm"]] += 1
        reached["asynchronous"] += config["async_scheduling"]
        reached["wasted tokens"] += totals["wasted_tokens"] > 0
        reached["finish by call"] += "finish" in programs[0]
        for option in ("reserve_full_isl", "watermark", "long_prefill_token_threshold"):
            reached[option, bool(config[option])] += 1
    for name in (*strategies.VLLM, "asynchronous", "wasted tokens", "finish by call"):
        assert reached[name] > 50
    for name, switched in (("reserve_full_isl", False), ("watermark", True)):
        assert 15 < reached[name, switched] < 100
    assert 15 < reached["long_prefill_token_threshold", True] < 100
    assert min(reached[name] for name in ("preemption", "eviction", "hit")) > 15
    for name in (*strategies.RETENTION, *strategies.SCHEDULING, *strategies.ROUTING, *strategies.ADMISSION):
        assert reached[name] > 15


def test_checks_can_fail():
    programs, config = strategies.random_case(random.Random(0))
    simulation = Simulation(programs, config | {"check": True})
    simulation.check()
    simulation.replicas[0].pool.queue.popitem()
    with pytest.raises(AssertionError):
        simulation.check()
