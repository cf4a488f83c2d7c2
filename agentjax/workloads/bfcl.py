"""A BFCL v4 workload: short function-calling programs with small contexts, multi-turn or web search."""

import numpy as np

from agentjax.workloads.arrivals import gamma
from agentjax.workloads.program import Prefix, Program
from agentjax.workloads.synthetic import (
    Count,
    Floats,
    Positive,
    Seed,
    Share,
    Spread,
    Tokens,
    chain,
    checked,
    growth_scales,
    lognormal,
    normal,
    refuse_disorder,
    stratified_counts,
    stream,
)


@checked
def bfcl(
    seed: Seed,
    *,
    programs: Count = 100,
    rate: Positive = 0.06,
    arrival_cv: Positive = 1.0,
    calls_median: Positive = 5.5,
    calls_sigma: Spread = 0.7,
    calls_min: Count = 1,
    calls_max: Count = 100,
    web_share: Share = 0.0,
    output_median_tokens: Positive = 70.0,
    output_sigma: Spread = 0.5,
    output_last_factor: Positive = 3.0,
    observation_min_tokens: Count = 30,
    turns_first_tokens: Count = 4700,
    turns_growth_low_tokens: Tokens = 60,
    turns_growth_high_tokens: Tokens = 280,
    turns_gap_median_s: Positive = 0.002,
    turns_gap_sigma: Spread = 0.5,
    web_first_tokens: Count = 1100,
    web_growth_median_tokens: Positive = 1000.0,
    web_growth_sigma: Spread = 1.0,
    web_page_share: Share = 0.2,
    web_page_tokens: Positive = 17_000.0,
    web_gap_median_s: Positive = 1.0,
    web_gap_sigma: Spread = 1.0,
    gap_max_s: Positive = 60.0,
    max_context_tokens: Count = 120_000,
    shared_prefix_tokens: Tokens = 0,
) -> list[Program]:
    """Programs as far as BFCL v4 and AgentServeSim's figures pin them down, which is weakly.

    - Calls: median 5.5 over 100 programs (AgentServeSim); sigma 0.7 gives 7.0 a program, as inferred for its
      20-program cells. Stratified, so that every draw of 100 has median 5.5.
    - Multi-turn programs begin with 4.7K tokens of function schemas and grow (output + observation) by 60 to
      280 tokens a call, drawn uniformly; their functions run in process, within milliseconds.
    - Web-search programs begin with 1.1K tokens; 80 % of their calls add search results of about 1K tokens,
      20 % a page of 17K. Their gaps are not published: about a second is our assumption.
    - The share of web search is not published. AgentServeSim's JCT on BFCL is the same for every KV pool, so
      its contexts are small: 0 is the default, since pages of 17K tokens would make them large.
    - Output: lognormal, median 70 tokens, three times as much in the last call, the answer. It always fits:
      an observation has at least `observation_min_tokens`, also where that makes a call grow by more than was
      drawn.
    - A program that would exceed `max_context_tokens` has its growth scaled down to fit.
    - Arrivals: Poisson at `rate` programs per second (0.02 to 0.1 in AgentServeSim), gamma if `arrival_cv` is
      not 1.

    `shared_prefix_tokens` of the first prompt are the same in all programs of a kind (how many is not
    published: none).
    """
    refuse_disorder(
        "turns_growth_low_tokens",
        turns_growth_low_tokens,
        "turns_growth_high_tokens",
        turns_growth_high_tokens,
    )
    counts = stratified_counts(seed, programs, calls_median, calls_sigma, calls_min, calls_max)
    web = stream(seed, "kind").permutation(programs) < round(web_share * programs)
    firsts = np.maximum(np.where(web, web_first_tokens, turns_first_tokens), shared_prefix_tokens + 1)

    def outputs(p: int) -> Floats:
        output = lognormal(output_median_tokens, output_sigma, normal(seed, "output", p, int(counts[p])))
        output[-1] *= output_last_factor
        return np.maximum(np.rint(output), 1)

    def growth(p: int) -> Floats:
        calls, rng = int(counts[p]), stream(seed, "growth", p)
        if not web[p]:
            low, high = turns_growth_low_tokens, turns_growth_high_tokens
            return rng.uniform(low, high, calls)
        results = lognormal(web_growth_median_tokens, web_growth_sigma, rng.standard_normal(calls))
        return np.where(pages(p), web_page_tokens, results)

    def pages(p: int) -> np.ndarray:
        return stream(seed, "kind", p + 1).random(int(counts[p])) < web_page_share

    drawn = [outputs(p) for p in range(programs)]
    growths = [np.maximum(growth(p), drawn[p] + observation_min_tokens) for p in range(programs)]
    scales = growth_scales(firsts, growths, max_context_tokens, None)

    def program(p: int) -> Program:
        output = np.maximum(np.rint(scales[p] * drawn[p]), 1).astype(int)
        observation = np.maximum(np.rint(scales[p] * growths[p]) - output, 1).astype(int)
        new = np.concatenate([firsts[p : p + 1], observation[:-1]])
        median_s, sigma = (
            (web_gap_median_s, web_gap_sigma) if web[p] else (turns_gap_median_s, turns_gap_sigma)
        )
        gap_s = np.minimum(lognormal(median_s, sigma, normal(seed, "gap", p, int(counts[p]))), gap_max_s)
        tools = np.where(pages(p), "fetch", "search").tolist() if web[p] else ["function"] * int(counts[p])
        kind = "bfcl-web" if web[p] else "bfcl-turns"
        prefix = Prefix(kind, shared_prefix_tokens) if shared_prefix_tokens else None
        return chain(f"bfcl-{p:04d}", new, output, gap_s, tools, prefix=prefix)

    return gamma([program(p) for p in range(programs)], rate=rate, cv=arrival_cv, seed=seed)
