"""Random small workloads and configurations, in the form `tests.reference.simulator.simulate` takes.

`random_case(rng)` is the core; `cases()` is the hypothesis strategy over it. `random_slot_case` and
`slot_cases` are the same for replicas with slots.
"""

import random

from hypothesis import strategies as st

MS = 1_000_000

RETENTION = ("lru", "evict", "ttl", "pressure_ttl", "pin")
SCHEDULING = ("fcfs", "program_fcfs", "plas", "sjf")
TEST_SCHEDULING = ("call_index", "reverse_arrival", "zero")
ROUTING = ("round_robin", "least_loaded", "session_affinity")
ADMISSION = ("always", "kv_gate")
VLLM = ("0.19", "0.24", "0.33", "0.33")
ASYNC_SCHEDULING = (False, True)
FINISH = ("eos", "max_tokens", "mixed")
RESERVE_FULL_ISL = (True, True, False)
WATERMARK = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.2)
LONG_PREFILL_TOKEN_THRESHOLD = (0, 0, 0, 0, 0, 0, 0, 5, 16, 50)

SLOTS = {
    "vllm": ("0.33",),
    "async_scheduling": (False,),
    "finish": ("eos",),
    "reserve_full_isl": (True,),
    "watermark": (0.0,),
    "long_prefill_token_threshold": (0,),
}
"""The options of replicas with slots, which know no others."""


