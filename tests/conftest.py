"""What all tests share."""

import os

import pytest

from agentjax.performance import valid
from agentjax.performance.load import available


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What plays on a real server comes last, in one process, when the others have little left to do."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is not None)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory):
    """Commands under test keep compiled programs in a folder of this session instead of the user's."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    before = os.environ.get("AGENTJAX_CACHE_DIR")
    os.environ["AGENTJAX_CACHE_DIR"] = str(folder / "xla")
    yield
    if before is None:
        del os.environ["AGENTJAX_CACHE_DIR"]
    else:
        os.environ["AGENTJAX_CACHE_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def _warned_of_before():
    """Runs beyond the range of the shipped coefficients say nothing, as if they had been warned of before."""
    valid._warned.update(available())
