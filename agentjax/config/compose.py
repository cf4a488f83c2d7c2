"""Config groups and their options, composed one group at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from agentjax.config.files import COEFFICIENTS, FILE, file_overrides
from agentjax.config.sentences import no_value, unknown_key
from agentjax.errors import among, complaint

SIMULATION_GROUPS = ("workload", "cluster", "performance", "retention", "scheduling", "routing", "admission")
"""Groups that say what is simulated; the others say how and where to."""
MOST_POINTS = 1_000_000
"""Points of the largest grid, and values of its longest axis; more are refused before they are made."""


def plain(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """A composed configuration as dictionaries and lists."""
    return OmegaConf.to_container(config, resolve=resolve)  # pyright: ignore[reportReturnType]


def refuse_missing(config: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses values that are marked as missing.

    Raises:
        InputError: names the first one.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            refuse_missing(value, f"{prefix}{key}.")
        elif value == "???":
            raise no_value(f"{prefix}{key}")


def refuse_unknown(config: Mapping[str, Any], overrides: Sequence[str], config_name: str) -> None:
    """Refuses what Hydra lets a command line do but a command would overlook or stumble over: new keys where
    no part of it reads them, whole groups taken out, and values of `execution` that cannot be.

    Raises:
        InputError: names the argument or the key.
    """
    added = [item for item in overrides if item.startswith("+")]
    known: Any = None
    for item in added:
        key = item.lstrip("+").partition("=")[0].partition("@")[0]
        # A simulation group refuses keys by itself; a grid may have a baseline of any axes.
        if key.partition(".")[0] in (*SIMULATION_GROUPS, "grid", "hydra"):
            continue
        if known is None:
            known = plain(hydra.compose(config_name, overrides=[o for o in overrides if o not in added]))
        above = _at(known, key.rpartition(".")[0])
        if not isinstance(above, Mapping) or (above and key.rpartition(".")[2] not in above):
            raise unknown_key(key, known)
    for item in overrides:
        key = item[1:].partition("=")[0]
        if item.startswith("~") and "." not in key:
            raise complaint(f"argument {item!r}", "a key without which there is no run", f"{key}=VALUE")
    lanes = _at(config, "execution.lanes_per_tile")
    if lanes is not None and (not isinstance(lanes, int) or isinstance(lanes, bool) or lanes < 1):
        raise complaint("execution.lanes_per_tile", repr(lanes), "a whole number >= 1")


def _at(config: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for part in key.split(".") if key else ():
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


class Groups:
    """The options of the simulation groups, inside a running command.

    A group's option does not depend on the other groups, so each is composed once, instead of once per point
    of a grid.
    """

    def __init__(self, overrides: list[str]):
        self._overrides = overrides
        self._config_name = HydraConfig.get().job.config_name
        self._loader = GlobalHydra.instance().config_loader()
        self._composed: dict[tuple[str, str], dict[str, Any]] = {}

    def options(self, group: str) -> list[str]:
        """Names of a group's options."""
        return self._loader.get_group_options(group)

    def compose(self, group: str, option: str) -> dict[str, Any]:
        """The configuration of one option, with the command line's values for those of its keys that the
        option has. An option of `performance` may also be a coefficient file.

        Raises:
            InputError: the group has no such option, or there is no such file.
        """
        is_file = group == "performance" and option.endswith(".json")
        if not is_file and option not in self.options(group):
            raise complaint(group, repr(option), among(option, self.options(group)))
        if (group, option) not in self._composed:
            others, own = [], []
            for item in self._overrides:
                key = item.lstrip("+~").partition("=")[0]
                if key == COEFFICIENTS and FILE in self._overrides and option != "file":
                    continue  # `performance=PATH.json` is an option of its own, not a value for others
                if key.startswith(group + "."):
                    own.append((key, item))
                elif key != group:
                    others.append(item)
            chosen = [*others, *(file_overrides(option) if is_file else [f"{group}={option}"])]
            config = hydra.compose(self._config_name, overrides=chosen)
            fitting = [
                item
                for key, item in own
                if item.startswith("+") or OmegaConf.select(config, key, default=self) is not self
            ]
            if fitting:
                config = hydra.compose(self._config_name, overrides=[*chosen, *fitting])
            self._composed[group, option] = plain(config)[group]
        return self._composed[group, option]
