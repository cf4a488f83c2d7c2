"""Kernels of several results (`agentjax.compilation`) compile for all kinds of runs, and change no result."""

import os
import subprocess
import sys
from pathlib import Path

from agentjax.compilation import SMALL_LOOP_BYTES, backend_options
from tests.fused import CASES


def digests(flags: str, cache: Path) -> dict[str, str]:
    environment = {**os.environ, "XLA_FLAGS": flags, "AGENTJAX_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fused"],
        env=environment,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


def test_results_do_not_depend_on_fusion(tmp_path: Path):
    plain = f"--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold={SMALL_LOOP_BYTES}"
    fused = digests("", tmp_path / "fused")
    assert fused.keys() == CASES.keys()
    assert fused == digests(plain, tmp_path / "plain")


def test_fusion_is_asked_of_versions_that_have_it():
    assert "multi_output_fusion=true" in backend_options("0.10.2")
    assert "multi_output_fusion=true" in backend_options("1.0.0")
    assert "multi_output_fusion" not in backend_options("0.9.2")
