"""Reference simulator of `docs/semantics.md`: block by block, one iteration at a time, plain Python.

`simulate(programs, config)`; no numpy, no jax, no leaps. Times are integer nanoseconds.

programs: list of dicts
    arrival_ns: int
    prefix: int | None            index into config["prefix_tokens"]
    calls: list of (new_tokens, output_tokens, kept_tokens | None, gap_ns); kept_tokens is the part of the
           *previous* call's context that this call keeps (None: all), gap_ns the tool gap after this call
    finish: list of "eos" | "max_tokens", one per call (default: config["finish"] for all)

config: dict
    kv_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, replicas
    prefix_tokens: [int, ...]
    cost: dict(c0, c_tok, c_seq, c_kv, c_prefill, wakeup), nanoseconds
    retention, routing, admission: (name, params); scheduling: name
    vllm: the version whose rules hold, a key of `VERSIONS` (default "0.33")
    async_scheduling: a batch is formed while the one before it runs (default False)
    finish: how a call ends: "eos" (default): the server sees it in the last token; "max_tokens": it knows the
            length in advance, as it always does if that is max_model_len. Only matters to async_scheduling
    reserve_full_isl: a call is admitted only if its whole prompt fits, not just a first chunk (default True)
    watermark: fraction of the blocks that an admission leaves free while other calls run (default 0.0)
    long_prefill_token_threshold: most tokens of one call in one batch (default 0: no such limit)
    slots: each replica has slots as in llama.cpp's server instead of blocks, see `slots.py` (default False)
    check: verify every invariant after every event (default False; slow)
"""

import heapq
from collections import Counter, deque
from dataclasses import dataclass

from . import policies
from .blocks import FORGOTTEN, Context, Pool


@dataclass(frozen=True)
class Version:
    """What distinguishes the versions of vLLM."""

    blanks_first: bool  # blanks that are given back go to the head of the free queue, not to its tail
    goes_on_after_self: bool  # pass 1 goes on after a call that was its own victim; else it ends there
    lone_call_unlimited: bool  # long_prefill_token_threshold is not for a call that is alone on its replica


VERSIONS = {
    "0.19": Version(blanks_first=False, goes_on_after_self=False, lone_call_unlimited=False),
    "0.24": Version(blanks_first=True, goes_on_after_self=False, lone_call_unlimited=False),
    "0.33": Version(blanks_first=True, goes_on_after_self=True, lone_call_unlimited=True),
}


class Call:
    """One call from its release on."""

    def __init__(self, program, index, prompt, output, released, context, length_known):
        self.program = program
        self.index = index
        self.prompt = prompt
        self.output = output
        self.released = released
        self.context = context
        self.length_known = length_known  # to the server, before the last token is there
        self.known = prompt  # prompt tokens and tokens sampled so far
        self.computed = 0  # tokens whose computation was scheduled
        self.ahead = 0  # tokens that batches formed so far will sample, asynchronous only
        self.in_flight = 0  # tokens in batches that have not ended
        self.stale = 0  # those of them that were in flight when the call was last preempted
        self.blocks = []
        self.named = 0  # of them, that have content
        self.priority = 0
        self.replica = None
        self.scheduled = None
        self.first_token = None
        self.last_token = None
        self.longest_gap = -1  # between two of its tokens
        self.finished = None
        self.cached_tokens = None
        self.preemptions = 0
        self.resume_hit_tokens = 0
        self.service_ns = 0

    @property
    def sampled(self):
        """Tokens sampled so far."""
        return self.known - self.prompt

    def order(self):
        """Place in a priority queue."""
        return (self.priority, self.released, self.program)


@dataclass
class Entry:
    """A call in a batch, with what was known of it when the batch was formed."""

    call: Call
    n: int  # tokens
    before: int  # computed before
    decode: bool
    samples: bool  # the batch samples a token for it
    preemptions: int


@dataclass
class Batch:
    """What one `schedule()` has decided."""

    entries: list
    preempted: list
    scheduled: int  # when
    duration: int  # without the wake-up


class Replica:
    """One engine: its blocks, its calls and its batches."""

    def __init__(self, index, pool):
        self.index = index
        self.pool = pool
        self.running = []  # in order of admission
        self.waiting = []  # front first
        self.formed = deque()  # batches, oldest first; the first one runs, if `runs`
        self.runs = False  # an iteration is in progress
        self.started = None
        self.ends = None  # end of the iteration in progress, or of the last one
        self.flush = False  # asynchronous: a call has finished since the last schedule()
        self.waiting_seen = 0  # calls that waited at the last schedule() and have not finished
        self.busy_ns = 0


