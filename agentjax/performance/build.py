"""From a `performance` configuration to a model."""

from collections.abc import Mapping
from typing import Any

from agentjax.errors import closest, complaint, shown
from agentjax.performance.affine import Affine
from agentjax.performance.base import MOST_S, AbstractPerformance
from agentjax.performance.estimate import build_roofline
from agentjax.performance.load import Coefficients, load
from agentjax.performance.tables import build_table

_HOST = ("overhead_s", "wakeup_s")
_EXPLICIT = tuple(Coefficients.model_fields)


def build_performance(config: Mapping[str, Any]) -> AbstractPerformance:
    """The model that a configuration describes.

    **Arguments:**

    - `config`: `model` and `hardware`, as for `build_roofline`; or `profile`, a folder of measurements, as
        for `build_table`; or `coefficients`, a name or path as for `load`, where `overhead_s` and `wakeup_s`
        may replace the file's; or the coefficients themselves, in seconds: `c0_s`, and others that are not 0.

    Raises `InputError` for anything else.
    """
    if "model" in config or "hardware" in config:
        return build_roofline(config)
    if "profile" in config:
        return build_table(config)
    for key in config:
        if key not in ("coefficients", *_EXPLICIT):
            raise complaint(
                f"performance.{key}", "an unknown field", closest(key, ("coefficients", *_EXPLICIT))
            )
    given = {key: _seconds(key, config[key]) for key in _EXPLICIT if key in config}
    if "coefficients" not in config:
        if "c0_s" not in given:
            raise complaint("performance", "neither coefficients nor c0_s", "one of the two")
        return Affine(**given)
    both = [key for key in given if key not in _HOST]
    if both:
        raise complaint(
            f"performance.{both[0]}", "a coefficient beside the coefficient file", "one of the two"
        )
    name = config["coefficients"]
    if not isinstance(name, str):
        raise complaint("performance.coefficients", shown(name), "the name or path of a coefficient file")
    return load(name, **given)


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_S:
        raise complaint(f"performance.{key}", shown(value), f"a number of seconds from 0 to {MOST_S:g}")
    return float(value)
