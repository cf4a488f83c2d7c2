"""A SWE-bench workload: one coding agent that works on an issue in a sandbox."""

import numpy as np

from agentjax.workloads.arrivals import gamma
from agentjax.workloads.program import Prefix, Program
from agentjax.workloads.synthetic import (
    Correlation,
    Count,
    Positive,
    Seed,
    Share,
    Spread,
    Target,
    Tokens,
    chain,
    checked,
    growth_scales,
    lognormal,
    normal,
    stratified_counts,
    stream,
)


@checked
def swebench(
    seed: Seed,
    *,
    programs: Count = 50,
    rate: Positive = 0.02,
    arrival_cv: Positive = 1.0,
    calls_median: Positive = 47.0,
    calls_sigma: Spread = 0.634,
    calls_min: Count = 2,
    calls_max: Count = 250,
    first_floor_tokens: Tokens = 1250,
    first_median_tokens: Positive = 400.0,
    first_sigma: Spread = 0.8,
    growth_mean_tokens: Positive = 287.0,
    growth_sigma: Spread = 1.06,
    observation_min_tokens: Count = 30,
    output_median_tokens: Positive = 52.0,
    output_sigma: Spread = 0.94,
    output_growth_correlation: Correlation = 0.55,
    gap_python_share: Share = 0.22,
    gap_shell_median_s: Positive = 0.19,
    gap_shell_sigma: Spread = 0.15,
    gap_python_median_s: Positive = 0.45,
    gap_python_sigma: Spread = 2.15,
    gap_max_s: Positive = 60.0,
    max_context_tokens: Count = 120_000,
    context_tokens_per_call: Target = 13_470.0,
    shared_prefix_tokens: Tokens = 0,
) -> list[Program]:
    """Programs with the published totals of AgentServeSim's SWE-bench trace, shaped like mini-SWE-agent's.

    - Calls: 50 programs, median 47, 2,873 in all (AgentServeSim), hence lognormal with sigma sqrt(2 ln(57.46
      / 47)); at most 250, the step limit. Stratified, so that every draw of 50 has median 47 and 2,872 calls.
    - Context: 38.7 M prompt tokens over all calls (AgentServeSim), 13,470 a call. Independent draws spread by
      20 % around it, so that the growth of each draw is scaled to meet it (`context_tokens_per_call` None:
      not scaled).
    - First prompt and growth (output + observation): lognormals of 500 mini-SWE-agent runs on SWE-bench
      Verified (sigma of growth 1.06, no trend along the run). The mean growth, 583 there, is 287 here to
      centre the total.
    - Output: lognormal after 21 calls of the trace (median 52, mean 81 tokens), never more than the growth
      less `observation_min_tokens`, at least 1. With growth drawn apart from output this bound would cut the
      median to 38; in the 500 runs their logarithms correlate by 0.55, which keeps it at 45 and the mean at
      70.
    - Gap: not published for this trace. Shell commands, and a share of slower Python and test runs, by the
      medians and means of timed SWE-smith trajectories; mini-SWE-agent stops a command at 60 s. Mean 0.85 s,
      standard deviation 4.3 s; AgentServeSim's public leaderboard traces have 0.87 s and 4.1 s.
    - Arrivals: Poisson at `rate` programs per second (0.02 to 0.1 in AgentServeSim), gamma if `arrival_cv` is
      not 1.

    `shared_prefix_tokens` of the first prompt are the same in all programs (how many is not published: none).
    """
    counts = stratified_counts(seed, programs, calls_median, calls_sigma, calls_min, calls_max)
    prefix = Prefix("swebench", shared_prefix_tokens) if shared_prefix_tokens else None

    issues = np.array([normal(seed, "first", p, 1)[0] for p in range(programs)])
    firsts = np.rint(first_floor_tokens + lognormal(first_median_tokens, first_sigma, issues)).astype(int)
    firsts = np.maximum(firsts, shared_prefix_tokens + 1)
    sizes = [normal(seed, "growth", p, n) for p, n in enumerate(counts)]
    growth_median_tokens = growth_mean_tokens * np.exp(-(growth_sigma**2) / 2)
    growths = [lognormal(growth_median_tokens, growth_sigma, z) for z in sizes]
    scales = growth_scales(firsts, growths, max_context_tokens, context_tokens_per_call)

    def program(p: int) -> Program:
        calls = int(counts[p])
        growth = np.maximum(np.rint(scales[p] * growths[p]), 2).astype(int)
        z = output_growth_correlation * sizes[p]
        z = z + np.sqrt(1 - output_growth_correlation**2) * normal(seed, "output", p, calls)
        output = np.rint(lognormal(output_median_tokens, output_sigma, z)).astype(int)
        output = np.clip(output, 1, np.maximum(1, growth - observation_min_tokens))
        new = np.concatenate([firsts[p : p + 1], (growth - output)[:-1]])

        python = stream(seed, "kind", p).random(calls) < gap_python_share
        z = normal(seed, "gap", p, calls)
        python_s = lognormal(gap_python_median_s, gap_python_sigma, z)
        shell_s = lognormal(gap_shell_median_s, gap_shell_sigma, z)
        gap_s = np.minimum(np.where(python, python_s, shell_s), gap_max_s)
        tools = np.where(python, "python", "shell").tolist()
        return chain(f"swebench-{p:04d}", new, output, gap_s, tools, prefix=prefix)

    return gamma([program(p) for p in range(programs)], rate=rate, cv=arrival_cv, seed=seed)
