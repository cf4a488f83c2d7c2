"""The padded arrays of one lane, and what they are made from.

Axes: `programs` P of the workload; `threads` T, the rows of the window of programs in flight; `replicas` R;
`prefixes` G; `extents` E = T + G, the KV contents that may lie idle on a replica: one a row, then one a
shared prefix. Times are int64 nanoseconds, tokens and blocks int32.
"""

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

from agentjax.performance.base import AbstractPerformance
from agentjax.policies.policy import IndexedPolicy, PolicySpace

NEVER = 2**62
"""A time that never comes (ns)."""
FOREVER = 2**61
"""Deadline of a protection without end (ns); later than any time, so that it still sorts."""
LONGEST = 2**60
"""No instant of a run is later (ns): a run that gets there is at fault."""
UNPROTECTED = -1
"""Deadline of an extent without protection."""
OUTSIDE = 2**31 - 1
"""Queue key of an extent that is not in the free queue."""

WAITING, QUEUED, RUNNING, DONE = range(4)
"""Status of a row: before a release (arrival or tool gap), in a replica's queue, admitted, past its last call
or never used."""
IDLE, DECIDING, BUSY, COMPLETING = range(4)
"""Replica phase: nothing to do, at an iteration boundary, inside a leap, at the end of a leap with calls
left to complete."""
FINE, DEADLOCKED, STALLED, CUT, BAD_PRIORITY, BAD_ROUTE, BAD_RETENTION, TOO_LONG = range(8)
"""How a lane ended; a lane that is at fault does nothing more."""

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
    "longest_gap",
)
"""Columns of the call records."""
PROGRAM_RECORD = ("finished", "service")
"""Columns of the program records."""


class Traffic(eqx.Module):
    """The workloads of all lanes, stacked; read-only, shared, indexed by `Lane.workload`."""

    programs: Int[Array, " workloads"]  # the rest is padding
    order: Int[Array, "workloads programs"]  # programs by arrival, ties by index
    arrival: Int[Array, "workloads programs"]
    first_call: Int[Array, "workloads programs"]  # index into the calls
    calls: Int[Array, "workloads programs"]  # number of calls; 0 for padding
    prefix: Int[Array, "workloads programs"]  # shared prefix, -1 for none
    prefix_tokens: Int[Array, "workloads prefixes"]
    new_tokens: Int[Array, "workloads calls"]
    output_tokens: Int[Array, "workloads calls"]
    kept_tokens: Int[Array, "workloads calls"]  # of the context before; -1 for all
    gap: Int[Array, "workloads calls"]  # tool gap after the call
    eos: Bool[Array, "workloads calls"]  # the end is seen only when the last token is there


class Limits(eqx.Module):
    """Limits of every replica and the rules of its scheduler; traced."""

    replicas: Int[Array, ""]  # in use, the rest is padding
    kv_blocks: Int[Array, ""]
    block_size: Int[Array, ""]
    max_num_seqs: Int[Array, ""]
    max_num_batched_tokens: Int[Array, ""]
    max_model_len: Int[Array, ""]
    long_prefill_tokens: Int[Array, ""]  # most tokens of a chunk
    watermark_blocks: Int[Array, ""]
    reserve_full_isl: Bool[Array, ""]
    blanks_first: Bool[Array, ""]  # vLLM 0.24: blanks go to the head of the free queue
    goes_on: Bool[Array, ""]  # vLLM 0.33: pass 1 goes on behind a call that preempted itself
    until: Int[Array, ""]  # nothing later than this instant happens


class Lane(eqx.Module):
    """One configuration: everything a sweep may vary, traced."""

    workload: Int[Array, ""]
    limits: Limits
    policy: IndexedPolicy
    performance: AbstractPerformance


