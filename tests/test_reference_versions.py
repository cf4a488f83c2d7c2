"""The reference's rules of newer vLLM versions and of asynchronous scheduling.

Against recorded runs, against plain rules that equal them, and in small cases.
"""

import importlib.util
import random
from collections import Counter

import pytest

from tests import strategies
from tests.reference import golden
from tests.test_reference import check_against, field, program
from tests.test_reference import run as run_small

# Recordings and rules beside the repository

RULES = golden.SHARED / "check_semantics_033.py"
shared = pytest.mark.skipif(not RULES.exists(), reason=f"{golden.SHARED} is not there")


OTHERS = [name for name in golden.SHARED_NAMES if name not in golden.NAMES]


@pytest.mark.parametrize("name", OTHERS or [pytest.param("none", marks=shared)])
def test_equals_the_recorded_vllm_run(name):
    check_against(golden.load_shared(name))


@shared
def test_recordings_of_every_kind_are_there():
    folders = Counter(name.rpartition("/")[0] for name in golden.SHARED_NAMES)
    assert folders == {"": 13, "v0.19_async": 2, "v0.33": 10, "v0.33_async": 8}


@pytest.fixture(scope="module")
def rules():
    """The module with plain rules of both versions, block by block, which equal the recordings."""
    spec = importlib.util.spec_from_file_location("check_semantics_033", RULES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RULES["0.24.0"] = module.RULES["0.33.0"] | {"self_victim_ends_pass": True}
    module.RULES["0.19.0"]["victim_index_bug"] = False
    return module


def random_workload(rng, version, asynchronous, finish):
    """A random workload in the form of a recording: small pools, coarse times, one shared prefix for all."""
    block_size = rng.choice((4, 16))
    prefix = rng.choice((0, 0, 3, 2 * block_size, 37))
    longest_new, longest_output = rng.choice((20, 60, 200)), rng.choice((1, 8, 60, 200))
    programs, blocks = [], 0
    for _ in range(rng.randint(1, 12)):
        calls, context = [], prefix
        for _ in range(rng.randint(1, 5)):
            new, output = strategies.tokens(rng, block_size, longest_new), rng.randint(1, longest_output)
            context += new + output
            calls.append([new, output, rng.choice((0, 0.01, rng.randint(0, 40) / 100))])
        blocks = max(blocks, -(-(context - 1) // block_size))
        programs.append({"arrival_s": rng.choice((0, rng.randint(0, 50) / 100)), "calls": calls})
    seats = rng.randint(1, 12)
    priorities = ["call_index", "program_arrival", "zero", "reverse_arrival", None, None]
    if not asynchronous or finish == "max_tokens":
        # Else a call may be released while a batch with a wasted token of its program runs: here its priority
        # is that of its release, there that of the end of the batch.
        priorities += ["plas", "plas"]
    priority = rng.choice(priorities)
    return {
        "vllm_version": version,
        "system_prefix_tokens": prefix,
        "programs": programs,
        "cost": {
            "c0": 0.01,
            "c_tok": rng.choice((0, 2e-5)),
            "c_seq": rng.choice((0, 2e-5)),
            "c_kv": rng.choice((0, 1e-8)),
        },
        "config": {
            "block_size": block_size,
            "num_gpu_blocks": 1 + blocks + rng.choice((0, 1, 3, rng.randint(0, 3 * blocks))),
            "max_num_seqs": seats,
            "max_num_batched_tokens": rng.randint(seats, rng.choice((32, 100, 512))),
            "max_model_len": 131_072,
            "policy": "priority" if priority else "fcfs",
            "priority_fn": priority,
            "async_scheduling": asynchronous,
            "finish": finish,
            "watermark": rng.choice((0.0, 0.0, 0.0, 0.05, 0.2)),
            "scheduler_reserve_full_isl": True,
            "long_prefill_token_threshold": 0,
        },
        "iter_log_max": 10**9,
        "trace_max": 10**9,
    }


@shared
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("version", ["0.19.0", "0.24.0", "0.33.0"])
def test_equals_the_plain_rules(rules, version, asynchronous):
    reached = Counter()
    for seed in range(60):
        rng = random.Random(f"{version} {asynchronous} {seed}")
        finish = rng.choice(("eos", "max_tokens"))
        recording = random_workload(rng, version, asynchronous, finish)
        recording["results"] = rules.simulate(recording)
        check_against(recording)
        totals = recording["results"]["totals"]
        reached["preemptions"] += totals["preemptions"] > 0
        reached["evictions"] += totals["cached_blocks_evicted"] > 0
        reached["wasted tokens"] += totals.get("wasted_tokens", 0) > 0
    assert min(reached["preemptions"], reached["evictions"]) > 10
    assert (reached["wasted tokens"] > 20) == asynchronous


# Small cases worked out by hand, as in test_reference.py: blocks of 4 tokens, 10 ns an iteration.


def run(programs, cost=None, log=None, **changes):
    """Simulate a small case with vLLM 0.33 and all invariants checked."""
    return run_small(programs, cost, log, **{"vllm": "0.33"} | changes)


# Versions


@pytest.mark.parametrize(
    ("version", "queue"),
    [("0.19", [3, 4, 5, 6, 2, 1]), ("0.24", [2, 3, 4, 5, 6, 1]), ("0.33", [2, 3, 4, 5, 6, 1])],
)
def test_blanks_go_to_the_head(version, queue):
    # 6 tokens computed: block 1 is full, block 2 is not.
    assert run([program(0, (6, 1, 0))], kv_blocks=6, vllm=version)["final_free_queue"] == [queue]


@pytest.mark.parametrize(
    ("version", "queue"), [("0.19", [4, 5, 3, 2, 1]), ("0.24", [3, 2, 1, 4, 5]), ("0.33", [3, 2, 1, 4, 5])]
)
def test_what_is_not_kept_goes_to_the_head(version, queue):
    result = run([program(0, (12, 1, 0))], kv_blocks=5, vllm=version, retention=("evict", {}))
    assert result["final_free_queue"] == [queue]
    assert result["final_cached_blocks"] == [[]]


@pytest.mark.parametrize(("version", "evicted"), [("0.19", 0), ("0.24", 2), ("0.33", 2)])
@pytest.mark.parametrize("retention", ["lru", "ttl", "pin"])
def test_compaction_leaves_content_that_nobody_finds(version, evicted, retention):
    # As test_compaction_leaves_blanks in test_reference.py: 4 blocks, all full; call 2 keeps 2 of them and
    # takes the other two, whose content nobody finds.
    programs = [program(0, (16, 1, 5), (4, 1, 9, 5), (1, 1, 0))]
    result = run(programs, kv_blocks=4, vllm=version, retention=(retention, {}))
    assert field(result, "cached_tokens") == [0, 8, 12]
    assert result["totals"]["evicted_blocks"] == evicted


@pytest.mark.parametrize(("version", "finished"), [("0.19", 50), ("0.24", 50), ("0.33", 40)])
def test_pass_1_goes_on_after_its_own_victim(version, finished):
    # 10 us an iteration, 6 blocks; the earliest arrival is the victim. V (0-10) makes the others wait; at 10
    # A and X start in this order, at 20 Y. At 30 each has 2 blocks, and X needs a third one: it is its own
    # victim. Y, behind it, computes its last token in this step, or in the next one.
    a, x, y = program(2_000, (5, 3, 0)), program(1_000, (7, 5, 0)), program(11_000, (5, 2, 0))
    log = []
    programs = [program(0, (1, 1, 0)), a, x, y]
    result = run(
        programs, cost={"c0": 10_000}, kv_blocks=6, scheduling="reverse_arrival", vllm=version, log=log
    )
    assert [entry["preempted"] for entry in log if entry["start_ns"] == 30_000] == [[(2, 0)]]
    assert field(result, "finished")[1] == 40_000
    assert field(result, "finished")[3] == finished * 1000
    assert result["totals"]["empty_schedules"] == 0


# What else may be configured


@pytest.mark.parametrize(("new", "scheduled"), [(20, 10), (24, 50)])
def test_watermark(new, scheduled):
    # 10 blocks: floor(0.2 * 11) = 2 are to be left. A has 3 until 50. At 10 B needs 5 of 7 blocks, or 6 of
    # them: too many while A runs.
    result = run([program(0, (8, 5, 0)), program(1, (new, 1, 0))], kv_blocks=10, watermark=0.2)
    assert field(result, "scheduled") == [0, scheduled]


@pytest.mark.parametrize(("reserve", "scheduled"), [(True, 70), (False, 20)])
def test_reserve_full_isl(reserve, scheduled):
    # 10 blocks, 9 tokens a batch. At 20 A computes the last 6 of its 24 tokens, and 4 blocks are left: enough
    # for the first 3 tokens of B, not for all its 20. A ends at 70.
    result = run(
        [program(0, (24, 5, 0)), program(1, (20, 1, 0))],
        kv_blocks=10,
        max_num_batched_tokens=9,
        reserve_full_isl=reserve,
    )
    assert field(result, "scheduled") == [0, scheduled]


@pytest.mark.parametrize(("version", "alone"), [("0.19", 20), ("0.24", 20), ("0.33", 10)])
def test_long_prefill_token_threshold(version, alone):
    limits = {"vllm": version, "long_prefill_token_threshold": 4}
    assert field(run([program(0, (8, 1, 0))], **limits), "finished") == [alone]
    log = []
    run([program(0, (8, 1, 0)), program(0, (6, 1, 0))], log=log, **limits)
    assert [entry["batch"] for entry in log] == [[(0, 0, 4, 0), (1, 0, 4, 0)], [(0, 0, 4, 4), (1, 0, 2, 4)]]


# Asynchronous scheduling. A call of output o that is alone ends after o iterations; with "eos" one more
# follows.


@pytest.mark.parametrize(
    ("finish", "gap", "released", "finished", "wasted", "makespan"),
    [
        (["eos", "eos"], 0, 50, 70, 2, 80),  # batch 50-60: wasted; it was formed at 40
        (["eos", "eos"], 5, 55, 70, 2, 80),  # seen at 60
        (["eos", "eos"], 20, 70, 80, 2, 90),
        (["eos", "max_tokens"], 0, 50, 70, 1, 70),
        (["max_tokens", "eos"], 0, 50, 60, 1, 70),
        (["max_tokens", "max_tokens"], 0, 50, 60, 0, 60),
        (["max_tokens", "max_tokens"], 5, 55, 65, 0, 65),
    ],
)
def test_one_program(finish, gap, released, finished, wasted, makespan):
    one = program(0, (8, 5, gap), (4, 1, 0)) | {"finish": finish}
    result = run([one], async_scheduling=True)
    assert field(result, "released") == [0, released]
    assert field(result, "first_token") == [10, finished]
    assert field(result, "finished") == [50, finished]
    assert field(result, "cached_tokens") == [0, 12]
    assert field(result, "service_ns") == [50 + 10 * (finish[0] == "eos"), 10 + 10 * (finish[1] == "eos")]
    assert field(result, "longest_gap") == [10, -1]
    assert result["token_gaps"] == {10: 4}
    assert (result["totals"]["wasted_tokens"], result["totals"]["makespan_ns"]) == (wasted, makespan)
    assert result["programs"] == [
        {"arrival": 0, "finished": finished, "service": sum(field(result, "service_ns"))}
    ]


@pytest.mark.parametrize(("most", "wasted"), [(13, 0), (14, 1)])
def test_the_server_knows_the_longest_context(most, wasted):
    result = run([program(0, (8, 5, 0))], async_scheduling=True, max_model_len=most)
    assert result["totals"]["wasted_tokens"] == wasted


@pytest.mark.parametrize(("finish", "empty"), [("eos", 1), ("max_tokens", 2)])
def test_schedules_without_tokens(finish, empty):
    # eos: when the call has finished, at 20. max_tokens: at 10, when its last token is in flight, and at 20.
    result = run([program(0, (8, 2, 0))], async_scheduling=True, finish=finish)
    assert result["totals"]["empty_schedules"] == empty


def test_a_call_waits_for_the_batch_that_was_formed_before_it_came():
    # B comes at 1. At 10 it joins the batch that starts at 20, when the first token of A is there already.
    result = run([program(0, (8, 5, 0)), program(1, (4, 1, 0))], async_scheduling=True)
    assert field(result, "scheduled") == [0, 10]
    assert field(result, "first_token") == [10, 30]


def test_wake_up_of_batches_formed_early():
    result = run([program(0, (4, 2, 5), (4, 1, 0))], async_scheduling=True, cost={"wakeup": 7})
    # 0-17, 17-27, wasted 27-37; the second call, of 32, is seen at 37: no pause.
    assert field(result, "finished") == [27, 47]
    result = run([program(0, (4, 2, 11), (4, 1, 0))], async_scheduling=True, cost={"wakeup": 7})
    assert field(result, "finished") == [27, 38 + 17]


@pytest.mark.parametrize(("gap", "priority"), [(0, 10), (5_000, 10), (10_000, 20), (20_000, 20)])
def test_wasted_service_is_attained_at_the_end_of_its_batch(gap, priority):
    # 10,000 ns an iteration; the wasted one is 10,000-20,000.
    result = run(
        [program(0, (8, 1, gap), (4, 1, 0))], cost={"c0": 10_000}, scheduling="plas", async_scheduling=True
    )
    assert field(result, "priority") == [0, priority]


@pytest.mark.parametrize("retention", ["lru", "ttl", "pin", "evict"])
def test_a_preempted_call_may_finish_while_it_waits(retention):
    # 2 blocks, all computed in 0-10. Also at 0 the call would need a third block for the token behind its
    # last one, of which the server does not know that it is wasted: preempted. At 10 its token comes and ends
    # it.
    programs = [program(0, (8, 1, 100)), program(50, (4, 1, 0))]
    result = run(programs, kv_blocks=2, async_scheduling=True, retention=(retention, {}))
    assert field(result, "preemptions") == [1, 0]
    assert field(result, "finished") == [10, 60]
    assert result["totals"]["wasted_tokens"] == 8 + 1
    assert (
        result["totals"]["evicted_blocks"] == 2
    )  # the second call's wasted token takes the last block of them
    assert field(result, "cached_tokens") == [0, 0]


def test_a_block_filled_in_flight_has_no_content_when_its_call_is_preempted():
    # 4 blocks, 2 for each of A and B. Batches 0-10 (6 tokens each), 10-20 and 20-30 (a token each). At 20 A
    # is passed over, as its last token is in flight, and B, which needs a third block, is its own victim. Its
    # 8th token, in flight, fills a block; but when that batch was formed, at 10, the token was not known. So
    # at 30, when A has ended, B finds one block and not two.
    a, b = program(0, (6, 3, 0)) | {"finish": ["max_tokens"]}, program(0, (6, 8, 0))
    result = run([a, b], kv_blocks=4, async_scheduling=True)
    assert field(result, "finished")[0] == 30
    assert field(result, "preemptions") == [0, 1]
    assert field(result, "resume_hit_tokens") == [0, 4]


def test_two_replicas_at_one_instant():
    # Both replicas end at 10. Replica 0 completes A, whose next call is released at once: round robin sends
    # it to replica 0 too, where the wasted token of A runs until 20.
    programs = [program(0, (8, 1, 0), (4, 1, 0)), program(0, (8, 3, 0))]
    result = run(programs, replicas=2, async_scheduling=True)
    assert field(result, "replica") == [0, 0, 1]
    assert field(result, "scheduled") == [0, 10, 0]
    assert field(result, "finished") == [10, 30, 30]
    assert result["totals"]["busy_ns"] == [40, 40]


def test_slots_are_synchronous():
    with pytest.raises(ValueError, match="synchronous"):
        run([program(0, (8, 1, 0))], slots=True, block_size=1, async_scheduling=True)
