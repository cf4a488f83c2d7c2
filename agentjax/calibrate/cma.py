"""A gradient-free fit: the whole simulator serves the recorded schedule, CMA-ES looks for the parameters.

CMA-ES (Hansen, arXiv 1604.00772) as of evosax; a generation is one batch of lanes. The search is in
logarithms, mirrored at the bounds. It starts from a scan: one parameter after the other, over its range,
keeping the best. Losses of whole runs are rugged, so scan and search are repeated while that helps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from agentjax.calibrate.determined import Determined, determine
from agentjax.calibrate.parameters import Parameter, with_values
from agentjax.calibrate.replayed import METRICS, Replayed, Simulator
from agentjax.cluster import Cluster
from agentjax.errors import complaint

SCAN = 30.0
"""The scan of a parameter that is above 0 goes by this factor down and up."""
SETTINGS = ("max_num_seqs", "max_num_batched_tokens")
"""Limits that are options of a server, for which powers of two and halves between them are tried first."""
SAME = 1e-3
"""Losses that differ relatively by less count as equal."""
BETTER = 0.01
"""Scan and search are repeated while a scan lowers the loss relatively by more."""
NARROW = 5e-4
"""The search ends when its spread is below this, relative to every parameter."""
EXACT = 1e-5
"""The search ends at a loss below this."""

Progress = Callable[[str, float, float], None]
"""Called with what is done, how many generations are finished (fractions inside one), and the best loss."""


@dataclass(frozen=True)
class CmaFit:
    """What came out of a fit.

    Attributes:
        parameters: what was fitted.
        values: fitted, by name; where they started if the loss is as low there.
        cluster: the cluster with these values.
        loss_before, loss: of the training part.
        errors_pct: mean absolute error of each metric, (before, after) in training, (before, after) held out;
            NaN for a metric without observations.
        determined: for each parameter, how well the recording determines it.
        history: loss of the best candidate of each generation, those of scans included.
        simulated: runs of the simulator.
    """

    parameters: tuple[Parameter, ...]
    values: dict[str, float]
    cluster: Cluster
    loss_before: float
    loss: float
    errors_pct: dict[str, tuple[float, float, float, float]]
    determined: tuple[Determined, ...]
    history: tuple[float, ...]
    simulated: int


def fit_cma(
    replayed: Replayed,
    cluster: Cluster,
    policy: Any,
    parameters: Sequence[Parameter],
    *,
    generations: int = 80,
    population: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> CmaFit:
    """Fit parameters to a recorded schedule.

    Args:
        replayed: recorded times.
        cluster: has the values to start from, and everything that is not fitted.
        policy: of the cluster.
        parameters: what to fit.
        generations: at most so many, those of scans included.
        population: candidates simulated side by side.
        seed: of the search.
        progress: called while it runs.

    Raises:
        InputError: evosax is not installed, or no candidate completes the run.
    """
    search = _Search(replayed, cluster, policy, tuple(parameters), population, progress, generations)
    start = {parameter.name: parameter.start for parameter in parameters}
    before = search.simulator.log_ratios([cluster])
    search.loss_before = search.best_loss = float(search.simulator.loss(before)[0])
    best = search.run(start, seed)
    search.report("judging", generations)
    at_best, determined = determine(search.simulator, cluster, parameters, best)
    flat = search.simulator.loss(at_best)[0] * (1 + SAME) + EXACT
    for name in [each.name for each in determined if _may_stay(each, start[each.name])]:
        candidate = best | {name: start[name]}
        at_start = search.simulator.log_ratios([with_values(cluster, candidate)])
        if search.simulator.loss(at_start)[0] <= flat:
            best, at_best = candidate, at_start
    determined = tuple(replace(each, value=best[each.name]) for each in determined)
    return CmaFit(
        parameters=tuple(parameters),
        values=best,
        cluster=with_values(cluster, best),
        loss_before=search.loss_before,
        loss=float(search.simulator.loss(at_best)[0]),
        errors_pct=_errors_pct(replayed, before[0], at_best[0]),
        determined=determined,
        history=tuple(search.history),
        simulated=search.simulator.simulated,
    )


class _Search:
    """The candidates of a fit, and the best so far."""

    def __init__(
        self,
        replayed: Replayed,
        cluster: Cluster,
        policy: Any,
        parameters: tuple[Parameter, ...],
        population: int,
        progress: Progress | None,
        generations: int,
    ):
        self.strategy = _strategy(population, len(parameters))
        self.simulator = Simulator(replayed, policy, population)
        self.cluster, self.parameters, self.population = cluster, parameters, population
        self.progress, self.generations = progress, generations
        self.loss_before = self.best_loss = math.inf
        self.history: list[float] = []

    def report(self, what: str, done: float) -> None:
        if self.progress:
            self.progress(what, done, self.best_loss)

    def losses(self, candidates: Sequence[dict[str, float]], what: str) -> Float[np.ndarray, " candidates"]:
        """The losses of as many candidates as a generation has."""
        done = len(self.history)
        clusters = [with_values(self.cluster, values) for values in candidates]
        ratios = self.simulator.log_ratios(clusters, lambda share: self.report(what, done + min(share, 1.0)))
        found = self.simulator.loss(ratios)
        self.history.append(float(np.min(found)))
        return found

    def run(self, start: dict[str, float], seed: int) -> dict[str, float]:
        """The best values within the number of generations."""
        key = jax.random.key(seed)
        best, loss = start, math.inf
        while True:
            centre, steps, scanned = self.scan(best)
            if scanned > loss * (1 - BETTER):
                return best
            best, loss = centre, scanned
            key, own = jax.random.split(key)
            found, found_loss = self.evolve(centre, steps, own)
            if found_loss <= loss:
                best, loss = found, found_loss
            if loss < EXACT or len(self.history) + len(self.parameters) >= self.generations:
                return best

    def scan(self, values: dict[str, float]) -> tuple[dict[str, float], dict[str, float], float]:
        """The best values on coarse grids, one parameter after the other; their steps (log); the loss."""
        steps: dict[str, float] = {}
        least = math.inf
        for parameter in self.parameters:
            now = values[parameter.name]
            grid, steps[parameter.name] = _grid(parameter, now, self.population)
            found = self.losses([values | {parameter.name: value} for value in grid], "scan")
            good = grid[found <= np.min(found) * (1 + SAME) + EXACT]
            if not np.isfinite(np.min(found)):
                raise complaint(
                    f"parameters, {parameter.name}",
                    "no value with which the simulated run ends",
                    "a cluster that can serve the recording",
                )
            # of values that are as good as each other: the one nearest to the start, or the largest for 0
            distance = np.abs(np.log(good / now)) if now else -good
            values = values | {parameter.name: float(good[np.argmin(distance)])}
            least = float(np.min(found))
            self.best_loss = min(self.best_loss, least)
        return values, steps, least

    def evolve(
        self, centre: dict[str, float], steps: dict[str, float], key: jax.Array
    ) -> tuple[dict[str, float], float]:
        """The best values that CMA-ES finds from a centre, its first spread being the steps; and the loss."""
        strategy = self.strategy
        best, best_loss = centre, math.inf
        scale = np.asarray([steps[parameter.name] for parameter in self.parameters])
        with jax.enable_x64(True):
            params = strategy.default_params
            state = strategy.init(key, np.zeros(len(self.parameters)), params)
        while len(self.history) < self.generations:
            with jax.enable_x64(True):
                key, ask_key, tell_key = jax.random.split(key, 3)
                points, state = strategy.ask(ask_key, state, params)
            candidates = [self._values(centre, scale * point) for point in np.asarray(points)]
            found = self.losses(candidates, "generation")
            with jax.enable_x64(True):
                state, _ = strategy.tell(tell_key, points, found, state, params)
            index = int(np.argmin(found))
            if found[index] < best_loss:
                best, best_loss = candidates[index], float(found[index])
                self.best_loss = min(self.best_loss, best_loss)
            spread = float(state.std) * np.sqrt(np.diag(np.asarray(state.C))) * scale
            if best_loss < EXACT or np.all(spread < NARROW):
                break
        return best, best_loss

    def _values(self, centre: dict[str, float], shift: Float[np.ndarray, " parameters"]) -> dict[str, float]:
        return {
            parameter.name: _mirrored(parameter, math.log(centre[parameter.name]) + float(by))
            for parameter, by in zip(self.parameters, shift, strict=True)
        }


def _may_stay(told: Determined, start: float) -> bool:
    """Whether a parameter may be where it started: not determined, or 0 and not told apart from it."""
    return told.is_free or (not start and told.low is None and told.together_with is None)


def _grid(parameter: Parameter, now: float, count: int) -> tuple[Float[np.ndarray, " count"], float]:
    """Values of a parameter for the scan, and the step between them (log); the value now is one of them."""
    low, high = parameter.low, parameter.high
    if now:
        low, high = max(low, now / SCAN), min(high, now * SCAN)
    grid = np.geomspace(low, high, count)
    if parameter.name in SETTINGS:  # usually round numbers
        rounded = [base * 2.0**power for power in range(40) for base in (1.0, 1.5)]
        inside = np.asarray([value for value in rounded if low <= value <= high and value % 1 == 0])
        near = np.argsort(np.abs(np.log(inside / max(now, 1.0))), kind="stable")[:count]
        grid[: len(near)] = inside[near]
    grid = np.asarray([parameter.round(value) for value in grid])
    if now:
        grid[np.argmax(np.abs(np.log(grid / now)))] = now
    return grid, math.log(high / low) / max(1, count - 1)


def _mirrored(parameter: Parameter, logarithm: float) -> float:
    """The value of a logarithm, mirrored at the bounds as often as it takes."""
    low, high = math.log(parameter.low), math.log(parameter.high)
    width = max(high - low, 1e-12)
    place = (logarithm - low) % (2 * width)
    return parameter.round(math.exp(low + min(place, 2 * width - place)))


def _strategy(population: int, dimensions: int) -> Any:
    try:
        from evosax.algorithms import CMA_ES
    except ImportError:
        found = "no evosax, which method=cma_es searches with"
        raise complaint("method", found, "it: pip install 'agentjax[search]'") from None
    return _compiled(CMA_ES, population, dimensions)


@lru_cache
def _compiled(kind: Callable[..., Any], population: int, dimensions: int) -> Any:
    """The same strategy for every fit of its size, as each compiles its steps anew."""
    with jax.enable_x64(True):
        return kind(population_size=population, solution=np.zeros(dimensions))


def _errors_pct(
    replayed: Replayed, before: Float[np.ndarray, " observations"], after: Float[np.ndarray, " observations"]
) -> dict[str, tuple[float, float, float, float]]:
    """Mean absolute relative errors, per cent."""
    out: dict[str, tuple[float, float, float, float]] = {}
    for index, name in enumerate(METRICS):
        values = []
        for part in (replayed.weight > 0, replayed.held_out):
            chosen = part & (replayed.metric == index)
            values += [
                100 * float(np.mean(np.abs(np.expm1(side[chosen])))) if chosen.any() else math.nan
                for side in (before, after)
            ]
        out[name] = (values[0], values[1], values[2], values[3])
    return out
