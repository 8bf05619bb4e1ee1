"""Balanced thresholds against one threshold: tokens/s predicted and measured on the emulated GPU, runs taken in turns.

Besides the usual tokens over seconds it gives those of the median token, which a stall of the machine moves less.

    python benchmarks/thresholds.py smollm2 --trace out/trace --machine out/machine.toml -o out/thresholds.json

The trace is recorded with levels at the wanted sparsity, the machine profiled with its thresholds (docs of both:
README.md). Plans learn from all but the last sequences, which are then replayed. What both plans cost in quality is
`dinfer quality`'s to say; benchmarks/quality.py measures it for the same plans.
"""

import argparse
import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from dinfer.exec import Session
from dinfer.machine import load_machine
from dinfer.plan import Plan
from dinfer.record.fetch import resolve_model
from dinfer.sim import simulate
from dinfer.solve import budget_for_share, make_plan
from dinfer.timeline import Timeline
from dinfer.trace import Trace

THRESHOLDS = ("fixed", "balanced")


def plans(learnt: Trace, machine, share: float, context: int) -> dict[str, Plan]:
    """The same placement with each kind of thresholds."""
    budget = budget_for_share(learnt.spec, machine, share, context)
    settings = {"context": context, "cache": "static"}
    return {name: make_plan(learnt, machine, budget, threshold=name, **settings) for name in THRESHOLDS}


def typical(timeline: Timeline) -> float:
    """Tokens/s of the median token."""
    ends = timeline.to_frame().groupby("token")["end_seconds"].max().to_numpy()
    return 1 / median(ends[1:] - ends[:-1])


def measure(
    made: dict[str, Plan], model: Path, replayed: Trace, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens/s of each plan, ``repeats`` times in turns, and those of the median tokens."""
    sessions = {name: Session(plan, model, "cpu") for name, plan in made.items()}
    speeds: dict[str, list[float]] = {name: [] for name in made}
    medians: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, session in sessions.items():
            with session:
                timeline = session.replay(replayed).timeline
                speeds[name].append(timeline.tokens_per_second)
                medians[name].append(typical(timeline))
    return speeds, medians


def compare(model: Path, trace: Trace, machine, share: float, tokens: int, repeats: int, context: int) -> dict:
    """One budget: tokens/s and gains, predicted and measured."""
    learnt, replayed = trace.hold_out(tokens)
    made = plans(learnt, machine, share, context)
    simulated = {name: simulate(plan, replayed).timeline for name, plan in made.items()}
    predicted = {name: timeline.tokens_per_second for name, timeline in simulated.items()}
    speeds, medians = measure(made, model, replayed, repeats)
    measured = {name: median(values) for name, values in speeds.items()}
    levels = made["balanced"].levels
    assert levels is not None
    chosen = levels.choose(made["balanced"].costs)
    return {
        "share": share,
        "tokens": len(replayed.phase("decode")),
        "predicted_tokens_per_second": predicted,
        "measured_tokens_per_second": measured,
        "runs": speeds,
        "median_token_predicted": {name: typical(timeline) for name, timeline in simulated.items()},
        "median_token_measured": {name: median(values) for name, values in medians.items()},
        "median_token_runs": medians,
        "error": {name: predicted[name] / measured[name] - 1 for name in THRESHOLDS},
        "predicted_gain": predicted["balanced"] / predicted["fixed"] - 1,
        "measured_gain": measured["balanced"] / measured["fixed"] - 1,
        "gains_in_turn": [b / f - 1 for f, b in zip(speeds["fixed"], speeds["balanced"], strict=True)],
        "skipped_share": float(levels.tables[range(len(chosen)), 4, chosen[:, 1]].mean()),
        "recorded_error_change": float(levels.relative_error(chosen).sum()),
    }


def main() -> None:
    """Compare at each budget and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model directory or smollm2")
    parser.add_argument("--trace", required=True, help="recorded with levels")
    parser.add_argument("--machine", required=True, help="profiled with the trace's thresholds")
    parser.add_argument("--share", type=float, nargs="+", default=[0.25], help="of all neurons, the budgets")
    parser.add_argument("--tokens", type=int, default=96, help="decode tokens to replay at least")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    trace, machine = Trace.load(given.trace), load_machine(given.machine)
    model = resolve_model(given.model)
    rows = [
        compare(model, trace, machine, share, given.tokens, given.repeats, given.context) for share in given.share
    ]
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name,
        "cpu": machine.cpu.name,
        "emulated": machine.emulated,
        "model": trace.spec.name,
        "dtype": trace.spec.dtype,
        "sparsity": trace.meta["calibration"]["sparsity"],
        "versions": {name: version(name) for name in ("dinfer", "torch", "numba", "numpy")},
        "python": platform.python_version(),
        "budgets": rows,
    }
    given.output.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(f"{row['share']:.0%}: gain predicted {row['predicted_gain']:+.1%}, measured {row['measured_gain']:+.1%}")


if __name__ == "__main__":
    main()
