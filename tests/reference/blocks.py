"""The KV blocks of one replica: ids, content names, references, free queue, protections."""

from collections import OrderedDict
from dataclasses import dataclass

FORGOTTEN = "forgotten"
"""Name of content that no call can find; a block of it is no blank, and is evicted when it is taken."""


@dataclass
class Context:
    """Names the blocks of one program's context.

    The first `shared_blocks` blocks lie wholly inside the program's shared prefix and are named by prefix and
    position; the others are private and named by program and position. Positions are enough: in a program a
    position has one content at a time, because compaction takes the names off every later block first.
    """

    program: int
    prefix: int | None
    shared_blocks: int

    def name(self, position):
        """Name of the content of the full block at `position`."""
        if position < self.shared_blocks:
            return ("prefix", self.prefix, position)
        return ("program", self.program, position)


@dataclass
class Protection:
    """The protected blocks of one program in order of position; the first `shared` are its shared prefix."""

    deadline: float
    blocks: list
    shared: int


class Pool:
    """All KV blocks of one replica.

    A block is in use (`running_refs` > 0), or protected (only `kept_refs` > 0), or free (in the queue).
    `blanks_first`: blanks that are given back go to the head of the queue (vLLM 0.24), not to its tail.
    """

    def __init__(self, kv_blocks, block_size, blanks_first):
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.blanks_first = blanks_first
        self.queue = OrderedDict((block, None) for block in range(1, kv_blocks + 1))
        self.protected = set()
        self.running_refs = [0] * (kv_blocks + 1)
        self.kept_refs = [0] * (kv_blocks + 1)
        self.names = [None] * (kv_blocks + 1)  # block -> name of its content; None: a blank
        self.holders = {}  # name -> {block: None}, in order of naming
        self.protections = {}  # program -> Protection
        self.evicted_blocks = 0

    @property
    def free(self):
        """Blocks in the free queue."""
        return len(self.queue)

    @property
    def available(self):
        """Blocks that can be taken: the free queue and everything protected."""
        return len(self.queue) + len(self.protected)

    @property
    def utilization(self):
        """(in use + protected) / pool."""
        return (self.kv_blocks - len(self.queue)) / self.kv_blocks

    # Content

    def set_names(self, context, blocks, first, last):
        """Name the full blocks at positions first <= position < last."""
        for position in range(first, last):
            block, name = blocks[position], context.name(position)
            assert self.names[block] is None, "a block is named once, until it is taken"
            self.names[block] = name
            self.holders.setdefault(name, {})[block] = None

    def clear_name(self, block):
        """Make `block` a blank, where it is."""
        name, self.names[block] = self.names[block], None
        if name in (None, FORGOTTEN):
            return
        del self.holders[name][block]
        if not self.holders[name]:
            del self.holders[name]

    def forget(self, context, first, last):
        """The private blocks at positions first <= position < last keep content that no call finds; in vLLM
        before 0.24 they become blanks where they are.
        """
        for position in range(max(first, context.shared_blocks), last):
            for block in list(self.holders.get(context.name(position), ())):
                assert block in self.queue
                self.clear_name(block)
                if self.blanks_first:
                    self.names[block] = FORGOTTEN

    def lookup(self, context, most):
        """Longest chain of resident blocks from position 0, at most `most` blocks. Touches nothing."""
        hits = []
        for position in range(most):
            holders = self.holders.get(context.name(position))
            if not holders:
                break
            hits.append(next(iter(holders)))
        return hits

    def not_in_use(self, blocks):
        """How many of `blocks` no running call uses."""
        return sum(self.running_refs[block] == 0 for block in blocks)

    # Running calls

    def touch(self, blocks):
        """A running call uses these resident blocks from now on."""
        for block in blocks:
            self.queue.pop(block, None)
            self.protected.discard(block)
            self.running_refs[block] += 1

    def take(self, count, now):
        """Take `count` blocks for a running call, as blanks."""
        assert count <= self.available
        taken = []
        while len(taken) < count:
            if self.queue:
                block, _ = self.queue.popitem(last=False)
            else:
                block = self._break_protection(now)
                if block is None:
                    continue  # nothing but a reference to a shared prefix ended; it may be in the queue now
            if self.names[block] is not None:
                self.clear_name(block)
                self.evicted_blocks += 1
            self.running_refs[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks):
        """A running call uses these blocks no longer; last block first."""
        first = []  # the blanks that go to the head of the queue, in the order in which they will stand there
        for block in reversed(blocks):
            self.running_refs[block] -= 1
            if self.running_refs[block] == 0:
                if self.kept_refs[block]:
                    self.protected.add(block)
                else:
                    self.queue[block] = None
                    if self.blanks_first and self.names[block] is None:
                        first.append(block)
        for block in reversed(first):
            self.queue.move_to_end(block, last=False)

    # Protections

    def protect(self, context, blocks, deadline):
        """Protect these full blocks of a context (still in use by the call that completes)."""
        assert context.program not in self.protections
        if not blocks:
            return
        for block in blocks:
            self.kept_refs[block] += 1
        self.protections[context.program] = Protection(
            deadline, list(blocks), min(context.shared_blocks, len(blocks))
        )

    def end_protection(self, program):
        """End a program's protection, if it has one: what nobody uses joins the queue, last block first."""
        protection = self.protections.pop(program, None)
        if protection is not None:
            self._unkeep(protection.blocks)

    def cut(self, context, first, last):
        """Compaction: the context's blocks at positions first <= position < last are no longer part of it.

        Private ones are forgotten where they are. A protection that is still there ends for them, so they
        join the queue. Blocks of a shared prefix only lose this program's protection.
        """
        protection = self.protections.get(context.program)
        if protection is not None:
            gone = protection.blocks[first:]
            del protection.blocks[first:]
            protection.shared = min(protection.shared, first)
            if not protection.blocks:
                del self.protections[context.program]
            self._unkeep(gone)
        self.forget(context, first, last)

    def _unkeep(self, blocks):
        for block in reversed(blocks):
            self.kept_refs[block] -= 1
            if self.kept_refs[block] == 0 and self.running_refs[block] == 0:
                self.protected.remove(block)
                self.queue[block] = None

    def _break_protection(self, now):
        """Break one block out of the protection that is next in order; None if it has no private block."""

        def order(program):
            deadline = self.protections[program].deadline
            expired = deadline <= now
            return (0, deadline, program) if expired else (1, -deadline, program)

        program = min(self.protections, key=order)
        protection = self.protections[program]
        block = None
        if len(protection.blocks) > protection.shared:
            block = protection.blocks.pop()
            self.kept_refs[block] -= 1
            self.protected.remove(block)
        if len(protection.blocks) == protection.shared:  # broken up: its reference to the shared prefix ends
            del self.protections[program]
            self._unkeep(protection.blocks)
        return block
