"""A sweep is its cells, however it is computed."""

import io
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from dinfer.cli import app
from dinfer.errors import InputError
from dinfer.machine import load_machine
from dinfer.model import ModelSpec, load_model
from dinfer.record.presets import preset
from dinfer.record.synth import profile, synth
from dinfer.sweep import COLUMNS, TERMS, Job, cell, offline_profile, parse_grid, sweep
from dinfer.systems import SYSTEMS, predict

MIB, GIB = 2**20, 2**30
SPEC = ModelSpec(
    "small",
    "llama",
    layers=4,
    hidden=256,
    neurons=700,
    heads=4,
    kv_heads=4,
    head_dim=64,
    vocab=500,
    activation="relu",
)


@pytest.fixture(scope="module")
def job() -> Job:
    trace = synth(SPEC, preset("relullama-7b"), 24, 2)
    machine = load_machine("pc-low")
    machine = replace(machine, gpu=replace(machine.gpu, context_bytes=MIB))
    return Job(trace, machine, 64, offline_profile(trace))


BUDGETS = [2 * MIB, 8 * MIB, 10 * MIB, 64 * MIB]


def test_a_row_is_a_cell_in_the_order_asked(job):
    frame = sweep(job, BUDGETS, ["oracle", "powerinfer"])
    assert list(frame.columns) == list(COLUMNS)
    assert list(zip(frame["vram_bytes"], frame["system"], strict=True)) == [
        (budget, system) for budget in BUDGETS for system in ("oracle", "powerinfer")
    ]
    row = frame.iloc[3]
    run = SYSTEMS["powerinfer"](job.trace, job.machine, 8 * MIB, context=64, frequency=job.frequency)
    assert row["tokens_per_second"] == run.timeline.tokens_per_second
    assert row["gpu_share"] == run.gpu_share
    assert row["cpu_busy_share"] == run.timeline.busy("cpu") / run.timeline.seconds
    assert row["fetched"] == row["wasted"] == 0
    assert (
        frame.iloc[2]["fetched"]
        == len(SYSTEMS["oracle"](job.trace, job.machine, 8 * MIB, context=64, frequency=job.frequency).fetch)
        / 24
    )


def test_memory_terms_add_up_to_the_budget(job):
    frame = sweep(job, BUDGETS[1:], list(SYSTEMS))
    total = frame[[f"{term}_GiB" for term in TERMS]].sum(axis=1)
    assert total.to_numpy() == pytest.approx(frame["vram_bytes"].to_numpy() / GIB, rel=1e-9)


def test_a_budget_that_cannot_be_is_a_row_with_the_reason(job):
    frame = sweep(
        job, [2 * MIB], [name for name in SYSTEMS if name != "llama.cpp"]
    )  # which needs no layer there
    assert frame["note"].str.contains("budget 2.00 MiB on RTX 2080 Ti is below").all()
    assert frame["tokens_per_second"].isna().all()
    assert frame["neurons_GiB"].isna().all()


def test_a_budget_that_holds_everything_says_so(job):
    frame = sweep(job, [64 * MIB], ["dynamicinfer", "transformers"])
    assert "fits" in frame["note"][0]
    assert frame["note"][1] == ""
    assert frame["gpu_share"].tolist() == [1, 1]


def test_processes_give_the_same(job):
    told: list[tuple[int, int]] = []
    alone = sweep(job, BUDGETS[:3], ["dynamicinfer", "llama.cpp"])
    both = sweep(job, BUDGETS[:3], ["dynamicinfer", "llama.cpp"], jobs=2, tell=lambda *at: told.append(at))
    pd.testing.assert_frame_equal(alone, both, check_exact=True)
    assert told == [(i + 1, 6) for i in range(6)]


@pytest.mark.slow
def test_a_dask_cluster_of_two_processes_gives_the_same(job):
    distributed = pytest.importorskip("dask.distributed")
    alone = sweep(job, BUDGETS[:3], ["dynamicinfer", "llama.cpp"])
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        spread = sweep(job, BUDGETS[:3], ["dynamicinfer", "llama.cpp"], dask=cluster.scheduler_address)
    pd.testing.assert_frame_equal(alone, spread, check_exact=True)


