"""Recorded runs of the real vLLM scheduler in virtual time, as input of the simulators.

`tests/golden/*.json.gz` (vLLM 0.19.0, synchronous) hold the workload, the cost model and every call, program
and iteration of each run. More of them, also of vLLM 0.33.0 and of asynchronous scheduling, lie beside the
repository in `SHARED`, if it is there.
"""

import gzip
import json
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "golden"
NAMES = tuple(sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz")))

SHARED = FOLDER.parent.parent.parent / "shared" / "data" / "vllm_scheduler"
SHARED_NAMES = tuple(
    sorted(str(path.relative_to(SHARED).with_suffix("")) for path in SHARED.glob("**/*.json"))
)
"""Such as "p_thrash" and "v0.33_async/g_bfcl_async_eos"; those that are also in `FOLDER` among them."""

SCHEDULING = {"program_arrival": "program_fcfs"}
"""Names of priority functions in the recordings that are called otherwise here."""


def to_ns(seconds):
    """Recorded seconds are whole nanoseconds written as floats."""
    return round(seconds * 1_000_000_000)


def load(name):
    """The recording `name`, as it was written."""
    with gzip.open(FOLDER / f"{name}.json.gz", "rt") as file:
        return json.load(file)


def load_shared(name):
    """The recording `name` of `SHARED_NAMES`."""
    return json.loads((SHARED / f"{name}.json").read_text())


def convert(recording):
    """(programs, config) of a recording, for `simulate`."""
    recorded = recording["config"]
    prefix = recording["system_prefix_tokens"]
    programs = [
        {
            "arrival_ns": to_ns(program["arrival_s"]),
            "prefix": 0 if prefix else None,
            "calls": [(new, output, None, to_ns(gap)) for new, output, gap in program["calls"]],
        }
        for program in recording["programs"]
    ]
    if recorded["policy"] == "fcfs":
        scheduling = "fcfs"
    else:
        function = recorded["priority_fn"] or "zero"
        scheduling = SCHEDULING.get(function, function)
    cost = {name: to_ns(seconds) for name, seconds in recording["cost"].items()}
    config = {
        "kv_blocks": recorded["num_gpu_blocks"] - 1,
        "block_size": recorded["block_size"],
        "max_num_seqs": recorded["max_num_seqs"],
        "max_num_batched_tokens": recorded["max_num_batched_tokens"],
        "max_model_len": recorded["max_model_len"],
        "replicas": 1,
        "prefix_tokens": [prefix] if prefix else [],
        "cost": cost | {"c_prefill": 0, "wakeup": 0},
        "retention": ("lru", {}),
        "scheduling": scheduling,
        "routing": ("round_robin", {}),
        "admission": ("always", {}),
        "vllm": recording["vllm_version"].rpartition(".")[0],
        "async_scheduling": recorded["async_scheduling"],
        "finish": recorded.get("finish", "eos"),
        "reserve_full_isl": recorded["scheduler_reserve_full_isl"],
        "watermark": recorded.get("watermark", 0.0),
        "long_prefill_token_threshold": recorded["long_prefill_token_threshold"],
    }
    return programs, config


def expected(recording):
    """The recorded outcome with the names and units of `simulate`; totals are those both sides have."""
    results = recording["results"]
    calls = []
    for row in results["calls"]:
        (
            _,
            _,
            prompt,
            _,
            priority,
            released,
            scheduled,
            first,
            finished,
            cached,
            preemptions,
            resume,
            service,
        ) = row
        calls.append(
            {
                "prompt": prompt,
                "released": to_ns(released),
                "scheduled": to_ns(scheduled),
                "first_token": to_ns(first),
                "finished": to_ns(finished),
                "cached_tokens": cached,
                "preemptions": preemptions,
                "resume_hit_tokens": resume,
                "service_ns": to_ns(service),
                "priority": priority,
                "replica": 0,
            }
        )
    programs = [
        {"arrival": to_ns(arrival), "finished": to_ns(finished), "service": to_ns(service)}
        for _, arrival, finished, _, service in results["programs"]
    ]
    recorded = results["totals"]
    same = (
        "iterations",
        "empty_schedules",
        "preemptions",
        "prompt_tokens",
        "hit_tokens",
        "resume_hit_tokens",
    )
    totals = {name: recorded[name] for name in (*same, "recompute_tokens", "decode_tokens")}
    totals["prefill_tokens"] = recorded["prefill_tokens_computed"]
    totals["evicted_blocks"] = recorded["cached_blocks_evicted"]
    totals["busy_ns"] = [to_ns(recorded["busy_s"])]
    totals["makespan_ns"] = to_ns(recorded["makespan_s"])
    if "wasted_tokens" in recorded:
        totals["wasted_tokens"] = recorded["wasted_tokens"]
    return {"calls": calls, "programs": programs, "totals": totals}
