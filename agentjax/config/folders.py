"""Where the configuration lies."""

from pathlib import Path

from agentjax.errors import InputError


def config_folder() -> Path:
    """The folder of the configuration groups: inside an installed package, or beside the package in a
    checkout.

    Raises:
        InputError: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "sweep.yaml").is_file():
            return folder
    raise InputError(
        f"configuration: found no folder {package / 'conf'}, expected the one that is installed with agentjax"
    )
