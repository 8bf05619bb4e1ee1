"""How far a prediction was from the run: two timelines of one plan, step by step."""

import numpy as np
import pandas as pd

from dinfer.errors import InputError
from dinfer.timeline import STEPS, Timeline


def compare(predicted: Timeline, measured: Timeline, *, force: bool = False) -> pd.DataFrame:
    """One row a step in the order of STEPS, then ``token`` (the whole) and ``tokens_per_second``.

    Columns ``step``, ``unit`` ("ms" per token, or "tok/s"), ``predicted``, ``measured`` and ``error``
    (predicted / measured - 1, NaN where nothing was measured). A step's time is summed over layers and streams;
    streams run side by side, so that the steps may sum to more than ``token``. Speed is tokens over total time,
    never the mean of single speeds. Steps that both lack are left out.
    Raises InputError for a timeline without tokens; and, unless ``force``, for timelines of different plans or when
    ``predicted`` was executed and ``measured`` simulated.
    """
    _check_tokens("predicted", predicted)
    _check_tokens("measured", measured)
    if not force:
        _check_order(predicted, measured)
        _check_plan(predicted, measured)
    steps = pd.DataFrame({"predicted": predicted.step_seconds(), "measured": measured.step_seconds()})
    steps = steps.loc[list(STEPS)][(steps.loc[list(STEPS)] > 0).any(axis=1)] * 1e3
    whole = [1e3 * run.seconds / run.tokens for run in (predicted, measured)]
    speed = [run.tokens_per_second for run in (predicted, measured)]
    frame = pd.DataFrame(
        {
            "step": [*steps.index, "token", "tokens_per_second"],
            "unit": ["ms"] * (len(steps) + 1) + ["tok/s"],
            "predicted": [*steps["predicted"], whole[0], speed[0]],
            "measured": [*steps["measured"], whole[1], speed[1]],
        }
    )
    known = frame["measured"].where(frame["measured"] > 0, np.nan)
    return frame.assign(error=frame["predicted"] / known - 1)


def _check_tokens(name: str, timeline: Timeline) -> None:
    if timeline.tokens < 1 or not timeline.seconds > 0:
        raise InputError(
            f"the {name} timeline has {timeline.tokens} tokens in {timeline.seconds:g} s; "
            "it needs at least 1 token that took time, decode more"
        )


def _check_order(predicted: Timeline, measured: Timeline) -> None:
    sources = predicted.meta.get("source"), measured.meta.get("source")
    if sources == ("executed", "simulated"):
        raise InputError(
            "the predicted timeline was executed and the measured one simulated; "
            "give the simulated one first, or --force"
        )


def _check_plan(predicted: Timeline, measured: Timeline) -> None:
    plans = predicted.meta.get("plan"), measured.meta.get("plan")
    if plans[0] != plans[1]:
        raise InputError(
            f"the predicted timeline is of plan {plans[0]}, the measured one of plan {plans[1]}; "
            "compare two timelines of one plan, or --force"
        )
