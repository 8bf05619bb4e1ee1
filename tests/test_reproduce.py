"""The paper's tables: what they hold, how their errors are made, and that the calibration reads what it
may."""

import copy
import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from dinfer import reproduce as module
from dinfer.cli import app
from dinfer.machine import load_machine
from dinfer.model import load_model
from dinfer.reproduce import (
    CALIBRATED,
    constants_of,
    filled_budget,
    neuron_machine,
    paper,
    reproduce,
    run_system,
    workload,
)
from dinfer.reproduce_fit import FITTED, _Form, calibrate, constants_toml
from dinfer.systems import cpu_share_of_ffn

TOKENS = 16


def small_paper() -> dict:
    """The paper with two rows: 7B on PC-Low, and 13B on PC-High for the whole family there."""
    figures = copy.deepcopy(paper())
    figures["speeds"] = [figures["speeds"][0], figures["speeds"][3]]
    figures["ablation"] = figures["ablation"][:1]
    figures["sweep"] = {**figures["sweep"], "vram": [16, 20]}
    return figures


def without_dynamicinfer(value):
    """The same tables with every figure of DynamicInfer taken out: to read one is a KeyError."""
    if isinstance(value, dict):
        return {
            k: without_dynamicinfer(v)
            for k, v in value.items()
            if k not in ("dynamicinfer", "ablation", "memory")
        }
    if isinstance(value, list):
        return [without_dynamicinfer(v) for v in value]
    return value


@pytest.fixture(scope="module")
def tables() -> dict:
    return reproduce(TOKENS, small_paper())


def test_the_papers_tables_are_as_printed():
    figures = paper()
    assert [[row[s] for s in (*CALIBRATED, "dynamicinfer")] for row in figures["speeds"]] == [
        [4.0, 9.7, 15.5, 19.1], [3.0, 9.3, 15.6, 18.3], [0.28, 2.23, 5.14, 7.88],
        [2.0, 8.1, 18.9, 24.4], [2.0, 8.2, 21.9, 26.5], [0.39, 2.90, 7.49, 8.47],
    ]  # fmt: skip
    assert [[row[s] for s in ("micro", "macro", "threshold")] for row in figures["ablation"]] == [
        [0.113, 0.136, 0.231], [0.276, 0.340, 0.571],
    ]  # fmt: skip
    shares = [[row[s] for s in ("powerinfer", "dynamicinfer")] for row in figures["shares"]]
    assert shares == [[0.51, 0.68], [0.72, 0.57]]


def test_there_is_one_set_of_constants_for_each_machine(tables):
    figures = paper()
    assert set(figures["constants"]) == {"pc-high", "pc-low"}
    for machine, values in figures["constants"].items():
        kinds = {name: entry["kind"] for name, entry in values.items()}
        assert set(kinds.values()) == {"published", "fitted"}, machine
        assert {name for name, kind in kinds.items() if kind == "fitted"} <= set(FITTED)
    rows = tables["constants"]
    names = [(row["machine"], row["name"]) for row in rows]
    assert len(names) == len(set(names))
    assert {row["kind"] for row in rows} == {"published", "fitted", "ours"}
    assert all(row["source"] for row in rows)
    assert not any(row["name"].startswith(("relullama", "prosparse")) for row in rows)


def test_calibration_reads_no_figure_of_dynamicinfer():
    """With every figure of DynamicInfer scrambled, or taken out, the constants are the same."""
    figures = small_paper()
    scrambled = copy.deepcopy(figures)
    random = np.random.default_rng(0)
    for row in (*scrambled["speeds"], *scrambled["shares"], *scrambled["memory"]):
        row["dynamicinfer"] *= random.uniform(0.1, 10)
    for row in scrambled["ablation"]:
        row |= dict.fromkeys(("micro", "macro", "threshold"), 9.0)
    fitted = calibrate(figures, TOKENS)
    assert calibrate(scrambled, TOKENS) == fitted
    assert calibrate(without_dynamicinfer(figures), TOKENS) == fitted
    # and it does read the columns that it may
    for system in CALIBRATED:
        changed = copy.deepcopy(figures)
        for row in changed["speeds"]:
            row[system] *= 0.8
        assert calibrate(changed, TOKENS) != fitted


def test_the_fitted_constants_are_printed_as_they_are_kept():
    fitted = {
        machine: {k: float(v["value"]) for k, v in values.items() if v["kind"] == "fitted"}
        for machine, values in paper()["constants"].items()
    }
    printed = tomllib.loads(constants_toml(fitted))["constants"]
    for machine, values in printed.items():
        for name, entry in values.items():
            assert entry == paper()["constants"][machine][name]


def test_speeds_say_what_was_calibrated_and_what_was_predicted(tables):
    rows = tables["speeds"]
    assert len(rows) == 4 * len(small_paper()["speeds"])
    for row in rows:
        assert row["role"] == ("predicted" if row["system"] == "dynamicinfer" else "calibrated")
        assert row["error"] == row["ours"] / row["paper"] - 1
        assert row["ours"] > 0


