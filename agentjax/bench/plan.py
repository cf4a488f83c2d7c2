"""The requests of a run: every combination of the lists of the settings, in random order."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentjax.bench.settings import Settings
from agentjax.records import Asked

_FEWEST_REQUESTS = 4


@dataclass(frozen=True)
class Cell:
    """Requests of one kind, sent by `concurrency` streams, each of which waits for its reply and goes on.

    Attributes:
        asked: what its requests measure.
        requests: how many, over all streams.
    """

    asked: Asked
    requests: int

    @property
    def name(self) -> str:
        """`p1024-o64-c4-s0.5-r0`: prompt, output, concurrency, cached share, repeat."""
        a = self.asked
        cell = f"p{a.prompt_tokens}-o{a.output_tokens}-c{a.concurrency}-s{a.cached_share:g}"
        return f"{cell}-r{a.repeat}"

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prompt that are sent before, so that the server may find them in its cache."""
        return round(self.asked.cached_share * self.asked.prompt_tokens)

    def request(self, index: int) -> str:
        """Name of a request."""
        return f"{self.name}-{index}"

    def indices(self, stream: int) -> range:
        """The requests of a stream."""
        return range(stream, self.requests, self.asked.concurrency)

    @property
    def streams(self) -> range:
        """The streams that have requests."""
        return range(min(self.asked.concurrency, self.requests))


@dataclass(frozen=True)
class Plan:
    """The cells of a run in the order in which they are measured."""

    cells: tuple[Cell, ...]

    @property
    def requests(self) -> int:
        """Requests to measure; those that warm up or fill caches are not among them."""
        return sum(cell.requests for cell in self.cells)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of their prompts, and of the prefixes that are sent before."""
        return sum(
            cell.requests * cell.asked.prompt_tokens + len(cell.streams) * cell.prefix_tokens
            for cell in self.cells
        )

    @property
    def output_tokens(self) -> int:
        """Tokens of their outputs."""
        return sum(cell.requests * cell.asked.output_tokens for cell in self.cells)

    def __str__(self) -> str:
        most = max(cell.asked.concurrency for cell in self.cells)
        return (
            f"{self.requests:,} requests in {len(self.cells):,} cells, up to {most:,} at once: about "
            f"{self.prompt_tokens:,} prompt tokens and {self.output_tokens:,} output tokens"
        )


def make_plan(settings: Settings) -> Plan:
    """The cells of all repeats; each repeat has all of them, in an order drawn from the seed."""
    return Plan(tuple(_cells(settings)))


def _cells(settings: Settings) -> Iterator[Cell]:
    lists = (settings.prompt_tokens, settings.output_tokens, settings.concurrency, settings.cached_share)
    combinations = list(itertools.product(*lists))
    for repeat in range(settings.repeats):
        order = np.random.default_rng([settings.seed, repeat]).permutation(len(combinations))
        for index in order:
            prompt, output, concurrency, share = combinations[index]
            requests = settings.requests or max(2 * concurrency, _FEWEST_REQUESTS)
            yield Cell(Asked(prompt, output, concurrency, share, repeat), requests)
