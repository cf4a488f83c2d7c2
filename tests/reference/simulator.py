"""Reference simulator of `docs/semantics.md`: block by block, one iteration at a time, plain Python.

`simulate(programs, config)`; no numpy, no jax, no leaps. Times are integer nanoseconds.

programs: list of dicts
    arrival_ns: int
    prefix: int | None            index into config["prefix_tokens"]
    calls: list of (new_tokens, output_tokens, kept_tokens | None, gap_ns); kept_tokens is the part of the
           *previous* call's context that this call keeps (None: all), gap_ns the tool gap after this call

config: dict
    kv_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, replicas
    prefix_tokens: [int, ...]
    cost: dict(c0, c_tok, c_seq, c_kv, c_prefill, wakeup), nanoseconds
    retention, routing, admission: (name, params); scheduling: name
    slots: each replica has slots as in llama.cpp's server instead of blocks, see `slots.py` (default False)
    phantom_hash: keep vLLM's quirk that a victim already scheduled in the step leaves the names of the blocks
                  this step would have filled on them (default False)
    check: verify every invariant after every event (default False; slow)
"""

import heapq

from . import policies
from .blocks import Context, Pool


class Call:
    """One call from its release on."""

    def __init__(self, program, index, prompt, output, released, context):
        self.program = program
        self.index = index
        self.prompt = prompt
        self.output = output
        self.released = released
        self.context = context
        self.known = prompt  # prompt tokens and tokens sampled so far
        self.computed = 0
        self.blocks = []
        self.priority = 0
        self.replica = None
        self.scheduled = None
        self.first_token = None
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


class Replica:
    """One engine: its blocks, its calls and the iteration it is in."""

    def __init__(self, index, pool):
        self.index = index
        self.pool = pool
        self.running = []  # in order of admission
        self.waiting = []  # front first
        self.batch = []  # [call, tokens, computed before] of the iteration in progress; empty: in none
        self.started = None
        self.ends = None  # end of the iteration in progress, or of the last one
        self.preempted = []  # by the schedule() that started the iteration in progress
        self.waiting_at_start = 0
        self.busy_ns = 0


