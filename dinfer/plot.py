"""Figures: a timeline by streams, predicted beside measured, where the memory goes. All are matplotlib Figures."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from dinfer.errors import InputError
from dinfer.timeline import STEPS, STREAMS, Timeline
from dinfer.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (8.0, 5.0)
BAND = 0.15
"""Half width of the band around the diagonal that ``plot_predicted_measured`` shades."""

# Okabe and Ito's colours, told apart by colour-blind readers; waiting is grey.
COLOURS = {
    "attention": "#0072B2",
    "predict": "#CC79A7",
    "schedule": "#000000",
    "prefetch": "#009E73",
    "wait": "#D0D0D0",
    "ffn_gpu": "#E69F00",
    "ffn_cpu": "#D55E00",
    "merge": "#F0E442",
    "head": "#56B4E9",
}
PREDICTED, MEASURED = "#56B4E9", "#D55E00"
MARKERS = "osD^vP*X"


def plot_timeline(timeline: Timeline, tokens: int = 1, first: int | None = None) -> "Figure":
    """``tokens`` tokens from ``first`` on (None: from the middle of the run), one row a stream, one colour a step.

    Raises InputError when the timeline kept no spans or has no such token.
    """
    first, spans = _spans_of(timeline, tokens, first)
    figure, axes = _figure()
    _draw_streams(axes, spans)
    axes.set_xlabel(f"time since the start of token {first} (ms)")
    axes.set_title(_title(timeline, first, tokens), loc="left", fontsize=10)
    _step_legend(figure, [STEPS[code] for code in np.unique(spans["step"])])
    return figure


def plot_timelines(
    simulated: Timeline, executed: Timeline, tokens: int = 1, first: int | None = None
) -> "Figure":
    """The same tokens of a simulated and of a real run, one above the other at one scale; see ``plot_timeline``."""
    from matplotlib.figure import Figure

    first, above = _spans_of(simulated, tokens, first)
    _, below = _spans_of(executed, tokens, first)
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    longest, runs = 0.0, ((simulated, above), (executed, below))
    for axes, (timeline, spans) in zip(figure.subplots(2, sharex=True), runs, strict=True):
        longest = max(longest, _draw_streams(axes, spans))
        axes.set_title(_title(timeline, first, tokens), loc="left", fontsize=10)
    axes.set_xlim(0, longest)
    axes.set_xlabel(f"time since the start of token {first} (ms)")
    _step_legend(figure, [STEPS[code] for code in np.union1d(above["step"], below["step"])])
    return figure


def _spans_of(timeline: Timeline, tokens: int, first: int | None) -> tuple[int, np.ndarray]:
    """The first token drawn and the spans of all that are."""
    if not len(timeline.spans):
        raise InputError("the timeline holds sums only and no spans; simulate with spans to draw it")
    if first is None:
        first = max(0, min(timeline.tokens // 2, timeline.tokens - tokens))
    number = timeline.spans["token"]
    spans = timeline.spans[(number >= first) & (number < first + tokens)]
    if not len(spans):
        raise InputError(f"token {first} is not in the timeline; it has {timeline.tokens} tokens")
    return first, spans


def _draw_streams(axes: "Axes", spans: np.ndarray) -> float:
    """Draw a row for each stream; returns the milliseconds from the first start to the last end."""
    begin = float(spans["start_seconds"].min())
    for row in range(len(STREAMS)):
        mine = spans[spans["stream"] == row]
        for code in np.unique(mine["step"]):
            part = mine[mine["step"] == code]
            starts = (part["start_seconds"] - begin) * 1e3
            widths = (part["end_seconds"] - part["start_seconds"]) * 1e3
            ranges = np.column_stack([starts, widths]).tolist()
            colour = COLOURS[STEPS[code]]  # the edge keeps short spans visible
            axes.broken_barh(ranges, (row - 0.38, 0.76), facecolors=colour, edgecolors=colour, linewidth=0.5)
        if not len(mine):
            axes.text(0.01, row, "idle", va="center", color="#606060", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(STREAMS)), STREAMS)
    axes.set_ylim(len(STREAMS) - 0.5, -0.5)
    axes.set_ylabel("stream")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    milliseconds = (float(spans["end_seconds"].max()) - begin) * 1e3
    axes.set_xlim(0, milliseconds)
    return milliseconds


def plot_compare(frame: pd.DataFrame) -> "Figure":
    """The table of ``compare`` as bars: predicted and measured milliseconds per token, the error beside them."""
    steps = frame[frame["unit"] == "ms"]
    figure, axes = _figure()
    rows = np.arange(len(steps))
    axes.barh(rows - 0.2, steps["predicted"], 0.38, color=PREDICTED, label="predicted")
    axes.barh(rows + 0.2, steps["measured"], 0.38, color=MEASURED, label="measured", hatch="//", edgecolor="white")
    longest = float(steps[["predicted", "measured"]].to_numpy().max())
    for row, (_, step) in enumerate(steps.iterrows()):
        text = "not measured" if pd.isna(step["error"]) else f"{step['error']:+.1%}"
        end = max(step["predicted"], step["measured"])
        axes.text(end + 0.01 * longest, row, text, va="center", fontsize=9)
    axes.set_yticks(rows, list(steps["step"]))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * longest)
    axes.set_xlabel("time per token, summed over layers (ms)")
    axes.set_ylabel("step")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    speed = frame[frame["unit"] == "tok/s"]
    if len(speed):
        token = speed.iloc[0]
        axes.set_title(
            f"{token['predicted']:.2f} tok/s predicted, {token['measured']:.2f} tok/s measured ({token['error']:+.1%})",
            loc="left",
            fontsize=10,
        )
    axes.legend(frameon=False, loc="lower right" if steps["measured"].iloc[-1] < longest / 2 else "best")
    return figure


def plot_memory(memory: Mapping[str, int]) -> "Figure":
    """A plan's memory breakdown in bytes as one bar a term, the largest unit that fits on the axis."""
    if not memory:
        raise InputError("the memory breakdown is empty; make a plan with a budget")
    values = np.array(list(memory.values()), float)
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit, size = next(((u, s) for u, s in units.items() if values.max() >= s), ("KiB", 2**10))
    figure, axes = _figure()
    rows = np.arange(len(values))
    colours = ["#E69F00" if term == "neurons" else "#0072B2" for term in memory]
    axes.barh(rows, values / size, 0.7, color=colours)
    total = values.sum()
    for row, value in enumerate(values):
        text = f"{format_bytes(int(value))} ({value / total:.0%})"
        axes.text((value + 0.01 * values.max()) / size, row, text, va="center")
    axes.set_yticks(rows, list(memory))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * values.max() / size)
    axes.set_xlabel(f"GPU memory ({unit}), {total / size:.2f} {unit} in all")
    axes.set_ylabel("term")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    return figure