def simulate(programs, config, log=None):
    """Run the programs to their end. Returns calls, programs, totals and the final blocks of each replica.

    log: a list; one dict is appended for each finished iteration.
    """
    from .slots import SlotSimulation  # here, because it builds on this module

    if config.get("slots", False) and config.get("async_scheduling", False):
        raise ValueError("slots are synchronous")
    kind = SlotSimulation if config.get("slots", False) else Simulation
    simulation = kind(programs, config, log)
    simulation.run()
    return simulation.result()


def ceil_div(a, b):
    """Smallest integer >= a / b."""
    return -(-a // b)


class Simulation:
    """The state of a whole run."""

    def __init__(self, programs, config, log=None):
        self.programs = programs
        self.config = config
        self.log = log
        self.version = VERSIONS[config.get("vllm", "0.33")]
        self.asynchronous = config.get("async_scheduling", False)
        self.block_size = config["block_size"]
        self.watermark = int(config.get("watermark", 0.0) * (config["kv_blocks"] + 1))
        self.retention, self.retention_params = config["retention"]
        self.routing, self.routing_params = config["routing"]
        self.admission, self.admission_params = config["admission"]
        self.scheduling = config["scheduling"]
        self.fcfs_queue = self.scheduling == "fcfs"
        self.replicas = [Replica(index, self.new_pool()) for index in range(config["replicas"])]
        prefix_tokens = config.get("prefix_tokens", [])
        self.contexts = []
        self.context_tokens = []  # of each program: its shared prefix, later prompt + output
        for index, program in enumerate(programs):
            tokens = 0 if program["prefix"] is None else prefix_tokens[program["prefix"]]
            self.contexts.append(Context(index, program["prefix"], tokens // self.block_size))
            self.context_tokens.append(tokens)
        self._refuse_impossible_calls()
        self.attained_ns = [0] * len(programs)
        self.home = [None] * len(programs)
        self.finished = [None] * len(programs)
        self.calls = {}
        self.releases = [(program["arrival_ns"], index, 0) for index, program in enumerate(programs)]
        heapq.heapify(self.releases)
        self.released_calls = 0
        self.now = None
        self.totals = dict.fromkeys(
            (
                "iterations",
                "empty_schedules",
                "preemptions",
                "prompt_tokens",
                "hit_tokens",
                "resume_hit_tokens",
                "recompute_tokens",
                "prefill_tokens",
                "decode_tokens",
                "wasted_tokens",
            ),
            0,
        )
        self.token_gaps = Counter()

    def new_pool(self):
        """The KV blocks of one replica, all of them free."""
        return Pool(self.config["kv_blocks"], self.block_size, self.version.blanks_first)

    def fits(self, context_tokens):
        """Can a call of so many prompt and output tokens ever run on a replica?"""
        return ceil_div(context_tokens - 1, self.block_size) <= self.config["kv_blocks"]

    def _refuse_impossible_calls(self):
        for p, program in enumerate(self.programs):
            context = self.context_tokens[p]
            for k, (new, output, kept, _) in enumerate(program["calls"]):
                prompt = self._kept_tokens(k, kept, context) + new
                context = prompt + output
                if not self.fits(context) or context > self.config["max_model_len"]:
                    raise ValueError(
                        f"program {p}, call {k}: {prompt} prompt + {output} output tokens can never fit"
                    )

    @staticmethod
    def _kept_tokens(call_index, kept, context_tokens):
        if call_index == 0 or kept is None:
            return context_tokens
        return min(kept, context_tokens)

    # Section 2: the events of one instant

    def run(self):
        """Go from event to event until nothing is left to do."""
        while True:
            times = [replica.ends for replica in self.replicas if replica.runs]
            if self.releases:
                times.append(self.releases[0][0])
            if not times:
                break
            assert self.now is None or min(times) > self.now, "time goes forward"
            self.now = min(times)
            for replica in self.replicas:
                if replica.runs and replica.ends == self.now:
                    self.end_iteration(replica)
                    self.check()
            while self.releases and self.releases[0][0] == self.now:
                _, p, k = heapq.heappop(self.releases)
                self.release(p, k)
                self.check()
            for replica in self.replicas:
                if not replica.runs:
                    self.go_on(replica)
                    self.check()
        assert None not in self.finished, "every program finishes"

    def end_iteration(self, replica):
        """Credit the calls, sample tokens, complete the calls that have all their output."""
        batch, duration = replica.formed.popleft(), replica.ends - replica.started
        replica.runs = False
        wasted = 0
        for entry in batch.entries:
            call = entry.call
            call.service_ns += duration
            self.attained_ns[call.program] += duration
            if call.finished is not None or call.preemptions > entry.preemptions:
                wasted += entry.n
            if entry.decode:
                self.totals["decode_tokens"] += entry.n
            else:
                self.totals["prefill_tokens"] += entry.n
                if entry.preemptions:
                    self.totals["recompute_tokens"] += entry.n
        self.totals["wasted_tokens"] += wasted
        for entry in batch.entries:
            self.receive(replica, entry)
        if self.log is not None:
            self.log.append(
                {
                    "replica": replica.index,
                    "scheduled_ns": batch.scheduled,
                    "start_ns": replica.started,
                    "duration_ns": duration,
                    "batch": [(e.call.program, e.call.index, e.n, e.before) for e in batch.entries],
                    "wasted_tokens": wasted,
                    "free_blocks": replica.pool.free,
                    "running": len(replica.running),
                    "waiting": replica.waiting_seen,
                    "preempted": [(call.program, call.index) for call in batch.preempted],
                }
            )

    def receive(self, replica, entry):
        """The output of one call in a batch that has ended."""
        call = entry.call
        call.in_flight -= entry.n
        stale = call.stale > 0
        if stale:  # the call was preempted meanwhile; its token counts all the same
            call.stale -= entry.n
        if call.finished is not None or not entry.samples:
            return
        call.known += 1
        if self.asynchronous and not stale:
            call.ahead -= 1
            self.name_blocks(replica.pool, call, call.computed - call.in_flight)
        if call.first_token is None:
            call.first_token = self.now
        else:
            gap = self.now - call.last_token
            self.token_gaps[gap] += 1
            call.longest_gap = max(call.longest_gap, gap)
        call.last_token = self.now
        if call.sampled == call.output:
            self.complete(replica, call)

    def complete(self, replica, call):
        """The call has ended. It may wait: then it was preempted while its last token was in flight."""
        p, k = call.program, call.index
        calls = self.programs[p]["calls"]
        last = k + 1 == len(calls)
        self.give_back(replica.pool, call, last)
        if call in replica.running:
            assert call.computed - call.in_flight == call.known - 1
            replica.running.remove(call)
        else:
            assert not call.blocks and not call.computed
            replica.waiting.remove(call)
            replica.waiting_seen -= 1
        replica.flush = self.asynchronous
        call.finished = self.now
        self.context_tokens[p] = call.prompt + call.output
        if last:
            self.finished[p] = self.now
        else:
            heapq.heappush(self.releases, (self.now + calls[k][3], p, k + 1))

    def give_back(self, pool, call, last):
        """Section 5: the blocks of a call that has ended go where retention says."""
        full = (call.known - 1) // self.block_size
        keep, deadline = policies.retain(self.retention, self.retention_params, self.now, pool.utilization)
        if not keep:
            for block in call.blocks[call.context.shared_blocks :]:
                pool.clear_name(block)
        elif deadline is not None and not last:
            pool.protect(call.context, call.blocks[:full], deadline)
        pool.give_back(call.blocks)
        call.blocks, call.named = [], 0

    def release(self, p, k):
        """Route, prioritise, end the protection, cut, queue."""
        new, output, kept, _ = self.programs[p]["calls"][k]
        context, context_tokens = self.contexts[p], self.context_tokens[p]
        kept = self._kept_tokens(k, kept, context_tokens)
        finish = self.programs[p].get("finish")
        finish = self.config.get("finish", "eos") if finish is None else finish[k]
        length_known = finish == "max_tokens" or kept + new + output == self.config["max_model_len"]
        call = Call(p, k, kept + new, output, self.now, context, length_known)
        self.calls[p, k] = call
        self.totals["prompt_tokens"] += call.prompt
        most = min(call.prompt - 1, kept)
        call.replica = policies.route(
            self.routing,
            self.routing_params,
            releases=self.released_calls,
            home=self.home[p],
            loads=[len(replica.running) + len(replica.waiting) for replica in self.replicas],
            resident=lambda: [self.resident_tokens(replica.pool, call, most) for replica in self.replicas],
        )
        replica = self.replicas[call.replica]
        self.home[p] = call.replica
        self.released_calls += 1

        def uncached_tokens():
            return call.prompt - self.resident_tokens(replica.pool, call, most)

        call.priority = policies.priority(
            self.scheduling,
            arrival_ns=self.programs[p]["arrival_ns"],
            attained_ns=self.attained_ns[p],
            call_index=k,
            uncached_tokens=uncached_tokens,
        )
        self.unprotect_and_cut(context, kept, context_tokens)
        replica.waiting.append(call)
        if not self.fcfs_queue:
            replica.waiting.sort(key=Call.order)

    def unprotect_and_cut(self, context, kept, context_tokens):
        """At release: the protection of a context ends, and of its blocks those of the kept tokens remain."""
        for other in self.replicas:
            if self.retention not in policies.ENDS_AT_ADMISSION:
                other.pool.end_protection(context.program)
        if kept < context_tokens:
            first = kept // self.block_size
            for other in self.replicas:
                other.pool.cut(context, first, ceil_div(context_tokens, self.block_size))
            context.shared_blocks = min(context.shared_blocks, first)

    def resident_tokens(self, pool, call, most):
        """What a call would find if it were admitted now, at most so many tokens. Touches nothing."""
        return len(pool.lookup(call.context, most // self.block_size)) * self.block_size

    def go_on(self, replica):
        """At a boundary: form batches, at most two if asynchronous, else one, and start the oldest of them.

        A batch without tokens takes no time, but it has a place among the batches.
        """
        formed, depth = replica.formed, 2 if self.asynchronous else 1
        while True:
            if replica.running or replica.waiting or replica.flush:
                formed.append(self.form(replica))
                if len(formed) < depth and (formed[-1].entries or replica.running or replica.waiting):
                    continue
            if not formed or formed[0].entries:
                break
            formed.popleft()
        replica.waiting_seen = len(replica.waiting)
        if formed:
            duration = formed[0].duration
            if replica.ends is None or replica.ends < self.now:
                duration += self.config["cost"]["wakeup"]
            replica.runs = True
            replica.started, replica.ends = self.now, self.now + duration
            replica.busy_ns += duration
            self.totals["iterations"] += 1

    def form(self, replica):
        """The batch of one `schedule()`, perhaps without tokens."""
        batch, preempted = self.schedule(replica)
        self.totals["preemptions"] += len(preempted)
        duration = 0
        if batch:
            duration = self.iteration_ns(batch)
        else:
            in_flight = any(earlier.entries for earlier in replica.formed)
            assert preempted or in_flight or replica.flush, "no progress"
            self.totals["empty_schedules"] += 1
        replica.flush = False
        entries = []
        for call, n, before in batch:
            decode = self.is_decode(call, before)
            samples = call.computed == call.known + call.ahead
            entries.append(Entry(call, n, before, decode, samples, call.preemptions))
            call.in_flight += n
            if self.asynchronous and samples:
                call.ahead += 1
        self.check()
        return Batch(entries, preempted, self.now, duration)

    # Section 4: schedule()

    def schedule(self, replica):
        """One `schedule()`. Returns the batch, a list of [call, tokens, computed before], and the victims."""
        pool, running, block_size = replica.pool, replica.running, self.block_size
        budget = self.config["max_num_batched_tokens"]
        longest = self.longest_chunk(replica)
        batch, preempted = [], []

        # Pass 1: running calls in order of admission.
        position = 0
        while position < len(running) and budget > 0:
            call = running[position]
            if call.length_known and call.sampled + call.ahead == call.output:
                position += 1  # its last token is in flight
                continue
            n = self.chunk(call, call.computed, min(budget, longest))
            needed = max(0, ceil_div(call.computed + n, block_size) - len(call.blocks))
            while needed > pool.available:
                victim = self.victim(running)
                if running.index(victim) < position:
                    position -= 1
                running.remove(victim)
                entry = next((entry for entry in batch if entry[0] is victim), None)
                if entry is not None:
                    batch.remove(entry)
                    budget += entry[1]
                self.preempt(replica, victim)
                preempted.append(victim)
                if victim is call:
                    break
            if call in preempted:
                if self.version.goes_on_after_self:
                    continue
                break
            self.grow(pool, call, n, needed)
            batch.append([call, n, call.computed - n])
            budget -= n
            position += 1

        # Pass 2: waiting calls, only if nothing was preempted.
        while not preempted and budget > 0 and len(running) < self.config["max_num_seqs"]:
            call = self.head(replica)
            if call is None:
                break
            hits = pool.lookup(call.context, (call.known - 1) // block_size)
            hit_tokens = len(hits) * block_size
            n = self.chunk(call, hit_tokens, min(budget, longest))
            reserved = call.known if self.config.get("reserve_full_isl", True) else hit_tokens + n
            required = ceil_div(reserved, block_size) - len(hits) + pool.not_in_use(hits)
            if required + (self.watermark if running else 0) > pool.available:
                break
            replica.waiting.remove(call)
            running.append(call)
            pool.touch(hits)
            if self.retention in policies.ENDS_AT_ADMISSION:
                for other in self.replicas:
                    other.pool.end_protection(call.program)
            pool.forget(call.context, len(hits), ceil_div(call.known, block_size))
            call.blocks, call.named, call.computed = list(hits), len(hits), hit_tokens
            if call.scheduled is None:
                call.scheduled, call.cached_tokens = self.now, hit_tokens
                self.totals["hit_tokens"] += hit_tokens
            else:
                call.resume_hit_tokens += hit_tokens
                self.totals["resume_hit_tokens"] += hit_tokens
            self.grow(pool, call, n, ceil_div(hit_tokens + n, block_size) - len(hits))
            batch.append([call, n, hit_tokens])
            budget -= n
        return batch, preempted

    def longest_chunk(self, replica):
        """The most tokens that one call of a batch may have."""
        threshold = self.config.get("long_prefill_token_threshold", 0)
        alone = len(replica.running) + len(replica.waiting) == 1
        if not threshold or (alone and self.version.lone_call_unlimited):
            return self.config["max_num_batched_tokens"]
        return threshold

    def chunk(self, call, computed, most):
        """Tokens of a call to compute next, after `computed` ones; at most so many."""
        n = min(call.known + call.ahead - computed, most, self.config["max_model_len"] - 1 - computed)
        assert n > 0
        return n

    def grow(self, pool, call, n, needed):
        """Take the blocks for n more tokens; the blocks they fill get their content at once."""
        call.blocks += pool.take(needed, self.now)
        call.computed += n
        self.name_blocks(pool, call, min(call.computed, call.known))

    def name_blocks(self, pool, call, tokens):
        """The full blocks of so many tokens get their content, those that do not have it yet."""
        full = max(call.named, tokens // self.block_size)
        pool.set_names(call.context, call.blocks, call.named, full)
        call.named = full

    def head(self, replica):
        """The first waiting call that may start."""
        pool = replica.pool

        def uncached_tokens(call):
            return call.prompt - self.resident_tokens(pool, call, call.prompt - 1)

        waiting = [call for call in replica.waiting if not call.stale]
        for call in waiting:
            if call.preemptions or policies.admit(
                self.admission,
                self.admission_params,
                utilization=pool.utilization,
                uncached_tokens=lambda call=call: uncached_tokens(call),
                free_tokens=pool.free * self.block_size,
                protected=any(call.context.program in other.pool.protections for other in self.replicas),
            ):
                return call
        if waiting and not replica.running:
            return waiting[0]
        return None

    # Section 6: preemption

    def victim(self, running):
        """The running call to preempt."""
        if self.fcfs_queue:
            return running[-1]
        return max(
            running, key=lambda call: (call.priority, call.released)
        )  # of equals the first, as max() does

    def preempt(self, replica, call):
        """Give the blocks back; the call waits again. Its tokens in flight will arrive all the same.

        The blocks that got content keep it, also those that this step would have filled. A block that a token
        in flight fills has none, if that token was not known when its batch was formed and this step has not
        scheduled the call.
        """
        replica.pool.give_back(call.blocks)
        call.blocks, call.named, call.computed = [], 0, 0
        call.ahead, call.stale = 0, call.in_flight
        call.preemptions += 1
        replica.waiting.insert(0, call)
        if not self.fcfs_queue:
            replica.waiting.sort(key=Call.order)

    # Section 7: iteration time

    @staticmethod
    def is_decode(call, before):
        """Is this entry of a batch a decode? (Asked while the batch is formed.)"""
        return before == call.known + call.ahead - 1 and call.sampled + call.ahead > 0

    def iteration_ns(self, batch):
        """Duration of an iteration, without the wake-up."""
        cost = self.config["cost"]
        tokens = sum(n for _, n, _ in batch)
        context = sum(before + n for _, n, before in batch)
        work = sum(n * (before + n / 2) for call, n, before in batch if not self.is_decode(call, before))
        model = cost["c0"] + cost["c_tok"] * tokens + cost["c_seq"] * len(batch) + cost["c_kv"] * context
        if cost["c_prefill"]:
            model = model + cost["c_prefill"] * work
        return max(1, round(model))

    # Results and invariants

    def result(self):
        """The outcome of the run."""
        calls = []
        for p, program in enumerate(self.programs):
            for k in range(len(program["calls"])):
                call = self.calls[p, k]
                fields = (
                    "prompt",
                    "released",
                    "scheduled",
                    "first_token",
                    "finished",
                    "cached_tokens",
                    "preemptions",
                )
                fields += ("resume_hit_tokens", "service_ns", "priority", "replica", "longest_gap")
                calls.append({field: getattr(call, field) for field in fields})
        totals = dict(self.totals)
        totals["evicted_blocks"] = sum(replica.pool.evicted_blocks for replica in self.replicas)
        totals["busy_ns"] = [replica.busy_ns for replica in self.replicas]
        totals["makespan_ns"] = self.now
        return {
            "calls": calls,
            "programs": [
                {
                    "arrival": program["arrival_ns"],
                    "finished": self.finished[p],
                    "service": self.attained_ns[p],
                }
                for p, program in enumerate(self.programs)
            ],
            "totals": totals,
            "token_gaps": dict(self.token_gaps),
        } | self.final_blocks()

    def final_blocks(self):
        """The free queue of each replica at the end, and which of its blocks have content."""
        return {
            "final_free_queue": [list(replica.pool.queue) for replica in self.replicas],
            "final_cached_blocks": [
                sorted(block for block in replica.pool.queue if replica.pool.names[block])
                for replica in self.replicas
            ],
        }

    def check(self):
        """Verify what must always hold, if the configuration asks for it."""
        if not self.config.get("check", False):
            return
        for replica in self.replicas:
            pool = replica.pool
            blocks = range(1, pool.kv_blocks + 1)
            in_use = {block for block in blocks if pool.running_refs[block]}
            # Every block is in use, protected or in the free queue.
            assert len(in_use) + len(pool.protected) + len(pool.queue) == pool.kv_blocks
            assert in_use | pool.protected | set(pool.queue) == set(blocks)
            # References are those of the running calls and of the protections.
            running_refs, kept_refs = [0] * (pool.kv_blocks + 1), [0] * (pool.kv_blocks + 1)
            for call in replica.running:
                for block in call.blocks:
                    running_refs[block] += 1
            for protection in pool.protections.values():
                for block in protection.blocks:
                    kept_refs[block] += 1
            assert running_refs == pool.running_refs and kept_refs == pool.kept_refs
            # Names and holders agree.
            holders = {(name, block) for name, held in pool.holders.items() for block in held}
            assert holders == {
                (pool.names[block], block) for block in blocks if pool.names[block] not in (None, FORGOTTEN)
            }
            assert all(block in pool.queue for block in blocks if pool.names[block] == FORGOTTEN)
            for call in replica.running:
                assert len(call.blocks) == ceil_div(call.computed, self.block_size)
                full = min(call.computed, call.known - (call.ahead > 0)) // self.block_size
                assert full <= call.named <= min(call.computed, call.known) // self.block_size
                for position, block in enumerate(call.blocks):
                    assert pool.names[block] == (
                        call.context.name(position) if position < call.named else None
                    )
            for program, protection in pool.protections.items():
                assert protection.blocks and not any(call.program == program for call in replica.running)
                for position, block in enumerate(protection.blocks):
                    assert pool.names[block] == self.contexts[program].name(position)
            # What is resident of a context is a prefix of it, and lies in one place only; but with chunks of
            # limited length several calls may compute the same shared prefix side by side.
            limited = self.config.get("long_prefill_token_threshold", 0) > 0
            for name, held in pool.holders.items():
                kind, owner, position = name
                assert len(held) == 1 or (kind == "prefix" and limited)
                if kind == "prefix":
                    assert position == 0 or (kind, owner, position - 1) in pool.holders
                elif position:
                    assert self.contexts[owner].name(position - 1) in pool.holders
            self.check_limits(replica)

    def check_limits(self, replica):
        """Limits and the order of the queue."""
        assert len(replica.running) <= self.config["max_num_seqs"]
        for batch in replica.formed:
            assert sum(entry.n for entry in batch.entries) <= self.config["max_num_batched_tokens"]
        if not self.fcfs_queue:
            assert replica.waiting == sorted(replica.waiting, key=Call.order)
