"""Data-parallel engines that share the experts of a mixture of experts, as one engine.

Such engines exchange tokens in every layer, so all of them begin and end an iteration together, and the
slowest one sets its duration. Replicas of a simulated cluster have clocks of their own. Here the group is one
replica with the seats, token budget and KV blocks of all its engines, and an iteration time of its own:

- calls that decode are evenly spread over the engines;
- the prompt tokens of an iteration are all computed by one engine, if its budget holds them, else by all in
  equal parts: few iterations have more than one new prompt;
- experts and collectives cost what they cost for equal batches of the same number of tokens in all.

What it leaves out: every engine has a prefix cache and seats of its own, here they are common.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from agentjax.cluster import Cluster
from agentjax.errors import complaint
from agentjax.performance import AbstractPerformance, BatchShape, Table
from agentjax.performance.base import Number
from agentjax.performance.profile import ENDS, LAYERS, read_profile

Values = Float[Array, "..."] | Float[np.ndarray, "..."]


class InStep(AbstractPerformance):
    """Iteration time of engines that run in step, for the batch of all of them."""

    engine: Table  # what an engine does alone: all but experts, collectives and overhead
    tokens: Values  # knots: tokens of one engine, all having as many
    shared_ns: Values  # experts and collectives of all layers
    engines: Number
    budget_tokens: Number  # of one engine
    overhead_ns: Number
    wakeup_ns: Number

    def iteration_ns(self, batch: BatchShape) -> Number:
        """Duration of an iteration (ns), not rounded."""
        shared = jnp.interp(batch.tokens / self.engines, self.tokens, self.shared_ns)
        return self.overhead_ns + shared + self.engine.iteration_ns(self._slowest(batch))

    def leap(self, batch: BatchShape, iterations: Number) -> tuple[Number, Number]:
        """As an engine with its part of the calls."""
        return self.engine.leap(self._slowest(batch), iterations)

    def _slowest(self, batch: BatchShape) -> BatchShape:
        """The batch of the engine that computes the prompts."""
        part = jnp.where(batch.prefill_tokens > self.budget_tokens, 1.0 / self.engines, 1.0)
        return BatchShape(
            sequences=batch.sequences / self.engines,
            decode_sequences=batch.decode_sequences / self.engines,
            decode_context_tokens=batch.decode_context_tokens / self.engines,
            decode_context_max_tokens=batch.decode_context_max_tokens,
            prefill_tokens=batch.prefill_tokens * part,
            prefill_context_tokens=batch.prefill_context_tokens * part,
            prefill_work_tokens2=batch.prefill_work_tokens2 * part,
        )


def in_step(cluster: Cluster, performance: Mapping[str, Any]) -> Cluster:
    """The cluster of several replicas with shared experts as one of a single replica.

    Args:
        cluster: one replica an engine, with the performance model that `performance` describes.
        performance: a `performance` configuration of measured operator tables, `expert_parallel` being the
            number of replicas.

    Raises:
        InputError: another kind of performance model, or another number of replicas.
    """
    table = cluster.performance
    if not isinstance(table, Table):
        raise complaint(
            "in_step", "another performance model", "performance=table, as it tells experts apart"
        )
    engines, shares = cluster.replicas, performance.get("expert_parallel")
    if engines < 2 or shares != engines:
        raise complaint(
            "performance.expert_parallel", str(shares), f"{max(engines, 2)}, one a replica that runs in step"
        )
    profile = read_profile(performance["profile"], performance.get("tp"))
    # the table has the attention of all layers, the profile that of one
    layers = round(float(np.max(table.attention_ns) / np.max(profile.attention.times)) * 1e-3)
    tokens = np.asarray(table.tokens)
    alone_us = sum(layers * profile.dense[name].at(tokens) for name in LAYERS[profile.architecture])
    alone_ns = 1e3 * (alone_us + sum(profile.dense[name].at(tokens) for name in ENDS))
    engine = eqx.tree_at(lambda t: (t.tokens_ns, t.overhead_ns), table, (alone_ns, np.asarray(0.0)))
    return replace(
        cluster,
        replicas=1,
        kv_blocks=engines * cluster.kv_blocks,
        max_num_seqs=engines * cluster.max_num_seqs,
        max_num_batched_tokens=engines * cluster.max_num_batched_tokens,
        performance=InStep(
            engine=engine,
            tokens=tokens,
            shared_ns=np.asarray(table.tokens_ns) - alone_ns,
            engines=np.asarray(float(engines)),
            budget_tokens=np.asarray(float(cluster.max_num_batched_tokens)),
            overhead_ns=table.overhead_ns,
            wakeup_ns=table.wakeup_ns,
        ),
    )