class Shape(eqx.Module):
    """What fixes array shapes and the traced program; static."""

    programs: int = eqx.field(static=True)
    threads: int = eqx.field(static=True)  # rows of the window
    reuses: bool = eqx.field(static=True)  # by one program after another; else program p has row p
    replicas: int = eqx.field(static=True)
    prefixes: int = eqx.field(static=True)
    calls: int = eqx.field(static=True)
    slots: int = eqx.field(static=True)  # of a replica; 0: contexts live in the block pool
    policies: PolicySpace = eqx.field(static=True)
    asynchronous: bool = eqx.field(static=True)
    compacts: bool = eqx.field(static=True)  # a call may keep less than all of its context
    chunked: bool = eqx.field(static=True)  # several running calls may be within their prompts
    leaps: bool = eqx.field(static=True)
    records: bool = eqx.field(static=True)
    gaps: bool = eqx.field(static=True)
    checks: bool = eqx.field(static=True)
    series: bool = eqx.field(static=True)

    @property
    def protects(self) -> bool:
        """Whether any context is ever protected."""
        return any(member.trait("protects") for member in self.policies.retention)

    @property
    def extents(self) -> int:
        """E = T + G."""
        return self.threads + self.prefixes


class Flight(eqx.Module):
    """Asynchronous scheduling: what a row has in the batch that runs, beside the one that is formed."""

    tokens: Int[Array, " threads"]  # 0: not in it
    samples: Bool[Array, " threads"]  # the batch samples a token of the call
    blind: Bool[Array, " threads"]  # it was formed before the token it computes was known
    eos: Bool[Array, " threads"]  # the current call ends by EOS
    wasted: Int[Array, " threads"]  # ns of the batch that ran on after the last call had ended
    wasted_until: Int[Array, " threads"]  # end of that batch


class Gaps(eqx.Module):
    """Times between the tokens of a row's current call."""

    last: Int[Array, " threads"]  # instant of the last token, -1 before the first
    longest: Int[Array, " threads"]  # -1: none yet
    pending: Int[Array, " threads"]  # a gap that is no iteration's duration, not told yet; 0: none


class Threads(eqx.Module):
    """One program in flight a row; most fields describe its current call."""

    status: Int[Array, " threads"]
    wake: Int[Array, " threads"]  # next release; NEVER unless WAITING
    program: Int[Array, " threads"]  # -1: none yet
    call: Int[Array, " threads"]  # index of the current call (WAITING: the next one)
    turn: Int[Array, " threads"]  # calls completed
    replica: Int[Array, " threads"]  # of the current or last call, -1 before the first
    priority: Int[Array, " threads"]  # as `sortable` gives it
    order: Int[Array, " threads"]  # place in the queue after priority
    prompt: Int[Array, " threads"]
    known: Int[Array, " threads"]  # prompt + sampled tokens
    computed: Int[Array, " threads"]  # tokens with KV, advanced when scheduled
    output_left: Int[Array, " threads"]
    scheduled: Int[Array, " threads"]  # tokens in the iteration formed last, 0 if not in it
    admitted: Int[Array, " threads"]  # sequence number of admission: the order of the running list
    service: Int[Array, " threads"]  # ns, over all calls
    service_before: Int[Array, " threads"]  # ns, at release of the current call
    released: Int[Array, " threads"]
    first_scheduled: Int[Array, " threads"]  # -1 until then
    first_token: Int[Array, " threads"]  # -1 until then
    cached: Int[Array, " threads"]  # tokens found at first admission
    resumed: Int[Array, " threads"]  # tokens found at re-admissions
    preemptions: Int[Array, " threads"]
    flight: Flight | None
    gaps: Gaps | None


class Pool(eqx.Module):
    """The KV blocks of a replica that no running call uses, as counts; a leading axis holds all replicas.

    The free queue: `fresh` blanks at its head, then `head` spent blocks, then the extents in order of `key`,
    each behind its `spent` blocks, then `tail` spent blocks. Spent blocks are those that no call can find:
    up to vLLM 0.23 blanks, from 0.24 on content that has no use any more. A row's resident KV is a prefix of
    its context, because blocks are freed and reclaimed last first: a count says it all. An extent is in the
    queue (`key` < OUTSIDE) or protected (`deadline` >= 0).
    """

    blocks: Int[Array, "*replicas extents"]  # private; of a shared prefix: resident ones, in use or not
    key: Int[Array, "*replicas extents"]
    spent: Int[Array, "*replicas extents"]
    deadline: Int[Array, "*replicas extents"]
    users: Int[Array, "*replicas prefixes"]  # running calls above each shared prefix
    guards: Int[Array, "*replicas prefixes"]  # protected contexts above each shared prefix
    fresh: Int[Array, "*replicas"]
    head: Int[Array, "*replicas"]
    tail: Int[Array, "*replicas"]
    free: Int[Array, "*replicas"]  # length of the free queue
    protected: Int[Array, "*replicas"]  # blocks
    owed: Int[Array, "*replicas"]  # blocks handed out but not yet taken from the queue
    victim: Int[Array, "*replicas"]  # extent to reclaim from next, -1 for none
    stamp: Int[Array, "*replicas"]  # the latest key
    evicted: Int[Array, "*replicas"]  # blocks with content reclaimed so far


