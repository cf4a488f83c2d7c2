"""The policies of the reference: retention, scheduling, routing and admission, one plain function each."""

import math

NS_PER_S = 1_000_000_000

ENDS_AT_ADMISSION = {"pin"}
"""Retention policies that protect until the program's next call is admitted; all others until its release."""


def tau_ns(params):
    """Protection time of the TTL family, in nanoseconds."""
    return round(params.get("tau_s", 2.0) * NS_PER_S)


def retain(name, params, now, utilization):
    """Keep the context of a completed call? Returns (keep, deadline_ns); deadline None: no protection."""
    if name == "lru":
        return True, None
    if name == "evict":
        return False, None
    if name == "ttl":
        return True, now + tau_ns(params)
    if name == "pressure_ttl":
        low, high = params.get("low", 0.7), params.get("high", 0.9)
        m = min(max((utilization - low) / (high - low), 0.0), 1.0)
        return True, now + round(tau_ns(params) * (1.0 - 0.5 * m))
    if name == "pin":
        return True, math.inf
    raise ValueError(f"unknown retention policy {name!r}")


def priority(name, *, arrival_ns, attained_ns, call_index, uncached_tokens):
    """Priority of a call at its release, smaller first. `uncached_tokens` is a function without arguments."""
    if name in ("fcfs", "zero"):
        return 0
    if name == "program_fcfs":
        return arrival_ns // 1000
    if name == "plas":
        return attained_ns // 1000
    if name == "sjf":
        return uncached_tokens()
    if name == "call_index":
        return call_index
    if name == "reverse_arrival":
        return -(arrival_ns // 1000)
    raise ValueError(f"unknown scheduling policy {name!r}")


def route(name, params, *, releases, home, loads, resident):
    """Replica of a released call.

    `releases`: releases so far; `home`: replica of the program's previous call or None; `loads`: running +
    queued calls of each replica; `resident`: a function, the tokens of the prompt resident on each replica.
    """
    least = min(range(len(loads)), key=lambda replica: (loads[replica], replica))
    if name == "round_robin":
        return releases % len(loads)
    if name == "least_loaded":
        return least
    if name == "session_affinity":
        if home is None or loads[home] >= params["capacity_limit"]:
            return least
        return home
    if name == "most_resident":
        tokens = resident()
        return tokens.index(max(tokens))
    raise ValueError(f"unknown routing policy {name!r}")


def admit(name, params, *, utilization, uncached_tokens, free_tokens, protected):
    """May a waiting call that was never preempted start now? `uncached_tokens` is a function.

    `protected`: its program's context is under a protection on some replica.
    """
    if name == "always":
        return True
    if name == "kv_gate":
        return protected or not (
            utilization > params.get("threshold", 0.9) and uncached_tokens() > free_tokens
        )
    if name == "little_to_compute":
        return uncached_tokens() <= 100
    raise ValueError(f"unknown admission policy {name!r}")
