"""From a workload config (`conf/workload/*.yaml`) to programs."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from agentjax.errors import closest, complaint, expecting, shown
from agentjax.workloads.arrivals import fixed, gamma
from agentjax.workloads.bfcl import bfcl
from agentjax.workloads.production import production
from agentjax.workloads.program import Program
from agentjax.workloads.reader import read_programs
from agentjax.workloads.swebench import swebench
from agentjax.workloads.synthetic import Positive, Seed, Target, checked

GENERATORS: dict[str, Callable[..., list[Program]]] = {
    "swebench": swebench,
    "bfcl": bfcl,
    "production": production,
}


@checked
def file(
    path: Annotated[str, expecting("the path of a workload file")],
    *,
    format: Annotated[
        Literal["auto", "native", "llmservingsim", "recording"],
        expecting("auto, native, llmservingsim or recording"),
    ] = "auto",
    seed: Seed = 0,
    rate: Target = None,
    arrival_cv: Positive = 1.0,
) -> list[Program]:
    """The programs of a file with its own arrivals, or with ones drawn at `rate` programs per second."""
    programs = read_programs(path, format)
    return fixed(programs) if rate is None else gamma(programs, rate=rate, cv=arrival_cv, seed=seed)


def build_programs(config: Mapping[str, Any]) -> list[Program]:
    """The programs of a config: `generator: name` or `path: file`, and the parameters of that function."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportAssignmentType]
    parameters = {str(key): value for key, value in config.items()}
    if ("path" in parameters) == ("generator" in parameters):
        found = "both generator and path" if "path" in parameters else "neither generator nor path"
        raise complaint("workload", found, "one of them")
    if "path" in parameters:
        if parameters["path"] == "???":
            raise complaint("file, path", "nothing", "the path of a workload file")
        return file(**parameters)
    name = parameters.pop("generator")
    if name not in GENERATORS:
        raise complaint("workload, generator", shown(name), closest(str(name), GENERATORS))
    return GENERATORS[name](**parameters)
