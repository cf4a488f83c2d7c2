"""Who may import whom: the engine knows policies and performance models only by their interfaces."""

import ast
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "agentjax"
ARRAYS = {"equinox", "jax", "jaxtyping", "numpy"}
READERS = {"jaxtyping", "numpy", "omegaconf", "pydantic", "pydantic_core"}
ALLOWED = {
    "engine": ARRAYS
    | {"agentjax.cluster", "agentjax.engine", "agentjax.errors", "agentjax.performance.base"}
    | {"agentjax.policies.base", "agentjax.policies.policy", "agentjax.workloads.pack"},
    "policies": ARRAYS | {"agentjax.errors", "agentjax.policies"},
    "performance": ARRAYS | {"agentjax.errors", "agentjax.performance", "pydantic", "yaml"},
    "workloads": READERS | {"agentjax.errors", "agentjax.readers", "agentjax.records", "agentjax.workloads"},
    "readers": {"agentjax.errors", "agentjax.readers", "agentjax.records", "pydantic"},
    "records.py": set(),
    "bench": {"agentjax.bench", "agentjax.errors", "agentjax.readers", "agentjax.records"}
    | {"agentjax.version", "agentjax.workloads", "httpx", "numpy", "pydantic", "rich"},
    "calibrate": ARRAYS
    | {"agentjax.calibrate", "agentjax.cluster", "agentjax.config", "agentjax.engine.run", "agentjax.errors"}
    | {"agentjax.metrics", "agentjax.performance", "agentjax.plotting", "agentjax.policies"}
    | {"agentjax.readers", "agentjax.records", "agentjax.version", "agentjax.workloads", "optax", "pydantic"},
    "simulate": ARRAYS
    | {"agentjax.cluster", "agentjax.config", "agentjax.energy", "agentjax.engine.run"}
    | {"agentjax.performance", "agentjax.policies", "agentjax.results", "agentjax.workloads"},
    "results.py": {"agentjax.cluster", "agentjax.energy", "agentjax.metrics", "agentjax.workloads.pack"}
    | {"numpy"},
    "store.py": {"agentjax.errors"},
    "cluster.py": {"agentjax.errors", "agentjax.performance"},
    "metrics.py": {"jaxtyping", "numpy"},
    "statistics.py": {"jaxtyping", "numpy"},
}
"""What each part may import when loaded, besides the standard library; with a package, what is in it."""


def modules(source):
    """Modules that a source imports at its top level; `from a import b` is `a.b` where that is a module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = SOURCES.parent / node.module.replace(".", "/") / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def is_allowed(module, allowed):
    inside = any(f"{module}.".startswith(f"{name}.") for name in allowed)
    return inside or module.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("part", ALLOWED)
def test_arrows_of_import(part):
    place = SOURCES / part
    sources = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    sources = [source for source in sources if source.name != "__main__.py"]  # a command puts parts together
    assert sources
    for source in sources:
        for module in modules(source.read_text("utf-8")):
            assert is_allowed(module, ALLOWED[part]), f"{source.relative_to(SOURCES)} imports {module}"


@pytest.mark.parametrize(
    "line",
    [
        "from agentjax.policies import retention",
        "from agentjax.policies.retention.lru import lru",
        "from agentjax.performance import Affine",
        "from agentjax.workloads import jsonl",
        "import hydra.core",
        "import xarray as xr",
        "from matplotlib import figure",
    ],
)
def test_the_engine_may_not(line):
    assert not any(is_allowed(module, ALLOWED["engine"]) for module in modules(line))