class Ahead(eqx.Module):
    """Asynchronous scheduling: the batch that a replica runs while it forms the next one."""

    runs: Bool[Array, "*replicas"]
    end: Int[Array, "*replicas"]  # of that batch, or of the last one
    told: Bool[Array, "*replicas"]  # no call has completed since the last schedule()


class Replica(eqx.Module):
    """One engine; a leading axis holds all replicas."""

    phase: Int[Array, "*replicas"]
    pool: Pool
    running: Int[Array, "*replicas"]  # calls
    queued: Int[Array, "*replicas"]  # calls
    # the iteration being formed
    passed: Bool[Array, "*replicas"]  # pass 1 is over
    preempted: Bool[Array, "*replicas"]  # something was preempted in this schedule()
    preempting: Int[Array, "*replicas"]  # row to preempt next, -1 for none
    chunk: Int[Array, "*replicas"]  # tokens of the prefill that calls are preempted for, -1 for none
    # the running leap
    start: Int[Array, "*replicas"]
    end: Int[Array, "*replicas"]
    lead: Int[Array, "*replicas"]  # ns until the batch ends that was formed before; 0 if synchronous
    iterations: Int[Array, "*replicas"]
    first_ns: Float[Array, "*replicas"]  # duration of the first iteration formed in it
    next_ns: Float[Array, "*replicas"]  # duration of the second
    growth_ns: Float[Array, "*replicas"]  # increment from then on
    booked: Int[Array, "*replicas"]  # blocks of later iterations that are taken from the pool already
    breaking: Bool[Array, "*replicas"]  # the leap's victim is a protected context
    head_priority: Int[Array, "*replicas"]  # of the call at the head of the queue at launch
    busy: Int[Array, "*replicas"]  # ns in iterations so far
    ahead: Ahead | None


class Slots(eqx.Module):
    """What the slots of each replica hold, where contexts live in slots and not in the block pool."""

    owner: Int[Array, "replicas slots"]  # program of the last call that ran in it, -1 for none
    prefix: Int[Array, "replicas slots"]  # shared prefix of that program, -1 for none
    matching: Int[Array, "replicas slots"]  # tokens of the content that still agree with its context
    used: Int[Array, "replicas slots"]  # order of the last use
    stamp: Int[Array, ""]  # of the next


class Totals(eqx.Module):
    """Counters of the whole lane."""

    arrivals: Int[Array, ""]
    releases: Int[Array, ""]
    admissions: Int[Array, ""]
    completions: Int[Array, ""]
    iterations: Int[Array, ""]
    empty_schedules: Int[Array, ""]
    preemptions: Int[Array, ""]
    hits: Int[Array, ""]  # tokens found at first admissions
    recomputed: Int[Array, ""]  # prefill tokens of preempted calls
    wasted: Int[Array, ""]  # tokens of calls that had ended or were preempted when their batch ended
    steps: Int[Array, ""]  # steps that did something


class State(eqx.Module):
    """Everything that evolves."""

    now: Int[Array, ""]
    threads: Threads
    replicas: Replica
    slots: Slots | None
    totals: Totals
    records: Int[Array, "calls_and_one columns"] | None
    programs: Int[Array, "programs_and_one columns"]
    fault: Int[Array, ""]
    crowded: Bool[Array, ""]  # a program has arrived and no row is free: the window must grow