@pytest.mark.slow
def test_95_cells_of_1024_tokens_take_less_than_a_minute():
    from time import perf_counter

    spec, statistics = load_model("relullama-7b"), preset("relullama-7b")
    trace = synth(spec, statistics, 1024)
    large = Job(trace, load_machine("pc-high"), 512, profile(spec, statistics))
    cell(large, 8 * GIB, "oracle")  # compiled
    start = perf_counter()
    frame = sweep(large, parse_grid("6GiB-24GiB+1GiB"), list(SYSTEMS), jobs=2)
    assert perf_counter() - start < 60
    assert len(frame) == 95
    for system in SYSTEMS:
        speeds = frame[frame["system"] == system]["tokens_per_second"].dropna()
        assert (speeds.diff().dropna() > -0.02 * speeds.iloc[1:]).all()


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("8GiB", [8 * GIB]),
        ("6GiB-8GiB+1GiB", [6 * GIB, 7 * GIB, 8 * GIB]),
        ("1GB-2GB+600MB", [10**9, 16 * 10**8]),
        ("1GiB,3GiB-4GiB+1GiB", [GIB, 3 * GIB, 4 * GIB]),
    ],
)
def test_grids_are_read(text, budgets):
    assert parse_grid(text) == budgets


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("6GiB-8GiB", "is no budget; write 8GiB, or 6GiB-24GiB"),
        ("", "is no budget"),
        ("8GiB-6GiB+1GiB", "must go up by a step above 0"),
        ("6GiB-8GiB+0GiB", "must go up by a step above 0"),
        ("6GiB-8GiB+1B", "in at most 10,000 budgets"),
        ("6XiB", "size '6XiB' is not a number"),
    ],
)
def test_a_grid_that_is_none_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        parse_grid(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budgets": []}, "no budget"),
        ({"systems": []}, "no system"),
        ({"systems": ["vllm"]}, "system 'vllm' is not one of transformers"),
        ({"jobs": 0}, "jobs is 0; it must be at least 1"),
        ({"jobs": 2, "dask": "tcp://x:1"}, "both given"),
        ({"dask": "nonsense://nowhere"}, "does not answer"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(job, changes, said):
    with pytest.raises(InputError, match=said):
        sweep(job, **{"budgets": BUDGETS[:1], "systems": ["oracle"]} | changes)


def test_the_profile_of_a_synthetic_trace_is_not_its_own_frequency(job):
    assert job.frequency is not None
    assert not np.allclose(job.frequency, job.trace.frequency, atol=0.1)
    assert offline_profile(replace(job.trace, meta={"kind": "recorded"})) is None


def test_a_poor_predictor_costs_speed_and_memory(job):
    poor = job._replace(predictor=predict(job.trace, 0.9, 0.5, 0.05))
    good, bad = (cell(j, 9 * MIB, "powerinfer") for j in (job, poor))
    assert bad["tokens_per_second"] < good["tokens_per_second"]
    assert bad["predictor_GiB"] > 0 == good["predictor_GiB"]


def test_the_command_prints_a_table(job, tmp_path):
    job.trace.save(tmp_path / "trace")
    arguments = [
        "sweep",
        tmp_path / "trace",
        "--machine",
        "pc-low",
        "--vram",
        "2GiB-3GiB+1GiB",
        "--context",
        64,
    ]
    arguments += ["--system", "powerinfer, llama.cpp", "--recall", 0.9, "--precision", 0.8, "-o"]
    outputs = {}
    for form in ("csv", "json"):
        result = CliRunner().invoke(app, [str(a) for a in (*arguments, form)], prog_name="dinfer")
        assert result.exit_code == 0, result.stderr
        assert "sweeping: 4 of 4 cells" in result.stderr
        outputs[form] = result.stdout
    frame = pd.read_csv(io.StringIO(outputs["csv"]))
    assert list(frame.columns) == list(COLUMNS)
    assert frame["system"].tolist() == ["powerinfer", "llama.cpp"] * 2
    rows = json.loads(outputs["json"])
    assert [row["tokens_per_second"] for row in rows] == pytest.approx(frame["tokens_per_second"].tolist())
