"""JAX as the commands use it: all cores as devices, compiled programs kept between runs."""

import contextlib
import os
import sys
from importlib import metadata
from pathlib import Path

from agentjax.errors import complaint, shown

VARIABLE = "AGENTJAX_CACHE_DIR"

SMALL_LOOP_BYTES = 1_000_000
"""Loops up to this size run as one compiled function on CPUs instead of kernel by kernel: a lone lane is
then several times faster; batches of lanes would be slower."""

FUSION_SINCE = (0, 10)
"""Versions of jaxlib from this one on can fuse several results into one kernel on CPUs, which halves the cost
of a step; tried with 0.10.2. Results do not depend on it."""


def cache_folder() -> Path | None:
    """Folder of the compilation cache; `AGENTJAX_CACHE_DIR` sets it, an empty value means no cache.

    Without the variable it is the user's cache folder: `%LOCALAPPDATA%` on Windows, `~/Library/Caches` on
    macOS, otherwise `$XDG_CACHE_HOME` or `~/.cache`; in it, `agentjax/xla`.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen.strip() else None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "agentjax" / "xla"


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def backend_options(jaxlib: str | None = None) -> str:
    """XLA's options for CPUs, for a version of jaxlib; None: the installed one."""
    options = [f"xla_cpu_small_while_loop_byte_threshold={SMALL_LOOP_BYTES}"]
    major, minor, *_ = (jaxlib or metadata.version("jaxlib")).split(".")
    if (int(major), int(minor)) >= FUSION_SINCE:
        options.append("xla_cpu_use_multi_output_fusion=true")
    return ",".join(options)


def prepare(devices: int | None = None) -> None:
    """Sets up JAX for the simulator; call it before anything is computed. It changes JAX for the whole
    process, which is why the commands do it and importing the package does not.

    Args:
        devices: CPU devices, at most one a core; None: one a core. Accelerators are used as they are.

    Raises:
        InputError: another number of devices.
    """
    most = cores()
    if devices is not None and (isinstance(devices, bool) or devices not in range(1, most + 1)):
        expected = f"null or a whole number from 1 to {most}, the cores that may be used"
        raise complaint("execution.devices", shown(devices), expected)
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_extra_options" not in flags:  # the user's own are not overridden
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_extra_options={backend_options()}".strip()
    import jax

    with contextlib.suppress(RuntimeError):  # the backend runs already, with its own number of devices
        jax.config.update("jax_num_cpu_devices", devices or most)
    folder = cache_folder()
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
