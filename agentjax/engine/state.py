"""The padded arrays of one lane, and what they are made from.

Axes: `programs` P; `threads` T = P·J (thread t belongs to program t // J; the two axes are stored as one, so
that choosing a thread is one argmin); `replicas` R; `extents` E = T + G, the KV contents that may lie idle
on a replica: one per thread, then one per shared prefix. Times are int64 nanoseconds, tokens and blocks
int32.
"""

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

from agentjax.performance.base import AbstractPerformance
from agentjax.policies.policy import Policy, PolicySpace

NEVER = 2**62
"""A time that never comes (ns), and the queue key of an extent that is not in the free queue."""
FOREVER = 2**61
"""Deadline of a protection without end (ns); later than any time, so that it still sorts."""
UNPROTECTED = -1
"""Deadline of an extent without protection."""

WAITING, QUEUED, RUNNING, DONE = range(4)
"""Thread status: before a release (arrival or tool gap), in a replica's queue, admitted, past its last
call."""
IDLE, DECIDING, BUSY, COMPLETING = range(4)
"""Replica phase: nothing to do, at an iteration boundary, inside a leap, at the end of a leap with calls
left to complete."""

RECORD = (
    "released",
    "scheduled",
    "first_token",
    "finished",
    "service",
    "cached",
    "preemptions",
    "resumed",
    "replica",
)
"""Columns of the call records."""


class Traffic(eqx.Module):
    """The workloads of all lanes, stacked; read-only, shared, indexed by `Lane.workload`."""

    arrival: Int[Array, "workloads programs"]
    first_call: Int[Array, "workloads threads"]  # index into the calls
    calls: Int[Array, "workloads threads"]  # number of calls; 0 for padding
    prefix: Int[Array, "workloads threads"]  # shared prefix, -1 for none
    prefix_tokens: Int[Array, "workloads prefixes"]
    new_tokens: Int[Array, "workloads calls"]
    output_tokens: Int[Array, "workloads calls"]
    kept_tokens: Int[Array, "workloads calls"]  # of the context before; -1 for all
    gap: Int[Array, "workloads calls"]  # tool gap after the call


class Limits(eqx.Module):
    """Limits of every replica; traced."""

    replicas: Int[Array, ""]  # in use, the rest is padding
    kv_blocks: Int[Array, ""]
    block_size: Int[Array, ""]
    max_num_seqs: Int[Array, ""]
    max_num_batched_tokens: Int[Array, ""]


class Lane(eqx.Module):
    """One configuration: everything a sweep may vary, traced."""

    workload: Int[Array, ""]
    limits: Limits
    policy: Policy
    performance: AbstractPerformance


class Shape(eqx.Module):
    """What fixes array shapes and the traced program; static."""

    programs: int = eqx.field(static=True)
    threads_per_program: int = eqx.field(static=True)
    replicas: int = eqx.field(static=True)
    prefixes: int = eqx.field(static=True)
    calls: int = eqx.field(static=True)
    slots: int = eqx.field(static=True)  # of a replica; 0: contexts live in the block pool
    policies: PolicySpace = eqx.field(static=True)
    leaps: bool = eqx.field(static=True)
    records: bool = eqx.field(static=True)
    checks: bool = eqx.field(static=True)
    series: bool = eqx.field(static=True)

    @property
    def threads(self) -> int:
        """T = P·J."""
        return self.programs * self.threads_per_program


class Threads(eqx.Module):
    """One thread of calls a row; the first block of fields describes its current call."""

    status: Int[Array, " threads"]
    wake: Int[Array, " threads"]  # next release; NEVER unless WAITING
    call: Int[Array, " threads"]  # index of the current call (WAITING: the next one)
    turn: Int[Array, " threads"]  # calls completed
    replica: Int[Array, " threads"]  # of the current or last call, -1 before the first
    priority: Float[Array, " threads"]
    order: Int[Array, " threads"]  # place in the queue after priority
    prompt: Int[Array, " threads"]
    known: Int[Array, " threads"]  # prompt + sampled tokens
    computed: Int[Array, " threads"]  # tokens with KV, advanced when scheduled
    output_left: Int[Array, " threads"]
    scheduled: Int[Array, " threads"]  # tokens in the iteration being formed or run, 0 if not in it
    admitted: Int[Array, " threads"]  # sequence number of admission: the order of the running list
    service: Int[Array, " threads"]  # ns, over all calls
    service_before: Int[Array, " threads"]  # ns, at release of the current call
    released: Int[Array, " threads"]
    first_scheduled: Int[Array, " threads"]  # -1 until then
    first_token: Int[Array, " threads"]  # -1 until then
    finished: Int[Array, " threads"]
    cached: Int[Array, " threads"]  # tokens found at first admission
    resumed: Int[Array, " threads"]  # tokens found at re-admissions
    preemptions: Int[Array, " threads"]


