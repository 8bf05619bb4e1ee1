"""Figures draw without a display or a warning, and have units on their axes."""

import math

import numpy as np
import pandas as pd
import pytest

from dinfer.compare import compare
from dinfer.errors import InputError
from dinfer.plot import COLOURS, plot_compare, plot_memory, plot_predicted_measured, plot_timeline, plot_timelines
from dinfer.timeline import STEPS, STREAMS, Span, Timeline


@pytest.fixture
def timeline():
    spans = []
    for token in range(4):
        at = token * 1e-2
        spans += [
            Span(token, 0, "attention", "gpu", at, at + 2e-3),
            Span(token, 0, "ffn_cpu", "cpu", at + 2e-3, at + 6e-3, 20),
            Span(token, 0, "wait", "gpu", at + 2e-3, at + 7e-3),
            Span(token, -1, "head", "gpu", at + 7e-3, at + 1e-2),
        ]
    return Timeline.from_spans(spans, 4, 4e-2, {"source": "simulated", "machine": "pc-low"})


def test_two_timelines_have_the_same_rows_and_one_scale(timeline, tmp_path):
    other = Timeline(timeline.spans.copy(), 4, 4e-2, {"source": "executed"})
    other.spans["end_seconds"] += other.spans["start_seconds"]
    other.spans["start_seconds"] *= 2
    figure = plot_timelines(timeline, other)
    drawn(figure, tmp_path)
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == list(STREAMS)
    assert [label.get_text() for label in below.get_yticklabels()] == list(STREAMS)
    assert above.get_xlim() == below.get_xlim()
    assert above.get_title(loc="left") != below.get_title(loc="left")


def drawn(figure, tmp_path):
    """The axes of a figure that could be saved at its size."""
    assert tuple(figure.get_size_inches()) == (8, 5)
    figure.savefig(tmp_path / "figure.png", dpi=50)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    return figure.axes[0]


def test_a_timeline_has_five_streams_and_its_steps(timeline, tmp_path):
    figure = plot_timeline(timeline)
    axes = drawn(figure, tmp_path)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(STREAMS)
    assert axes.get_xlabel() == "time since the start of token 2 (ms)"
    assert axes.get_xlim() == pytest.approx((0, 10))
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["attention", "wait", "ffn_cpu", "head"]
    assert axes.get_title("left") == "simulated on pc-low: token 2, 100.00 tok/s"


def test_the_first_tokens_of_a_timeline(timeline, tmp_path):
    axes = drawn(plot_timeline(timeline, tokens=2, first=0), tmp_path)
    assert axes.get_xlim() == pytest.approx((0, 20))


def test_each_step_has_its_own_colour():
    assert list(COLOURS) == list(STEPS)
    assert len(set(COLOURS.values())) == len(STEPS)


def test_a_timeline_of_sums_or_without_the_token_is_refused(timeline):
    with pytest.raises(InputError, match="holds sums only"):
        plot_timeline(Timeline.from_spans([], 4, 1.0))
    with pytest.raises(InputError, match="token 9 is not in the timeline; it has 4 tokens"):
        plot_timeline(timeline, first=9)


def test_compare_shows_each_error(timeline, tmp_path):
    slower = Timeline(timeline.spans, 4, 5e-2, timeline.meta)
    axes = drawn(plot_compare(compare(timeline, slower)), tmp_path)
    assert "(ms)" in axes.get_xlabel()
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["+0.0%"] * 4 + ["-20.0%"]
    assert axes.get_title("left") == "100.00 tok/s predicted, 80.00 tok/s measured (+25.0%)"


def test_compare_without_a_measurement_says_so(tmp_path):
    row = {"step": "wait", "unit": "ms", "predicted": 1.0, "measured": 0.0, "error": math.nan}
    axes = drawn(plot_compare(pd.DataFrame([row])), tmp_path)
    assert [text.get_text() for text in axes.texts] == ["not measured"]


@pytest.mark.parametrize(("size", "unit"), [(3 * 2**30, "GiB"), (3 * 2**20, "MiB"), (300, "KiB")])
def test_memory_has_the_unit_that_fits(size, unit, tmp_path):
    axes = drawn(plot_memory({"weights": size, "predictor": 0, "neurons": size // 3}), tmp_path)
    assert axes.get_xlabel().startswith(f"GPU memory ({unit})")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["weights", "predictor", "neurons"]


def test_points_stand_beside_the_diagonal_and_its_band(tmp_path):
    frame = pd.DataFrame(
        {
            "cache": ["static", "static", "lru"],
            "measured_tokens_per_second": [10.0, 12.0, 15.0],
            "predicted_tokens_per_second": [11.0, 12.5, 14.0],
        }
    )
    axes = drawn(plot_predicted_measured(frame), tmp_path)
    assert axes.get_xlabel() == "measured (tokens/s)"
    assert axes.get_ylabel() == "predicted (tokens/s)"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["within 15%", "predicted = measured", "static", "lru"]
    band = axes.collections[0].get_paths()[0].vertices
    assert np.max(band[:, 1] / band[:, 0]) == pytest.approx(1.15)


def test_nothing_to_draw_is_refused():
    with pytest.raises(InputError, match="there is no run to draw"):
        plot_predicted_measured(
            pd.DataFrame({"measured_tokens_per_second": [], "predicted_tokens_per_second": []})
        )
    with pytest.raises(InputError, match="the memory breakdown is empty"):
        plot_memory({})
