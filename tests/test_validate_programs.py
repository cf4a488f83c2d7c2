"""Played programs against simulated ones: a run of the simulator, recorded as a client would have seen it, is
reproduced; what is changed in the recording comes out as the error."""

import json
from dataclasses import replace

import numpy as np
import pytest

from agentjax.cluster import Cluster
from agentjax.engine.run import LaneSpec, run_lanes
from agentjax.errors import InputError
from agentjax.performance import Affine
from agentjax.policies import Policy
from agentjax.records import Place, Recording, RequestRecord, to_json
from agentjax.validate.__main__ import main
from agentjax.validate.programs import validate_programs
from agentjax.workloads.pack import pack
from agentjax.workloads.program import Call, Program

COST = {"c0_s": 8e-3, "c_tok_s": 1e-3, "c_seq_s": 2e-3, "c_kv_s": 2e-6, "wakeup_s": 1e-3}
CLUSTER = Cluster(
    slots=True,
    block_size=1,
    max_num_seqs=4,
    kv_blocks=4096,
    max_num_batched_tokens=512,
    max_model_len=4096,
    performance=Affine(**COST),
)
VLLM = Cluster(
    max_num_seqs=4,
    kv_blocks=256,
    max_num_batched_tokens=512,
    max_model_len=4096,
    performance=Affine(**COST),
)
PROGRAMS = [
    Program(
        f"agent-{p}",
        0.05 * p,
        (((*(Call(60 + 10 * p + k, 5 + k, None, None, 0.1 * (p + 1)) for k in range(3)),),),),
    )
    for p in range(5)
]


def played(programs, cluster=CLUSTER, slower=1.0):
    """What a client sees of a simulated run; the times after each sending `slower` times as long."""
    workload = pack(programs)
    outcome = run_lanes([workload], [LaneSpec(0, cluster, Policy())], leaps=False, series=True)
    ends = np.unique(np.asarray(outcome.series.end)[:, 0])
    requests, delay_s = [], 0.0
    for call in range(len(workload.gap)):
        program, turn = int(workload.call_program[call]), int(workload.call_turn[call])
        sent, first, last = (
            int(column[0, call])
            for column in (
                outcome.call_released_ns,
                outcome.call_first_token_ns,
                outcome.call_finished_ns,
            )
        )
        delay_s = 0.0 if turn == 0 else delay_s
        tokens = ends[(ends >= first) & (ends <= last)]
        assert len(tokens) == workload.output_tokens[call]
        sent_s = sent / 1e9 + delay_s
        times_s = sent_s + slower * (tokens - sent) / 1e9
        delay_s += (slower - 1) * (last - sent) / 1e9
        requests.append(
            RequestRecord(
                request=f"{program}-{turn}",
                sent_s=sent_s,
                first_token_s=float(times_s[0]),
                finished_s=float(times_s[-1]),
                prompt_tokens=int(workload.prompt_tokens[call]),
                output_tokens=int(workload.output_tokens[call]),
                cached_tokens=int(outcome.call_cached_tokens[0, call]),
                gaps_s=tuple(np.diff(times_s).tolist()),
                place=Place(workload.names[program], 0, 0, turn),
            )
        )
    return Recording(tuple(requests), {"model": "simulated", "url": "http://127.0.0.1:1"})


@pytest.fixture(scope="module")
def recording():
    return played(PROGRAMS)


