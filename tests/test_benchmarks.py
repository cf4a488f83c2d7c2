"""The benchmarks run, and the baselines that they compare with do what the recorded scheduler did."""

import shutil

import numpy as np
import pytest

from benchmarks import engine, roofline_error


@pytest.fixture(scope="module")
def recording():
    return engine.recorded()


def test_plain_python_equals_the_recorded_run(recording):
    calls = engine.recorded_calls(engine.plain_python(recording))
    np.testing.assert_array_equal(calls, engine.recorded_calls(recording["results"]))


@pytest.mark.skipif(not any(map(shutil.which, engine.COMPILERS)), reason="no C++ compiler")
def test_the_floor_equals_the_recorded_run(recording):
    floor = engine.run_floor(recording, lanes=2, repeats=1)
    for core_s, calls in floor.values():
        assert core_s > 0
        np.testing.assert_array_equal(calls, engine.recorded_calls(recording["results"]))


def test_the_floor_is_left_out_where_nothing_compiles_it(recording, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert engine.run_floor(recording, lanes=2, repeats=1) is None


def test_every_row_of_the_engine_in_a_tiny_form(capsys):
    assert engine.main(["--tiny"]) == 0
    said = capsys.readouterr().out
    for what in (
        "plain Python",
        "engine, 1 lane",
        "steps a call",
        "one-call programs",
        "a step",
        "compiling",
    ):
        assert what in said
    for line in said.splitlines():
        if "calls as recorded" in line:
            found, _, of = line.split("│")[2].split()
            assert found == of, line


def test_a_size_has_a_process_of_its_own_and_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(engine, "LONGEST_S", 0.05)
    assert engine.measured("replicas", engine.WHOLE, 1, 3) is None


def test_a_missing_folder_of_profiles_is_one_sentence(tmp_path, capsys):
    assert roofline_error.main(["--data", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
