"""Predicted beside measured: steps, the whole, and what cannot be compared."""

import math

import pytest

from dinfer.compare import compare
from dinfer.errors import InputError
from dinfer.timeline import STEPS, Span, Timeline

PLAN = {"plan": "aaaa"}


def timeline(milliseconds, tokens=1, meta=PLAN, seconds=None):
    """One span a step, in a row on the gpu."""
    spans, now = [], 0.0
    for step, value in milliseconds.items():
        spans.append(Span(0, 0, step, "gpu", now, now + value / 1e3))
        now += value / 1e3
    return Timeline.from_spans(spans, tokens, now if seconds is None else seconds, meta)


def test_a_row_a_step_then_the_whole():
    frame = compare(timeline({"head": 2, "attention": 4}, 2), timeline({"attention": 5, "head": 1}, 2))
    assert frame.columns.tolist() == ["step", "unit", "predicted", "measured", "error"]
    assert frame["step"].tolist() == ["attention", "head", "token", "tokens_per_second"]
    assert frame["unit"].tolist() == ["ms", "ms", "ms", "tok/s"]
    assert frame["predicted"].tolist() == pytest.approx([2, 1, 3, 1000 / 3])
    assert frame["measured"].tolist() == pytest.approx([2.5, 0.5, 3, 1000 / 3])
    assert frame["error"].tolist() == pytest.approx([-0.2, 1.0, 0, 0])


def test_steps_stand_in_the_order_of_the_house():
    everything = dict.fromkeys(reversed(STEPS), 1.0)
    assert compare(timeline(everything), timeline(everything))["step"].tolist()[:-2] == list(STEPS)


def test_a_step_that_one_side_lacks_stays():
    frame = compare(timeline({"attention": 1, "wait": 1}), timeline({"attention": 1, "merge": 1}))
    rows = frame.set_index("step")
    assert "predict" not in rows.index
    assert math.isnan(rows.loc["wait", "error"])
    assert rows.loc["merge", "error"] == -1


def test_speed_is_tokens_over_total_time():
    """Case 3: 2 layers of 2 experts, CPU 1 s, GPU 0.01 s; a whole layer or one expert of each on the GPU."""
    gpu, cpu = 0.01, 1.0
    whole_layer = [gpu + cpu] * 4
    one_of_each = [first + second for first in (gpu, cpu) for second in (gpu, cpu)]
    lines = []
    for tokens in (whole_layer, one_of_each):
        spans = [Span(i, 0, "ffn_cpu", "cpu", sum(tokens[:i]), sum(tokens[: i + 1])) for i in range(4)]
        lines.append(Timeline.from_spans(spans, 4, sum(tokens), PLAN))
    rows = compare(*lines).set_index("step")
    assert rows.loc["token", ["predicted", "measured"]].tolist() == pytest.approx([1010, 1010])
    assert rows.loc["tokens_per_second", "measured"] == pytest.approx(1 / 1.01)
    assert rows.loc["token", "error"] == pytest.approx(0)
    mean_of_speeds = sum(1 / t for t in one_of_each) / 4
    assert mean_of_speeds == pytest.approx(13.12, abs=0.005)  # what is not reported


def test_different_plans_are_refused():
    a, b = timeline({"head": 1}), timeline({"head": 1}, meta={"plan": "bbbb"})
    with pytest.raises(InputError) as error:
        compare(a, b)
    assert str(error.value) == (
        "the predicted timeline is of plan aaaa, the measured one of plan bbbb; "
        "compare two timelines of one plan, or --force"
    )
    assert len(compare(a, b, force=True)) == 3


def test_a_run_is_no_prediction():
    run = timeline({"head": 1}, meta=PLAN | {"source": "executed"})
    simulation = timeline({"head": 1}, meta=PLAN | {"source": "simulated"})
    with pytest.raises(InputError, match="give the simulated one first"):
        compare(run, simulation)
    assert len(compare(run, run)) == 3  # how well a run repeats


def test_no_tokens_are_refused():
    with pytest.raises(InputError, match="the measured timeline has 0 tokens in 0 s"):
        compare(timeline({"head": 1}), timeline({}, 0))
