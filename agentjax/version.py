"""Version of the installed package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    """Version of agentjax; `unknown` where it is not installed."""
    try:
        return version("agentjax")
    except PackageNotFoundError:
        return "unknown"
