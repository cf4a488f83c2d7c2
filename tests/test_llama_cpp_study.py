"""The recordings of calibration/llama_cpp: the fit comes out again, and predicts what was measured."""

from pathlib import Path

import numpy as np
import pytest

from agentjax.calibrate.__main__ import main as calibrate
from agentjax.cluster import Cluster
from agentjax.performance import load
from agentjax.performance.load import read
from agentjax.readers import read_recording
from agentjax.validate.programs import validate_programs

FOLDER = Path(__file__).parent.parent / "calibration" / "llama_cpp"
LIMITS = {"max_num_seqs": 4, "kv_blocks": 16384, "max_num_batched_tokens": 2048, "max_model_len": 32768}


@pytest.fixture(scope="module")
def cluster():
    return Cluster(slots=True, block_size=1, **LIMITS, performance=load(FOLDER / "mid.json"))


def test_the_fit_comes_out_again(tmp_path):
    out = tmp_path / "again.json"
    data = ",".join(str(FOLDER / f"bench-{part}.jsonl.gz") for part in (1, 2))
    assert calibrate([f"data=[{data}]", f"out={out}", "max_num_batched_tokens=2048"]) == 0
    again, kept = (read(path).coefficients.model_dump() for path in (out, FOLDER / "mid.json"))
    assert again.keys() == kept.keys()
    for name, value in kept.items():
        np.testing.assert_allclose(again[name], value, rtol=0.02, atol=1e-9, err_msg=name)


@pytest.mark.filterwarnings("ignore::agentjax.errors.OutsideRange")
@pytest.mark.parametrize(("load_name", "repeats"), [("busy", 5), ("calm", 3)])
def test_what_was_measured_is_predicted(cluster, load_name, repeats):
    files = sorted(FOLDER.glob(f"{load_name}-*.jsonl.gz"))
    assert len(files) == repeats
    found = validate_programs([read_recording(path) for path in files], cluster)
    assert not found.left_out
    assert abs(found.errors["jct_mean"].error_pct) < 5
    assert abs(found.errors["itl_p50"].error_pct) < 6
    assert abs(found.errors["ttft_mean"].error_pct) < 10
    measured, simulated = found.hit_rates
    assert simulated == pytest.approx(measured, abs=0.05)


@pytest.mark.filterwarnings("ignore::agentjax.errors.OutsideRange")
def test_without_queues_every_call_finds_what_it_found(cluster):
    found = validate_programs([read_recording(FOLDER / "calm-1.jsonl.gz")], cluster)
    np.testing.assert_array_equal(found.simulated[0].cached_tokens, found.measured[0].cached_tokens)
    assert found.program_error_pct < 5
