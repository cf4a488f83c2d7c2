"""Slots as in llama.cpp's server, in place of the blocks of a replica: section 11 of `docs/semantics.md`.

Tokens have identities. Those of a shared prefix are the same for all programs that have it; every other
token belongs to the call that brought it, in its prompt or as output. A slot simply remembers its tokens, and
what a prompt shares with it is found by comparing them one by one.
"""

from dataclasses import dataclass

from .simulator import Call, Simulation


@dataclass
class Slot:
    """One slot: idle, or taken by a running call."""

    number: int
    call: Call | None = None  # that runs in it
    tokens: tuple = ()  # with KV, of the last call that ran in it; empty while one runs
    given_back: int = 0  # when, counted over the slots of its replica from 1; 0: never


def common_prefix(a, b):
    """Leading tokens that two sequences share."""
    shared = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        shared += 1
    return shared


class Slots:
    """The slots of one replica."""

    evicted_blocks = 0  # there is no eviction
    protections = ()  # and nothing is ever protected

    def __init__(self, kv_blocks, slots):
        self.kv_blocks = kv_blocks
        self.slots = [Slot(number) for number in range(slots)]
        self.times_given_back = 0

    @property
    def idle(self):
        """The slots without a running call, lowest number first."""
        return [slot for slot in self.slots if slot.call is None]

    @property
    def free(self):
        """Tokens that the running calls leave."""
        return self.kv_blocks - sum(slot.call.computed for slot in self.slots if slot.call)

    @property
    def utilization(self):
        """Tokens of the running calls / pool."""
        return (self.kv_blocks - self.free) / self.kv_blocks

    def choose(self, prompt):
        """The idle slot that a call with the tokens `prompt` takes, and how many of them it has already."""
        shared = {slot.number: common_prefix(prompt, slot.tokens) for slot in self.idle}
        best = max(self.idle, key=lambda slot: (shared[slot.number], -slot.number))
        if 10 * shared[best.number] > len(prompt):
            taken = best
        elif any(not slot.given_back for slot in self.idle):
            taken = [slot for slot in self.idle if not slot.given_back][-1]
        else:
            taken = min(self.idle, key=lambda slot: slot.given_back)
        return taken, shared[taken.number]

    def take(self, slot, call):
        """A call starts to run in an idle slot."""
        assert slot.call is None
        slot.call, slot.tokens = call, ()

    def give_back(self, slot, tokens):
        """The call of a slot has ended and leaves these tokens."""
        self.times_given_back += 1
        slot.call, slot.tokens, slot.given_back = None, tuple(tokens), self.times_given_back


class SlotSimulation(Simulation):
    """A run in which every replica has `max_num_seqs` slots of equal size."""

    def __init__(self, programs, config, log=None):
        if config["block_size"] != 1 or config["retention"][0] != "lru":
            raise ValueError("slots go with blocks of one token and with LRU retention")
        self.slot_tokens = config["kv_blocks"] // config["max_num_seqs"]
        super().__init__(programs, config, log)
        self.tokens = {}  # (program, call) -> the identities of its prompt and output
        for p, program in enumerate(programs):
            context = [("prefix", program["prefix"], position) for position in range(self.context_tokens[p])]
            for k, (new, output, kept, _) in enumerate(program["calls"]):
                context = context[: self._kept_tokens(k, kept, len(context))]
                context = context + [(p, k, number) for number in range(new + output)]
                self.tokens[p, k] = context

    def new_pool(self):
        """The slots of one replica, never used."""
        return Slots(self.config["kv_blocks"], self.config["max_num_seqs"])

    def fits(self, context_tokens):
        """Does a call of so many prompt and output tokens fit into a slot?"""
        return context_tokens <= self.slot_tokens

    def prompt(self, call):
        """The identities of a call's prompt tokens."""
        return self.tokens[call.program, call.index][: call.prompt]

    def resident_tokens(self, pool, call, most):
        """Of a call's prompt, the most that any idle slot has."""
        return min(
            most, max((common_prefix(self.prompt(call), slot.tokens) for slot in pool.idle), default=0)
        )

    def unprotect_and_cut(self, context, kept, context_tokens):
        """Nothing is protected, and slots keep what they have, whether it is still of use or not."""

    def schedule(self, replica):
        """One `schedule()`. Every slot has room for its call, so that nobody is ever preempted."""
        budget, batch = self.config["max_num_batched_tokens"], []

        def go_on(call):
            n, before = min(call.known - call.computed, budget), call.computed
            assert n > 0
            call.computed += n
            batch.append([call, n, before])
            return budget - n

        for call in replica.running:
            if budget > 0:
                budget = go_on(call)
        while budget > 0 and len(replica.running) < self.config["max_num_seqs"]:
            call = self.head(replica)
            if call is None:
                break
            replica.waiting.remove(call)
            replica.running.append(call)
            slot, shared = replica.pool.choose(self.prompt(call))
            replica.pool.take(slot, call)
            call.slot, call.scheduled = slot, self.now
            call.cached_tokens = call.computed = min(shared, call.prompt - 1)
            self.totals["hit_tokens"] += call.cached_tokens
            budget = go_on(call)
        return batch, []

    def give_back(self, pool, call, last):
        """The slot keeps all tokens of the call but the last one sampled."""
        pool.give_back(call.slot, self.tokens[call.program, call.index][: call.computed])

    def result(self):
        """The outcome of the run; also the number of the slot that each call ran in."""
        result = super().result()
        keys = [(p, k) for p, program in enumerate(self.programs) for k in range(len(program["calls"]))]
        for key, row in zip(keys, result["calls"], strict=True):
            row["slot"] = self.calls[key].slot.number
        return result

    def final_blocks(self):
        """There are none; what each slot has at the end instead."""
        return {"final_slots": [[slot.tokens for slot in replica.pool.slots] for replica in self.replicas]}

    def check(self):
        """Verify what must always hold, if the configuration asks for it."""
        if not self.config.get("check", False):
            return
        for replica in self.replicas:
            pool = replica.pool
            taken = [slot for slot in pool.slots if slot.call]
            assert {id(slot.call) for slot in taken} == {id(call) for call in replica.running}
            assert len(taken) == len(replica.running) and all(slot.call.slot is slot for slot in taken)
            assert all(not slot.tokens for slot in taken)
            used = sorted(slot.given_back for slot in pool.slots if slot.given_back)
            assert len(set(used)) == len(used) and (not used or used[-1] == pool.times_given_back)
            for slot in pool.idle:
                assert bool(slot.tokens) == bool(slot.given_back) and len(slot.tokens) < self.slot_tokens
            for call in replica.running:
                assert call.computed <= call.known <= self.slot_tokens
                assert call.preemptions == 0
            assert 0 <= pool.free <= pool.kv_blocks
            self.check_limits(replica)