def write(path, recording):
    header = {"agentjax_bench": 1, "mode": "programs", "url": "http://127.0.0.1:1", "model": "simulated"}
    lines = [header, *map(to_json, recording.requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return str(path)


def test_a_run_of_the_simulator_is_reproduced(recording):
    found = validate_programs([recording], CLUSTER)
    assert found.programs == 5
    assert found.calls == 15
    for name, error in found.errors.items():
        assert error.error_pct == pytest.approx(0, abs=1e-4), name
        assert error.spread_pct is None
    assert found.program_error_pct < 1e-4
    measured, simulated = found.hit_rates
    assert measured == simulated > 0.1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_of_vllm_is_reproduced(asynchronous):
    cluster = replace(VLLM, async_scheduling=asynchronous)
    recording = played(PROGRAMS, cluster)
    found = validate_programs([recording], cluster)
    for name, error in found.errors.items():
        assert error.error_pct == pytest.approx(0, abs=1e-4), name
    assert found.hit_rates[0] == found.hit_rates[1] > 0.1
    assert found.to_json()["cluster"]["async_scheduling"] is asynchronous


def test_what_is_changed_is_the_error(recording):
    slower = played(PROGRAMS, slower=1.25)
    found = validate_programs([slower], CLUSTER)
    assert found.errors["itl_p50"].error_pct == pytest.approx(-20, abs=0.01)
    assert found.errors["e2e_mean"].error_pct < -10
    assert found.program_error_pct > 5


def test_repeats_show_their_spread(recording):
    late = [
        replace(each, finished_s=each.finished_s + 1.0) if each.request.endswith("-2") else each
        for each in recording.requests
    ]
    other = Recording(tuple(late), recording.about)
    found = validate_programs([recording, other], CLUSTER)
    error = found.errors["jct_mean"]
    level = found.measured[0].jct_s.mean()
    assert error.measured_s == pytest.approx(level + 0.5)
    assert error.spread_pct == pytest.approx(50 / (level + 0.5))
    assert error.simulated_s == pytest.approx(level, rel=1e-6)


def test_several_tokens_an_event_are_as_many_gaps(recording):
    def merged(each):
        """The last two tokens in one event."""
        gaps = (*each.gaps_s[:-2], sum(each.gaps_s[-2:]))
        return replace(each, gaps_s=gaps, event_tokens=(1,) * len(gaps) + (2,))

    merging = Recording(tuple(map(merged, recording.requests)), recording.about)
    one, two = (validate_programs([each], CLUSTER).measured[0] for each in (recording, merging))
    assert len(one.itl_s) == len(two.itl_s)
    assert one.itl_s.mean() == pytest.approx(two.itl_s.mean())


def test_recordings_of_other_programs_are_refused(recording):
    fewer = Recording(tuple(each for each in recording.requests if each.request[0] != "0"), recording.about)
    with pytest.raises(
        InputError, match=r"data: found program 'agent-0' in one recording but not in another"
    ):
        validate_programs([recording, fewer], CLUSTER)


def test_requests_of_a_grid_are_refused(recording):
    grid = Recording(tuple(replace(each, place=None) for each in recording.requests), {"file": "bench.jsonl"})
    with pytest.raises(
        InputError, match=r"bench.jsonl: found requests of no program, expected programs, as of"
    ):
        validate_programs([grid], CLUSTER)


def test_command(tmp_path, recording, capsys):
    file = write(tmp_path / "played.jsonl", recording)
    limits = [
        f"cluster.{name}={getattr(CLUSTER, name)}"
        for name in ("max_num_seqs", "kv_blocks", "max_num_batched_tokens", "max_model_len")
    ]
    out, figure = tmp_path / "out.json", tmp_path / "jct.png"
    coefficients = [f"performance.{name}={value}" for name, value in COST.items()]
    code = main(
        [
            f"data=[{file},{file}]",
            "cluster=llama_cpp",
            *limits,
            *coefficients,
            f"out={out}",
            f"figure={figure}",
        ]
    )
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "JCT mean (s)" in said.out
    assert "mean absolute error of a program's JCT 0.0 %" in said.out
    assert figure.stat().st_size > 10_000
    result = json.loads(out.read_text("utf-8"))
    assert result["repeats"] == 2
    assert result["errors"]["jct_mean"]["spread_pct"] == 0
    assert set(result["jct_s"]["measured"][0]) == {program.name for program in PROGRAMS}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data={file}", "performance.c0_s=1"], "cluster: found no limits, expected cluster=NAME"),
        (["data={file}", "cluster=llama_cpp"], "performance: found nothing, expected the endpoint's"),
        (["data=[{file},none.jsonl]", "cluster=llama_cpp", "performance=affine"], "no such file"),
        (["data=[]", "cluster=llama_cpp", "performance=affine"], "data: found an empty list"),
        (
            ["data={file}", "cluster=llama_cpp", "fit_overhead=true"],
            "fit_overhead: found true, expected false",
        ),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, recording, capsys, arguments, words):
    file = write(tmp_path / "played.jsonl", recording)
    assert main([argument.format(file=file) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error.lower() if words == "no such file" else words in error
    assert error.count("\n") == 1