def test_errors_of_shares_and_gains_are_points(tables):
    for table in ("ratios", "ablation", "shares"):
        for row in tables[table]:
            assert row["error"] == row["ours"] - row["paper"]
    speed = {(r["machine"], r["model"], r["system"]): r for r in tables["speeds"]}
    for row in tables["ratios"]:
        new, old = (speed[row["machine"], row["model"], s] for s in ("dynamicinfer", "powerinfer"))
        assert row["ours"] == new["ours"] / old["ours"] - 1
        assert row["paper"] == new["paper"] / old["paper"] - 1
    last = tables["ablation"][-1]
    assert last["part"] == "+ threshold"
    assert last["ours"] == next(r["ours"] for r in tables["ratios"] if r["machine"] == "pc-high")
    assert [r["error"] for r in tables["memory"]] == [r["ours"] / r["paper"] - 1 for r in tables["memory"]]


def test_the_advantage_over_the_budget_is_of_the_same_systems(tables):
    for row in tables["sweep"]:
        assert row["ours"] == row["dynamicinfer"] / row["powerinfer"] - 1
    assert [row["vram_GiB"] for row in tables["sweep"]] == [16, 20]
    assert tables["sweep"][1]["powerinfer"] > tables["sweep"][0]["powerinfer"]


def test_the_same_tables_again(tables):
    again = reproduce(TOKENS, small_paper())
    assert json.dumps(again) == json.dumps(tables)


def test_the_calibrations_closed_form_is_the_replay():
    figures = small_paper()
    load = workload(figures, "relullama-7b", TOKENS)
    constants = constants_of(figures)["pc-low"]
    form = _Form.of("pc-low", "relullama-7b", load, figures, constants)
    parts = form.parts(constants)
    run = run_system(constants, "pc-low", load, figures["tokens"], "powerinfer")
    assert 1 / parts.seconds == pytest.approx(run.timeline.tokens_per_second, rel=2e-3)
    assert parts.gpu_share == pytest.approx(run.gpu_share, abs=2e-3)
    assert parts.cpu_share == pytest.approx(cpu_share_of_ffn(run), abs=5e-3)


def test_an_unfilled_share_is_taken_from_the_neurons():
    from dinfer.sim.predictor import predictor_bytes
    from dinfer.solve import memory_breakdown

    spec = load_model("relullama-7b")
    machine = neuron_machine(load_machine("pc-low"), constants_of(paper())["pc-low"], spec)
    vram, rank = machine.gpu.memory_bytes, 500
    terms = memory_breakdown(spec, machine, 192, vram, predictor_bytes(spec, rank))
    half = filled_budget(spec, machine, vram, 192, rank, 0.5)
    left = memory_breakdown(spec, machine, 192, half, predictor_bytes(spec, rank))["neurons"]
    assert left == pytest.approx(terms["neurons"] / 2, rel=1e-6)
    assert filled_budget(spec, machine, vram, 192, rank, 1.0) == vram


def test_the_command_prints_json_with_every_table(monkeypatch):
    monkeypatch.setattr(module, "paper", small_paper)
    result = CliRunner().invoke(app, ["reproduce", "--tokens", str(TOKENS), "-o", "json"], prog_name="dinfer")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert list(said) == ["speeds", "ratios", "ablation", "shares", "sweep", "memory", "constants"]
    assert {"machine", "model", "system", "paper", "ours", "error", "role"} == set(said["speeds"][0])
    assert {"machine", "name", "value", "kind", "source"} == set(said["constants"][0])
    assert "not explained" in result.stderr


@pytest.mark.parametrize("form", ["md", "csv"])
def test_the_command_prints_tables(monkeypatch, form):
    made = {"speeds": [{"paper": 1.5}], "memory": [{"ours": 2}]}
    monkeypatch.setattr(module, "reproduce", lambda tokens, tell=None: made)
    result = CliRunner().invoke(app, ["reproduce", "-o", form], prog_name="dinfer")
    assert result.exit_code == 0, result.stderr
    expected = {
        "md": "\n### Decode tokens per second\n\n| paper |\n| ----: |\n| 1.500 |\n"
        "\n### Peak memory, GB\n\n| ours |\n| ---: |\n|    2 |\n",
        "csv": "table,paper,ours\nspeeds,1.5,\nmemory,,2.0\n",
    }
    assert result.stdout == expected[form]


@pytest.mark.slow
def test_the_kept_constants_are_what_calibration_finds():
    kept = {
        machine: {k: float(v["value"]) for k, v in values.items() if v["kind"] == "fitted"}
        for machine, values in paper()["constants"].items()
    }
    found = calibrate()
    assert {m: set(v) for m, v in found.items()} == {m: set(v) for m, v in kept.items()}
    for machine, values in found.items():
        assert values == pytest.approx(kept[machine], rel=5e-3)


@pytest.mark.slow
def test_every_speed_of_dynamicinfer_is_predicted_within_15_percent():
    made = reproduce()
    predicted = [row for row in made["speeds"] if row["role"] == "predicted"]
    assert len(predicted) == 6
    assert max(abs(row["error"]) for row in predicted) < 0.15
    neurons = [row for row in made["speeds"] if row["system"] == "powerinfer"]
    assert max(abs(row["error"]) for row in neurons) < 0.05
    gains = [row["ours"] for row in made["sweep"]]
    assert gains == sorted(gains)  # the paper: the advantage grows with VRAM
    assert replace(load_machine("pc-low")).gpu.memory_bytes == 11 * 2**30
