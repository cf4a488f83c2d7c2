"""A production coding-agent workload: long contexts, compaction, and tool gaps with a very heavy tail."""

import numpy as np

from agentjax.errors import complaint
from agentjax.workloads.arrivals import gamma
from agentjax.workloads.program import Prefix, Program
from agentjax.workloads.synthetic import (
    Count,
    Floats,
    Ints,
    Positive,
    Seed,
    Share,
    Spread,
    Tokens,
    chain,
    checked,
    lognormal,
    normal,
    refuse_disorder,
    stratified_counts,
    stream,
)


@checked
def production(
    seed: Seed,
    *,
    programs: Count = 50,
    rate: Positive = 0.02,
    arrival_cv: Positive = 1.0,
    calls_median: Positive = 15.0,
    calls_sigma: Spread = 1.75,
    calls_min: Count = 1,
    calls_max: Count = 2000,
    first_median_tokens: Positive = 27_000.0,
    first_sigma: Spread = 0.0,
    growth_median_tokens: Positive = 870.0,
    growth_sigma: Spread = 0.06,
    large_share: Share = 0.065,
    large_min_tokens: Positive = 10_000.0,
    large_max_tokens: Positive = 80_000.0,
    output_median_tokens: Positive = 214.0,
    output_sigma: Spread = 1.2,
    observation_min_tokens: Count = 30,
    gap_median_s: Positive = 0.32,
    gap_sigma: Spread = 2.86,
    gap_max_s: Positive = 14_400.0,
    max_context_tokens: Count = 120_000,
    shared_prefix_tokens: Tokens = 0,
) -> list[Program]:
    """Sessions with the published marginals of TraceLab: 357,161 rounds of Claude Code and Codex.

    - Calls: tool steps of a session, quartiles 4 and 15, p90 135, p99 1,107, here LN(15, 1.75), stratified
      and cut at `calls_max` (mean 69, published 73.6).
    - First prompt: 27K tokens, from one published example; its spread is not known.
    - Growth (output + observation): the median append has 875 tokens, more than 90 % have less than 1K, and
      appends of 10K and more are over 70 % of the mass. The first two leave a narrow body, the last a share
      of large appends, here 6.5 % log-uniform from 10K to 80K; neither shape is published. TraceLab's appends
      include tokens that missed the provider's cache, so that contexts here grow by 3K a call, faster than
      its 1.7K.
    - Compaction: before a prompt exceeds `max_context_tokens` the program falls back to its first prompt and
      goes on from there. TraceLab's sessions compact too; what they keep is not published.
    - Output: LN(214, 1.2), at most the growth less `observation_min_tokens`.
    - Gap: LN(0.32 s, 2.86), cut at 4 h: p50 0.3, p90 12.5, p99 248 s, mean 17 s, 3.4 % over 60 s with 83 % of
      the time (published 0.3, 13.6, 216, 18.4 s, 4.0 %, 84.7 %). Some of TraceLab's long gaps are waits for a
      person. Tools are not told apart.
    - Arrivals: Poisson at `rate` programs per second; not published. `arrival_cv` above 1 gives bursts.

    `shared_prefix_tokens` of the first prompt are the same in all programs (how many is not published: none).
    """
    refuse_disorder("large_min_tokens", large_min_tokens, "large_max_tokens", large_max_tokens)
    counts = stratified_counts(seed, programs, calls_median, calls_sigma, calls_min, calls_max)
    prefix = Prefix("production", shared_prefix_tokens) if shared_prefix_tokens else None

    def growth(p: int) -> Floats:
        calls, rng = int(counts[p]), stream(seed, "growth", p)
        body = lognormal(growth_median_tokens, growth_sigma, rng.standard_normal(calls))
        low, high = np.log((large_min_tokens, large_max_tokens))
        large = np.exp(low + (high - low) * rng.random(calls))
        return np.where(stream(seed, "kind", p).random(calls) < large_share, large, body)

    def program(p: int) -> Program:
        calls = int(counts[p])
        grown = np.maximum(np.rint(growth(p)), 2).astype(int)
        output = np.rint(
            lognormal(output_median_tokens, output_sigma, normal(seed, "output", p, calls))
        ).astype(int)
        output = np.clip(output, 1, np.maximum(1, grown - observation_min_tokens))
        first = int(np.rint(lognormal(first_median_tokens, first_sigma, normal(seed, "first", p, 1))[0]))
        new = np.concatenate([[max(first, shared_prefix_tokens + 1)], (grown - output)[:-1]])
        new, output, kept = _compact(new, output, max_context_tokens)
        gap_s = np.minimum(lognormal(gap_median_s, gap_sigma, normal(seed, "gap", p, calls)), gap_max_s)
        return chain(f"production-{p:04d}", new, output, gap_s, ["tool"] * calls, kept=kept, prefix=prefix)

    return gamma([program(p) for p in range(programs)], rate=rate, cv=arrival_cv, seed=seed)


def _compact(new: Ints, output: Ints, most: int) -> tuple[Ints, Ints, list[int | None]]:
    """Return to the first prompt where a context would exceed `most` tokens; cut what then does not fit."""
    first = int(new[0])
    if first + 2 > most:
        raise complaint(
            "max_context_tokens", str(most), f"at least {first + 2}, for a first prompt of {first} tokens"
        )
    new, output = new.copy(), np.minimum(output, most - first - 1)
    kept: list[int | None] = [None]
    context = first + int(output[0])
    for k in range(1, len(new)):
        if context + new[k] + output[k] > most:
            context = first
            new[k] = min(int(new[k]), most - first - int(output[k]))
            kept.append(first)
        else:
            kept.append(None)
        context += int(new[k] + output[k])
    return new, output, kept
