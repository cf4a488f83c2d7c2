"""What all tests share."""

import os

import pytest


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
