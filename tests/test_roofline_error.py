"""The published errors of the roofline estimate are those that the script computes."""

from pathlib import Path

import jax
import pytest

from benchmarks.roofline_error import DATA, report, signed

jax.config.update("jax_enable_x64", True)

DOCS = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def test_signs():
    assert [signed(value) for value in (-0.4, 0.4, 12.6, -12.6)] == ["0", "0", "+13", "−13"]


@pytest.mark.skipif(not DATA.is_dir(), reason="no measured profiles (../shared/data/profiles)")
def test_the_published_table_is_what_the_script_prints():
    text = DOCS.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- output of benchmarks/roofline_error.py -->\n")
    published, _, after = rest.partition("\n<!-- end of the output -->")
    assert after
    assert published == report(DATA)
