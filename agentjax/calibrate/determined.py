"""How well a recording determines each fitted parameter.

A parameter is moved by small and large factors, the others staying where they are. A move is told apart from
the best value if the loss rises by more than two standard errors of the rise, over groups of neighbouring
programs. Where two parameters do nearly the same to all times, a move of one hides behind a move of the
other: with the cosine c between what they do, the interval is 1 / sqrt(1 - c^2) times as wide, and there is
none if c is above `JOINT`. What they do is looked at in means over groups of programs, for single times to
first token jump by up to an iteration with any move.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
from jaxtyping import Float

from agentjax.calibrate.parameters import Parameter, with_values
from agentjax.calibrate.replayed import Simulator, losses
from agentjax.cluster import Cluster

FACTORS = (1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 16.0)
FAR = 8
"""More moves up, to its bound, of a coefficient that was 0 before, whose size is open; and one to 0."""
NOTICED = 0.5 * 1e-3**2
"""A rise of the loss that is not looked at: that of errors of 0.1 %."""
JOINT = 0.95
"""Cosine from which on two parameters are said to be determined only together."""
SEARCH = (0.5, 1.75)
"""How far the second parameter is moved (log), relative to a move that does as much as the first's."""
LEAST_EFFECT, LARGE_EFFECT = 5e-3, 0.2
"""Mean changes of log ratios at which two parameters are compared: as large as both can make them, for small
ones may be the chance of single times, but not larger than they need to be."""


