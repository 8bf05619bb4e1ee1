"""Tables in each form, and what a run says of itself."""

import io
import json
import math
import tomllib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dinfer.errors import InputError
from dinfer.machine import Link, Machine, load_machine
from dinfer.model import load_model
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.report import (
    format_table,
    machine_toml,
    memory_table,
    plan_lines,
    print_run,
    print_table,
    rich_table,
    run_summary,
    summary_lines,
)
from dinfer.timeline import Run, Span, Timeline

FRAME = pd.DataFrame({"step": ["head", "a|b"], "predicted": [1234.5678, math.nan], "n": [3, 40], "error": [0.051, -1]})


def test_markdown_is_aligned_and_rounded():
    assert format_table(FRAME, "md") == (
        "| step | predicted |   n |   error |\n"
        "| ---- | --------: | --: | ------: |\n"
        "| head |      1235 |   3 |   +5.1% |\n"
        "| a\\|b |           |  40 | -100.0% |\n"
    )


def test_csv_keeps_every_digit():
    assert format_table(FRAME, "csv") == "step,predicted,n,error\nhead,1234.5678,3,0.051\na|b,,40,-1.0\n"


def test_json_is_a_list_of_objects_with_null():
    rows = json.loads(format_table(FRAME, "json"))
    assert rows[0] == {"step": "head", "predicted": 1234.5678, "n": 3, "error": 0.051}
    assert rows[1]["predicted"] is None


def test_an_empty_table_has_its_header():
    assert format_table(FRAME[:0], "md").startswith("| step | predicted |")


def test_an_unknown_form_is_refused():
    with pytest.raises(InputError, match="output 'xml' is not one of md, csv, json"):
        format_table(FRAME, "xml")


def test_elsewhere_than_on_a_terminal_a_table_is_markdown(capsys):
    print_table(FRAME)
    out, err = capsys.readouterr()
    assert (out, err) == (format_table(FRAME, "md"), "")
    print_table(FRAME, title="steps")
    assert capsys.readouterr().out == f"steps\n\n{format_table(FRAME, 'md')}"
    print_table(FRAME, "csv", title="steps")
    assert capsys.readouterr().out == format_table(FRAME, "csv")


def test_rich_tables_show_what_markdown_shows():
    from rich.console import Console

    console = Console(width=100, file=io.StringIO())
    console.print(rich_table(FRAME, "a [title]"))
    text = console.file.getvalue()
    assert "+5.1%" in text
    assert "1235" in text
    assert "a [title]" in text


@pytest.fixture
def plan():
    spec = replace(load_model("llama-2-7b"), layers=2)
    frequency = np.full((2, spec.neurons), 0.5, np.float32)
    placement = Placement.hottest(frequency, np.array([100, 300]))
    return Plan(spec, load_machine("pc-low"), placement, frequency, vram_bytes=2**30)


@pytest.fixture
def executed():
    """Two tokens in 0.5 s: 60 active neurons a layer on the GPU, 20 on the CPU, 5 fetched, 2 in vain."""
    work = np.tile(np.array([60, 20, 5, 2], np.int32), (2, 2, 1))
    meta = {"source": "executed", "plan": "x", "machine": "pc-low", "device": "emulated on the CPU"}
    spans = [Span(0, 0, "attention", "gpu", 0, 0.3), Span(1, -1, "head", "gpu", 0.3, 0.5)]
    return Run(Timeline.from_spans(spans, 2, 0.5, meta), work, np.zeros(20, np.int32), np.zeros(20, np.int32))


def test_a_run_says_which_device_computed_what_share(plan, executed):
    """Case 19: never silent about where the neurons were computed."""
    summary = run_summary(executed, plan)
    assert (summary["gpu_share"], summary["cpu_share"]) == (0.75, 0.25)
    assert summary["gpu_device"] == "emulated on the CPU"
    assert "75.0% on the GPU (emulated on the CPU), 25.0% on the CPU (Ryzen 9" in summary_lines(summary)[2]


def test_speed_comes_with_bandwidth(plan, executed):
    summary, spec = run_summary(executed, plan), plan.spec
    dense = 2 * spec.attention_bytes + spec.head_bytes
    neurons = 2 * (spec.neurons * spec.neuron_bytes * 2 / 3 + 80 * spec.neuron_bytes / 3)  # SiLU examines two rows
    assert summary["tokens_per_second"] == 4
    assert summary["gigabytes_per_second"] == pytest.approx(4 * (dense + neurons) / 1e9)
    assert (summary["fetched"], summary["wasted"]) == (10, 4)
    assert summary["step_milliseconds"] == pytest.approx({"attention": 150, "head": 100})


def test_a_run_in_each_form(plan, executed, capsys):
    summary = run_summary(executed, plan)
    print_run(summary, "json")
    assert json.loads(capsys.readouterr().out)["tokens"] == 2
    print_run(summary, "csv")
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "quantity,value"
    assert "tokens_per_second,4.0" in rows
    assert "step_milliseconds.head,100.0" in rows
    print_run(summary, "md")
    assert "| gpu_share " in capsys.readouterr().out
    print_run(summary, to_stderr=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "4.00 tok/s" in err


def test_a_plan_says_its_slots_and_rules(plan):
    slots, rules = plan_lines(plan)
    assert slots == "slots: 400 of 22,016 neurons (1.8%), 100 to 300 of 11008 in a layer"
    assert rules.startswith("rules: cache static, lookahead 1, window sized from the time left")


def test_the_memory_table_sums_up():
    table = memory_table({"weights": 2**30, "neurons": 2**29})
    assert table["term"].tolist() == ["weights", "neurons", "total"]
    assert table["bytes"].tolist()[-1] == 2**30 + 2**29
    assert table["size"].tolist() == ["1.00 GiB", "512.00 MiB", "1.50 GiB"]


def test_a_machine_file_says_where_and_whether_it_is_emulated():
    machine = replace(load_machine("pc-low"), emulated_link=Link("ours", 1e-5, 4e9))
    fits = pd.DataFrame({"step": ["attention"], "fixed_us": [1.5], "residual": [0.02]})
    text = machine_toml(machine, fits, "smollm2")
    assert Machine.from_dict(tomllib.loads(text)) == machine
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert "with the shapes of smollm2" in header[0]
    assert "emulated" in header[1]
    assert "torch" in header[2]
    assert any("attention" in line and "2.0%" in line for line in header)