def random_case(
    rng: random.Random,
    *,
    retention=RETENTION,
    scheduling=SCHEDULING + TEST_SCHEDULING,
    routing=ROUTING,
    admission=ADMISSION,
    vllm=VLLM,
    async_scheduling=ASYNC_SCHEDULING,
    finish=FINISH,
    reserve_full_isl=RESERVE_FULL_ISL,
    watermark=WATERMARK,
    long_prefill_token_threshold=LONG_PREFILL_TOKEN_THRESHOLD,
    kept_below_prefix=False,
    prefix_twice=False,
):
    """A random (programs, config): 1-8 programs, 1-6 calls, 1-3 replicas, roomy pools to thrashing ones.

    The keyword arguments narrow the policies and options drawn; with finish "mixed" each call has its own, in
    program["finish"]. kept_below_prefix lets compaction cut into the shared prefix; prefix_twice lets
    several calls compute the same shared prefix side by side, as they may do with a threshold.
    """
    block_size = rng.choice((16, 16, 16, 4))
    prefix_tokens = [tokens(rng, block_size, 200) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    unit_ns = rng.choice((1, MS, 10 * MS))  # coarse times make ties
    cost = _cost(rng, unit_ns)
    longest_output = rng.choice((1, 8, 30, 30, 60, 200))
    longest_new = rng.choice((20, 20, 60, 200, 200))
    most_calls = rng.choice((2, 4, 6, 6))
    compacts = rng.random() < 0.35
    programs = []
    most_blocks = longest_context = all_blocks = 0
    arrivals = _arrivals(rng, rng.randint(1, 8), unit_ns, cost["c0"])
    for arrival in arrivals:
        prefix = rng.randrange(len(prefix_tokens)) if prefix_tokens and rng.random() < 0.8 else None
        shared = context = 0 if prefix is None else prefix_tokens[prefix]
        calls = []
        program_blocks = 0
        for index in range(rng.randint(1, most_calls)):
            new = tokens(rng, block_size, longest_new)
            output = rng.randint(1, longest_output)
            kept = None
            if compacts and index and rng.random() < 0.4:
                kept = rng.randint(0 if kept_below_prefix else shared, context)
                if rng.random() < 0.3:
                    kept = max(kept - kept % block_size, 0 if kept_below_prefix else shared)
                if rng.random() < 0.1:
                    kept = context + 5  # more than there is: everything
                context = min(kept, context)
            context += new + output
            calls.append((new, output, kept, _gap(rng, unit_ns, cost["c0"])))
            program_blocks = max(program_blocks, -(-(context - 1) // block_size))
            longest_context = max(longest_context, context)
        most_blocks = max(most_blocks, program_blocks)
        all_blocks += program_blocks
        programs.append({"arrival_ns": arrival, "prefix": prefix, "calls": calls})
    room = rng.choice(("thrashing", "thrashing", "tight", "tight", "roomy"))
    if room == "thrashing":
        kv_blocks = most_blocks + rng.randint(0, 3)
    elif room == "tight":
        kv_blocks = rng.randint(most_blocks, all_blocks)
    else:
        kv_blocks = all_blocks + rng.randint(1, 50)
    config = {
        "kv_blocks": kv_blocks,
        "block_size": block_size,
        "max_num_seqs": rng.randint(1, 8),
        "max_num_batched_tokens": rng.choice((8, 16, 32, 33, 64, 100, 256, 512, rng.randint(8, 512))),
        "max_model_len": longest_context if rng.random() < 0.1 else 131_072,
        "replicas": rng.choice((1, 1, 1, 2, 2, 3)),
        "prefix_tokens": prefix_tokens,
        "cost": cost,
        "retention": _retention(rng, rng.choice(retention)),
        "scheduling": rng.choice(scheduling),
        "routing": _routing(rng, rng.choice(routing)),
        "admission": _admission(rng, rng.choice(admission)),
        "vllm": rng.choice(vllm),
        "async_scheduling": rng.choice(async_scheduling),
        "finish": rng.choice(finish),
        "reserve_full_isl": rng.choice(reserve_full_isl),
        "watermark": rng.choice(watermark),
        "long_prefill_token_threshold": rng.choice(long_prefill_token_threshold),
    }
    if _may_go_on_for_ever(programs, config["scheduling"]):
        config["reserve_full_isl"] = True
    if prefix_tokens and not prefix_twice:
        config["long_prefill_token_threshold"] = 0
    if config["finish"] == "mixed":
        config["finish"] = "eos"
        for program in programs:
            program["finish"] = [rng.choice(("eos", "max_tokens")) for _ in program["calls"]]
    return programs, config


def random_slot_case(rng: random.Random, **narrow):
    """As `random_case`, on replicas of 1-6 slots; often what is shared is about a tenth of a prompt."""
    programs, config = random_case(rng, retention=("lru",), **SLOTS, **narrow)
    slots = rng.randint(1, 6)
    near = rng.random() < 0.5
    longest = 0
    for program in programs:
        prefix = program["prefix"]
        context = shared = 0 if prefix is None else config["prefix_tokens"][prefix]
        for turn, (new, output, kept, gap) in enumerate(program["calls"]):
            most = context if kept is None or not turn else min(kept, context)
            if near and turn and rng.random() < 0.5:
                kept = most = rng.randint(min(shared, most), min(most, shared + 20))
            if near and most and rng.random() < 0.5:
                new = max(1, 9 * min(most, 40) + rng.randint(-1, 1))
            context = most + new + output
            longest = max(longest, context)
            program["calls"][turn] = (new, output, kept, gap)
    slot_tokens = longest + rng.choice((0, 0, 1, rng.randint(0, 500)))
    return programs, config | {
        "slots": True,
        "block_size": 1,
        "max_num_seqs": slots,
        "kv_blocks": slots * slot_tokens + rng.randrange(slots),
        "max_model_len": longest if rng.random() < 0.1 else 131_072,
    }


def slot_cases(**narrow):
    """Hypothesis strategy over `random_slot_case`."""
    return st.randoms(use_true_random=False).map(lambda rng: random_slot_case(rng, **narrow))


def cases(**narrow):
    """Hypothesis strategy over `random_case`."""
    return st.randoms(use_true_random=False).map(lambda rng: random_case(rng, **narrow))


def tokens(rng, block_size, most):
    kind = rng.random()
    if kind < 0.3:
        return block_size * rng.randint(1, max(1, most // block_size))
    if kind < 0.4:
        return 1
    return rng.randint(1, most)


def _arrivals(rng, count, unit_ns, c0):
    spread = rng.choice((0, 1, 5, 50)) * c0
    arrivals = [rng.randint(0, spread) // unit_ns * unit_ns for _ in range(count)]
    if rng.random() < 0.3:
        arrivals[rng.randrange(count)] = arrivals[0]
    if rng.random() < 0.5:
        arrivals.sort()
    return arrivals


def _gap(rng, unit_ns, c0):
    kind = rng.random()
    if kind < 0.2:
        return 0
    most = rng.choice((2 * c0, 10 * c0, 100 * c0, 4_000 * MS))
    return rng.randint(0, most) // unit_ns * unit_ns


def _cost(rng, unit_ns):
    cost = {"c0": rng.randint(1, 50) * MS, "c_tok": 0, "c_seq": 0, "c_kv": 0, "c_prefill": 0.0, "wakeup": 0}
    if rng.random() < 0.75:
        cost["c_tok"] = rng.randint(0, 200_000)
        cost["c_seq"] = rng.randint(0, 200_000)
        cost["c_kv"] = rng.randint(0, 500)
    if rng.random() < 0.3:
        cost["c_prefill"] = rng.choice((0.5, 1.0, 20.0, round(rng.uniform(0, 50), 3)))
    if rng.random() < 0.3:
        cost["wakeup"] = rng.choice((unit_ns, 60 * MS, rng.randint(0, 100 * MS)))
    return cost


def _may_go_on_for_ever(programs, scheduling):
    """Could two calls preempt each other again and again, where a prompt is admitted before all of it fits?

    Of two equal calls the one admitted earlier is the victim, so that neither may ever get its whole prompt.
    """
    if scheduling == "fcfs":
        return False
    arrivals = {program["arrival_ns"] // 1000 for program in programs}
    return scheduling not in ("program_fcfs", "reverse_arrival") or len(arrivals) < len(programs)


def _retention(rng, name):
    if name == "ttl":
        return name, {"tau_s": rng.choice((2.0, 2.0, 0.05, 0.5, 10.0))}
    if name == "pressure_ttl":
        low = rng.choice((0.7, 0.7, 0.2))
        return name, {"tau_s": rng.choice((2.0, 2.0, 0.05, 0.5)), "low": low, "high": rng.choice((0.9, 0.8))}
    return name, {}


def _routing(rng, name):
    return (name, {"capacity_limit": rng.randint(1, 6)}) if name == "session_affinity" else (name, {})


def _admission(rng, name):
    return (name, {"threshold": rng.choice((0.9, 0.9, 0.7, 0.5, 0.0))}) if name == "kv_gate" else (name, {})