@dataclass(frozen=True)
class Determined:
    """What a recording says about a parameter, in its unit.

    Attributes:
        low, high: values from which on the loss is told apart from the best; None: none of those tried. A
            coefficient that was 0 before the fit has a low only if it is told apart from 0.
        together_with: another parameter that does nearly the same, so that only the two together are
            determined; then there are no low and high.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    together_with: str | None = None

    @property
    def is_free(self) -> bool:
        """Not determined at all."""
        return self.low is None and self.high is None and self.together_with is None

    @property
    def words(self) -> str:
        """What the recording says, as a phrase."""
        if self.together_with:
            return f"determined only together with {self.together_with}"
        if self.is_free:
            return "not determined by this recording"
        if self.low is None:
            return f"below {self.high:.4g}"
        if self.high is None:
            return f"above {self.low:.4g}"
        return f"between {self.low:.4g} and {self.high:.4g}"


@dataclass(frozen=True)
class _Moved:
    """What became of the moves of a parameter: the values, whether told apart, and their effects."""

    values: Float[np.ndarray, " moves"]
    apart: list[bool]
    effects: Float[np.ndarray, "moves means"]

    def side(self, value: float, sign: int) -> list[tuple[float, bool]]:
        """The moves above (sign 1) or below (-1) a value."""
        moves = zip(self.values.tolist(), self.apart, strict=True)
        return [move for move in moves if sign * (move[0] - value) > 0]


def determine(
    simulator: Simulator, cluster: Cluster, parameters: Sequence[Parameter], values: Mapping[str, float]
) -> tuple[Float[np.ndarray, "1 observations"], tuple[Determined, ...]]:
    """Log ratios at the fitted values, and what the recording says about each parameter.

    Args:
        simulator: of the recorded schedule.
        cluster: where the values belong.
        parameters: that were fitted.
        values: the best ones, by name.
    """
    moves = {parameter.name: _moves(parameter, values[parameter.name]) for parameter in parameters}
    candidates = [dict(values)]
    candidates += [dict(values) | {name: moved} for name, all_moved in moves.items() for moved in all_moved]
    ratios = simulator.log_ratios([with_values(cluster, candidate) for candidate in candidates])
    best, rest = ratios[:1], ratios[1:]
    told: dict[str, _Moved] = {}
    for name, moved in moves.items():
        some, rest = rest[: len(moved)], rest[len(moved) :]
        apart = [_told_apart(simulator, best[0], each) for each in some]
        told[name] = _Moved(np.asarray(moved), apart, _effects(simulator, best[0], some))
    likeness = _likeness(simulator, cluster, parameters, values, best[0], told)
    found = []
    for name, value in values.items():
        others = {other: cosine for (one, other), cosine in likeness.items() if one == name}
        partner = max(others, key=lambda other: others[other], default=None)
        cosine = others[partner] if partner else 0.0
        if cosine > JOINT:
            found.append(Determined(name, value, None, None, partner))
            continue
        widen = 1 / math.sqrt(1 - cosine**2)
        below, above = told[name].side(value, -1), told[name].side(value, 1)
        low = None if (0.0, False) in below else _end([move for move in below if move[0]], value, widen)
        found.append(Determined(name, value, low, _end(above, value, widen)))
    return best, tuple(found)


def _moves(parameter: Parameter, value: float) -> list[float]:
    """Values around the best one, from near to far, below and above."""
    by = [value / factor for factor in FACTORS] + [value * factor for factor in FACTORS]
    if parameter.is_limit:
        by = [math.floor(each) if each < value else math.ceil(each) for each in by]
        by = [max(each, parameter.low) for each in by]
    elif not parameter.start:
        by += [*np.geomspace(value * FACTORS[-1], max(parameter.high, value * FACTORS[-1]), FAR + 1)[1:], 0.0]
    return list(dict.fromkeys(float(each) for each in by if each != value))


def _told_apart(simulator: Simulator, best: Float[np.ndarray, " n"], moved: Float[np.ndarray, " n"]) -> bool:
    """Whether the loss rises by more than noise from the log ratios of the best values to those of others."""
    if np.isnan(moved).any():
        return True
    replayed = simulator.replayed
    rises = replayed.weight * (losses(moved) - losses(best))
    used = replayed.weight > 0
    groups = np.bincount(replayed.block[used], rises[used])
    count = np.unique(replayed.block[used]).size
    error = math.sqrt(count / max(1, count - 1) * float(np.sum((groups - groups.sum() / count) ** 2)))
    return float(groups.sum()) > 2 * error + NOTICED


def _end(moves: list[tuple[float, bool]], value: float, widen: float) -> float | None:
    """The nearest move from which on all are told apart, further out by a factor of the distance (log)."""
    end = None
    ordered = sorted(moves, key=lambda move: -abs(math.log(move[0] / value)))
    for moved, apart in ordered:
        if not apart:
            break
        end = moved
    if end is None:
        return None
    distance = math.log(end / value) * widen
    return value * math.exp(distance) if abs(distance) <= abs(math.log(ordered[0][0] / value)) else None


def _effects(
    simulator: Simulator, best: Float[np.ndarray, " n"], ratios: Float[np.ndarray, "moves n"]
) -> Float[np.ndarray, "moves means"]:
    """What each move does to the mean log ratio of every metric in every group of programs, weighted.

    Means, since single times to first token jump by up to an iteration with any move.
    """
    replayed = simulator.replayed
    used = replayed.weight > 0
    group = np.unique(np.stack([replayed.metric, replayed.block])[:, used], axis=1, return_inverse=True)[1]
    group, weight = group.reshape(-1), replayed.weight[used]
    changes = np.nan_to_num((ratios - best)[:, used])
    sums = np.stack([np.bincount(group, weight * change) for change in changes])
    return sums / np.sqrt(np.bincount(group, weight))


def _likeness(
    simulator: Simulator,
    cluster: Cluster,
    parameters: Sequence[Parameter],
    values: Mapping[str, float],
    best: Float[np.ndarray, " n"],
    told: Mapping[str, _Moved],
) -> dict[tuple[str, str], float]:
    """For every ordered pair of parameters, how far a move of one can be made by a move of the other.

    It is the cosine c for which a share 1 - c^2 of the square of what the first does remains after taking off
    what the second does, moved so that the least remains.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    sizes = {name: np.linalg.norm(moved.effects, axis=1) for name, moved in told.items()}
    most = {
        name: float(np.max(size[told[name].values > values[name]], initial=0.0))
        for name, size in sizes.items()
    }
    likeness = dict.fromkeys(permutations(values, 2), 0.0)
    for name, other in combinations(values, 2):
        common = min(most[name], most[other], LARGE_EFFECT)
        if common < LEAST_EFFECT:
            continue
        move, matching = (
            _move_of(common, told[each].values, sizes[each], values[each]) for each in (name, other)
        )
        tried = values[other] * (matching / values[other]) ** np.linspace(*SEARCH, simulator.lanes - 1)
        candidates = [{name: move}, *({other: float(each)} for each in tried)]
        clusters = [
            with_values(cluster, dict(values) | {key: by_name[key].round(each) for key, each in one.items()})
            for one in candidates
        ]
        effect, *others = _effects(simulator, best, simulator.log_ratios(clusters))
        remains = min(float(np.linalg.norm(effect - each) / np.linalg.norm(effect)) for each in others)
        likeness[name, other] = likeness[other, name] = math.sqrt(max(0.0, 1 - remains**2))
    return likeness


def _move_of(
    size: float, moved: Float[np.ndarray, " moves"], sizes: Float[np.ndarray, " moves"], value: float
) -> float:
    """The move up, between those tried, that does so much."""
    up = np.flatnonzero(moved > value)
    up = up[np.argsort(moved[up])]
    reached = np.maximum.accumulate(np.maximum(sizes[up], 1e-12)) * (1 + 1e-9 * np.arange(len(up)))
    return value * math.exp(np.interp(math.log(size), np.log(reached), np.log(moved[up] / value)))