def plot_predicted_measured(frame: pd.DataFrame) -> "Figure":
    """Predicted over measured tokens/s: a point a row, the diagonal, and a band of 15% around it.

    Columns ``measured_tokens_per_second`` and ``predicted_tokens_per_second``; ``cache`` sorts the points into
    series where there is one.
    """
    measured, predicted = frame["measured_tokens_per_second"], frame["predicted_tokens_per_second"]
    if not len(frame):
        raise InputError("there is no run to draw; measure at least one")
    figure, axes = _figure()
    low = 0.8 * float(min(measured.min(), predicted.min()))
    high = 1.2 * float(max(measured.max(), predicted.max()))
    ends = np.array([low, high])
    axes.fill_between(ends, (1 - BAND) * ends, (1 + BAND) * ends, color="#DDDDDD", label=f"within {BAND:.0%}")
    axes.plot(ends, ends, color="#606060", linewidth=1, label="predicted = measured")
    series = frame["cache"] if "cache" in frame else pd.Series("runs", index=frame.index)
    colours = list(COLOURS.values())
    for number, name in enumerate(dict.fromkeys(series)):
        mine = series == name
        colour, marker = colours[(0, 6, 3, 1, 5, 8)[number % 6]], MARKERS[number % len(MARKERS)]
        axes.plot(measured[mine], predicted[mine], marker, color=colour, label=str(name), markersize=8)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    axes.set_xlabel("measured (tokens/s)")
    axes.set_ylabel("predicted (tokens/s)")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _figure() -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _title(timeline: Timeline, first: int, tokens: int) -> str:
    source, machine = timeline.meta.get("source", "run"), timeline.meta.get("machine", "")
    emulated = " (GPU and link emulated)" if timeline.meta.get("emulated") else ""
    which = f"token {first}" if tokens == 1 else f"tokens {first} to {first + tokens - 1}"
    return f"{source}{f' on {machine}' if machine else ''}{emulated}: {which}, {timeline.tokens_per_second:.2f} tok/s"


def _step_legend(figure: "Figure", steps: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[step], label=step) for step in steps]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(steps), 5), frameon=False)