class Extents(eqx.Module):
    """KV content that no running call uses, as counts: in the free queue (`key` < NEVER) or protected
    (`deadline` >= 0).

    A thread's resident KV is a prefix of its context because blocks are freed and reclaimed last first.
    `blanks` are the blocks without content queued between the next older extent and this one.
    """

    blocks: Int[
        Array, "replicas extents"
    ]  # private blocks; of a shared prefix: resident blocks, in use or not
    key: Int[Array, "replicas extents"]
    blanks: Int[Array, "replicas extents"]
    deadline: Int[Array, "replicas extents"]


class Prefixes(eqx.Module):
    """Reference counts of the shared prefixes."""

    running: Int[Array, "replicas prefixes"]
    protected: Int[Array, "replicas prefixes"]


class Slots(eqx.Module):
    """What the slots of each replica hold, where contexts live in slots and not in the block pool."""

    owner: Int[Array, "replicas slots"]  # thread of the last call that ran in it, -1 for none
    prefix: Int[Array, "replicas slots"]  # shared prefix of that thread, -1 for none
    matching: Int[Array, "replicas slots"]  # tokens of the content that still agree with the thread's context
    used: Int[Array, "replicas slots"]  # order of the last use
    stamp: Int[Array, ""]  # of the next


class Replicas(eqx.Module):
    """One engine a row."""

    phase: Int[Array, " replicas"]
    # the block pool
    fresh: Int[Array, " replicas"]  # blanks at the head of the free queue
    tail: Int[Array, " replicas"]  # blanks newer than every extent
    free: Int[Array, " replicas"]  # length of the free queue
    protected: Int[Array, " replicas"]  # blocks
    owed: Int[Array, " replicas"]  # blocks handed out but not yet taken from the queue
    victim: Int[Array, " replicas"]  # extent to reclaim from next, -1 for none
    # the iteration being formed
    passed: Bool[Array, " replicas"]  # pass 1 is over
    preempted: Bool[Array, " replicas"]  # something was preempted in this schedule()
    running: Int[Array, " replicas"]  # calls
    queued: Int[Array, " replicas"]  # calls
    preempting: Int[Array, " replicas"]  # thread to preempt next, -1 for none
    chunk: Int[Array, " replicas"]  # tokens of the prefill that calls are preempted for, -1 for none
    # the running leap
    start: Int[Array, " replicas"]
    end: Int[Array, " replicas"]
    iterations: Int[Array, " replicas"]
    first_ns: Float[Array, " replicas"]  # duration of the first iteration
    next_ns: Float[Array, " replicas"]  # duration of the second
    growth_ns: Float[Array, " replicas"]  # increment from then on
    booked: Int[
        Array, " replicas"
    ]  # blocks of the leap's later iterations that are taken from the pool already
    breaking: Bool[Array, " replicas"]  # the leap's victim is a protected context
    head_priority: Float[Array, " replicas"]  # of the call at the head of the queue at launch; inf: none
    busy: Int[Array, " replicas"]  # ns in iterations so far


class Totals(eqx.Module):
    """Counters of the whole lane."""

    releases: Int[Array, ""]
    admissions: Int[Array, ""]
    stamp: Int[Array, ""]  # order of joining the free queue
    iterations: Int[Array, ""]
    empty_schedules: Int[Array, ""]
    preemptions: Int[Array, ""]
    hits: Int[Array, ""]  # tokens found at first admissions
    recomputed: Int[Array, ""]  # prefill tokens of preempted calls
    evicted: Int[Array, ""]  # blocks with content reclaimed
    steps: Int[Array, ""]  # steps that did something


class State(eqx.Module):
    """Everything that evolves."""

    now: Int[Array, ""]
    threads: Threads
    extents: Extents
    prefixes: Prefixes
    slots: Slots | None
    replicas: Replicas
    totals: Totals
    records: Int[Array, "calls_and_one columns"] | None
    stuck: Bool[Array, ""]