def simulate(programs, config, log=None):
    """Run the programs to their end. Returns calls, programs, totals and the final blocks of each replica.

    log: a list; one dict is appended for each finished iteration.
    """
    from .slots import SlotSimulation  # here, because it builds on this module

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
        self.block_size = config["block_size"]
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
            ),
            0,
        )

    def new_pool(self):
        """The KV blocks of one replica, all of them free."""
        return Pool(self.config["kv_blocks"], self.block_size)

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
            times = [replica.ends for replica in self.replicas if replica.batch]
            if self.releases:
                times.append(self.releases[0][0])
            if not times:
                break
            assert self.now is None or min(times) > self.now, "time goes forward"
            self.now = min(times)
            for replica in self.replicas:
                if replica.batch and replica.ends == self.now:
                    self.end_iteration(replica)
                    self.check()
            while self.releases and self.releases[0][0] == self.now:
                _, p, k = heapq.heappop(self.releases)
                self.release(p, k)
                self.check()
            for replica in self.replicas:
                if not replica.batch and (replica.running or replica.waiting):
                    self.start_iteration(replica)
                    self.check()
        assert None not in self.finished, "every program finishes"

    def end_iteration(self, replica):
        """Sample tokens; complete the calls that have all their output."""
        batch, duration = replica.batch, replica.ends - replica.started
        replica.batch = []
        for call, n, before in batch:
            call.service_ns += duration
            self.attained_ns[call.program] += duration
            if self.is_decode(call, before):
                self.totals["decode_tokens"] += n
            else:
                self.totals["prefill_tokens"] += n
                if call.preemptions:
                    self.totals["recompute_tokens"] += n
        for call, _, _ in batch:
            if call.computed == call.known:
                call.known += 1
                if call.first_token is None:
                    call.first_token = self.now
                if call.sampled == call.output:
                    self.complete(replica, call)
        if self.log is not None:
            self.log.append(
                {
                    "replica": replica.index,
                    "start_ns": replica.started,
                    "duration_ns": duration,
                    "batch": [(call.program, call.index, n, before) for call, n, before in batch],
                    "free_blocks": replica.pool.free,
                    "running": len(replica.running),
                    "waiting": replica.waiting_at_start,
                    "preempted": [(call.program, call.index) for call in replica.preempted],
                }
            )

    def complete(self, replica, call):
        """The call has ended."""
        p, k = call.program, call.index
        calls = self.programs[p]["calls"]
        last = k + 1 == len(calls)
        assert call.computed == call.prompt + call.output - 1
        self.give_back(replica.pool, call, last)
        replica.running.remove(call)
        call.finished = self.now
        self.context_tokens[p] = call.prompt + call.output
        if last:
            self.finished[p] = self.now
        else:
            heapq.heappush(self.releases, (self.now + calls[k][3], p, k + 1))

    def give_back(self, pool, call, last):
        """Section 5: the blocks of a call that has ended go where retention says."""
        full = call.computed // self.block_size
        keep, deadline = policies.retain(self.retention, self.retention_params, self.now, pool.utilization)
        if not keep:
            for block in call.blocks[call.context.shared_blocks :]:
                pool.clear_name(block)
        elif deadline is not None and not last:
            pool.protect(call.context, call.blocks[:full], deadline)
        pool.give_back(call.blocks)
        call.blocks = []

    def release(self, p, k):
        """Route, prioritise, end the protection, cut, queue."""
        new, output, kept, _ = self.programs[p]["calls"][k]
        context, context_tokens = self.contexts[p], self.context_tokens[p]
        kept = self._kept_tokens(k, kept, context_tokens)
        call = Call(p, k, kept + new, output, self.now, context)
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

    def start_iteration(self, replica):
        """Schedule until something is scheduled, and start an iteration of it."""
        while True:
            batch, preempted = self.schedule(replica)
            self.totals["preemptions"] += len(preempted)
            if batch:
                break
            assert preempted, "no progress"
            self.totals["empty_schedules"] += 1
            self.check()
        duration = self.iteration_ns(batch)
        if replica.ends is None or replica.ends < self.now:
            duration += self.config["cost"]["wakeup"]
        replica.batch, replica.preempted = batch, preempted
        replica.waiting_at_start = len(replica.waiting)
        replica.started, replica.ends = self.now, self.now + duration
        replica.busy_ns += duration
        self.totals["iterations"] += 1

    # Section 4: schedule()

    def schedule(self, replica):
        """One `schedule()`. Returns the batch and the calls preempted."""
        pool, running, block_size = replica.pool, replica.running, self.block_size
        budget = self.config["max_num_batched_tokens"]
        batch, preempted = [], []

        # Pass 1: running calls in order of admission.
        position = 0
        while position < len(running) and budget > 0:
            call = running[position]
            n = min(call.known - call.computed, budget)
            assert n > 0
            needed = max(0, ceil_div(call.computed + n, block_size) - len(call.blocks))
            while needed > pool.available:
                victim = self.victim(running)
                running.remove(victim)
                entry = next((entry for entry in batch if entry[0] is victim), None)
                if entry is not None:
                    batch.remove(entry)
                    budget += entry[1]
                    position -= 1
                self.preempt(replica, victim, entry)
                preempted.append(victim)
                if victim is call:
                    break
            if call in preempted:
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
            if ceil_div(call.known, block_size) - len(hits) + pool.not_in_use(hits) > pool.available:
                break
            replica.waiting.remove(call)
            running.append(call)
            pool.touch(hits)
            if self.retention in policies.ENDS_AT_ADMISSION:
                for other in self.replicas:
                    other.pool.end_protection(call.program)
            hit_tokens = len(hits) * block_size
            call.blocks, call.computed = list(hits), hit_tokens
            if call.scheduled is None:
                call.scheduled, call.cached_tokens = self.now, hit_tokens
                self.totals["hit_tokens"] += hit_tokens
            else:
                call.resume_hit_tokens += hit_tokens
                self.totals["resume_hit_tokens"] += hit_tokens
            n = min(call.known - call.computed, budget)
            self.grow(pool, call, n, ceil_div(call.computed + n, block_size) - len(hits))
            batch.append([call, n, hit_tokens])
            budget -= n
        return batch, preempted

    def grow(self, pool, call, n, needed):
        """Take the blocks for n more tokens; the blocks they fill get their content at once."""
        call.blocks += pool.take(needed, self.now)
        first = call.computed // self.block_size
        call.computed += n
        pool.set_names(call.context, call.blocks, first, call.computed // self.block_size)

    def head(self, replica):
        """The first waiting call that may start."""
        pool = replica.pool

        def uncached_tokens(call):
            return call.prompt - self.resident_tokens(pool, call, call.prompt - 1)

        for call in replica.waiting:
            if call.preemptions or policies.admit(
                self.admission,
                self.admission_params,
                utilization=pool.utilization,
                uncached_tokens=lambda call=call: uncached_tokens(call),
                free_tokens=pool.free * self.block_size,
                protected=any(call.context.program in other.pool.protections for other in self.replicas),
            ):
                return call
        if replica.waiting and not replica.running:
            return replica.waiting[0]
        return None

    # Section 6: preemption

    def victim(self, running):
        """The running call to preempt."""
        if self.fcfs_queue:
            return running[-1]
        return max(
            running, key=lambda call: (call.priority, call.released)
        )  # of equals the first, as max() does

    def preempt(self, replica, call, entry):
        """Give the blocks back; the call waits again. `entry`: its entry of this step's batch, or None."""
        if entry is not None and not self.config.get("phantom_hash", False):
            for block in call.blocks[entry[2] // self.block_size :]:
                replica.pool.clear_name(block)
        replica.pool.give_back(call.blocks)
        call.blocks, call.computed = [], 0
        call.preemptions += 1
        replica.waiting.insert(0, call)
        if not self.fcfs_queue:
            replica.waiting.sort(key=Call.order)

    # Section 7: iteration time

    @staticmethod
    def is_decode(call, before):
        """Is this entry of a batch a decode? (Asked before the entry's token is sampled.)"""
        return before == call.known - 1 and call.sampled > 0

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
                fields += ("resume_hit_tokens", "service_ns", "priority", "replica")
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
                (pool.names[block], block) for block in blocks if pool.names[block] is not None
            }
            for call in replica.running:
                assert len(call.blocks) == ceil_div(call.computed, self.block_size)
                for position, block in enumerate(call.blocks):
                    full = position < call.computed // self.block_size
                    assert pool.names[block] == (call.context.name(position) if full else None)
            for program, protection in pool.protections.items():
                assert protection.blocks and not any(call.program == program for call in replica.running)
                for position, block in enumerate(protection.blocks):
                    assert pool.names[block] == self.contexts[program].name(position)
            # What is resident of a context is a prefix of it, and lies in one place only.
            if not self.config.get("phantom_hash", False):
                for name, held in pool.holders.items():
                    kind, owner, position = name
                    assert len(held) == 1
                    if kind == "prefix":
                        assert position == 0 or (kind, owner, position - 1) in pool.holders
                    elif position:
                        assert self.contexts[owner].name(position - 1) in pool.holders
            self.check_limits(replica)

    def check_limits(self, replica):
        """Limits and the order of the queue."""
        assert len(replica.running) <= self.config["max_num_seqs"]
        assert sum(n for _, n, _ in replica.batch) <= self.config["max_num_batched_tokens"]
        if not self.fcfs_queue:
            assert replica.waiting == sorted(replica.waiting, key=Call.order)
