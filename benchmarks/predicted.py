"""Predicted against measured tokens/s: the same plans simulated and run on a real model, on this machine.

The machine is profiled by calibration plans that hold other shares of the neurons: first, and again before each further
turn, since a shared machine is not the same machine minutes later. In each turn every plan decodes the same held-out
sequences of a recorded trace. A plan is made with the first profile; predicted is its mean time over the profiles, of
which none has seen a run. The errors by the first profile alone are kept beside it.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parent))
from rows import OUTPUTS, Row, machine_line, spread, write

from dinfer.timeline import STEPS

PROMPTS = Path(__file__).parents[1] / "traces" / "prompts" / "prompts.jsonl"


def main(
    model: Annotated[str, typer.Option(help="a local model directory, smollm2 or smollm2-relu")] = "smollm2",
    trace: Annotated[Path | None, typer.Option(help="a trace of that model; recorded when left out")] = None,
    device: str = "cpu",
    budgets: Annotated[str, typer.Option(help="shares of all neurons, in percent")] = "25,50,75",
    caches: str = "static,hot_predicted",
    dtypes: str = "float32",
    sparsity: float = 0.6,
    tokens: Annotated[int, typer.Option(help="decode tokens that each plan decodes")] = 96,
    repeat: Annotated[int, typer.Option(help="runs of each plan")] = 3,
    activation: str = "exact",
    prediction: str = "previous",
    issue: Annotated[str | None, typer.Option(help="copy, block or gather; the device's own when left out")] = None,
    save: Annotated[Path | None, typer.Option(help="keep the rows as JSON here")] = None,
    output: Annotated[str, typer.Option("-o", help="md, csv or json")] = "md",
) -> None:
    """Print one row a plan: measured tokens/s, and predicted over measured as the ratio."""
    if output not in OUTPUTS:
        raise typer.BadParameter(f"{output!r} is not one of {', '.join(OUTPUTS)}", param_hint="-o")
    from dinfer.record.fetch import resolve_model

    directory = resolve_model(model)
    with tempfile.TemporaryDirectory() as scratch:
        seen, held_out = _traces(directory, trace, sparsity, tokens, Path(scratch))
        results = []
        rules = {"activation": activation, "prediction": prediction, "issue": issue}
        for dtype in dtypes.split(","):
            shares = [float(share) / 100 for share in budgets.split(",")]
            results += _compare(directory, seen, held_out, device, dtype, shares, caches.split(","), repeat, rules)
    errors = np.array([abs(result["error"]) for result in results])
    ranks = [np.argsort(np.argsort([r[key] for r in results])) for key in ("predicted", "measured")]
    print(
        f"median error {np.median(errors):.1%}, worst {errors.max():.1%}, rank correlation "
        f"{np.corrcoef(*ranks)[0, 1] if len(results) > 1 else 1:.2f} over {len(results)} plans",
        file=sys.stderr,
    )
    if save is not None:
        kept = {"machine": machine_line(), "device": device, "plans": _kept(results)}
        save.write_text(json.dumps(kept, indent=1) + "\n")
    write([_row(result) for result in results], output)


def _traces(directory: Path, trace: Path | None, sparsity: float, tokens: int, scratch: Path):
    from dinfer.families import open_checkpoint
    from dinfer.record.recorder import record
    from dinfer.trace import Trace

    if trace is None:
        relu = open_checkpoint(directory).spec.sparsity_kind == "relu"
        print("recording", file=sys.stderr)
        whole = record(directory, PROMPTS, 600, scratch / "trace", sparsity=None if relu else sparsity, levels=False)
    else:
        whole = Trace.load(trace)
    return whole.hold_out(tokens)


def _compare(directory, seen, held_out, device, dtype, shares, caches, repeat, rules):
    from dinfer.exec import Session, measure_machine
    from dinfer.sim import simulate
    from dinfer.solve import budget_for_share, make_plan

    spec = seen.spec.as_run(dtype)
    thresholds = seen.meta.get("thresholds", ()) if spec.sparsity_kind == "magnitude" else ()

    def profile():
        print(f"profiling in {dtype}", file=sys.stderr)
        machine, fits = measure_machine(directory, device=device, dtype=dtype, thresholds=thresholds)
        print(fits.to_string(index=False), file=sys.stderr)
        return machine

    machine, results = profile(), []
    for share in shares:
        for cache in caches:
            context = int(held_out.tokens["position"].max()) + 2
            vram = budget_for_share(spec, machine, share, context)
            plan = make_plan(seen, machine, vram, context=context, cache=cache, spec=spec, **rules)
            named = {"plan": plan, "share": share, "cache": cache, "dtype": dtype}
            results.append({**named, "simulated": [], "runs": []})
    for turn in range(repeat):
        machine = profile() if turn else machine
        for result in results:
            result["simulated"].append(simulate(result["plan"], held_out, machine).timeline)
            print(f"run {turn + 1} of {repeat}: {_setting(result)} {result['cache']}", file=sys.stderr)
            with Session(result["plan"], directory, device) as session:
                result["runs"].append(session.replay(held_out).timeline)
    for result in results:
        speeds = np.array([run.tokens_per_second for run in result["runs"]])
        measured = np.mean([run.step_seconds() for run in result["runs"]], axis=0)
        expected = np.mean([run.step_seconds() for run in result["simulated"]], axis=0)
        result["steps"] = {s: (float(e), float(m)) for s, e, m in zip(STEPS, expected, measured, strict=True)}
        seconds = [1 / run.tokens_per_second for run in result["simulated"]]
        result["predicted"], result["first"] = 1 / float(np.mean(seconds)), 1 / seconds[0]
        result["measured"], result["low"], result["high"] = spread(speeds)
        result["error"] = result["predicted"] / result["measured"] - 1
    return results


def _setting(result) -> str:
    return f"{result['share']:.0%} of the neurons, {result['dtype']}"


def _row(result) -> Row:
    ratio = result["predicted"] / result["measured"]
    speeds = (result["measured"], result["low"], result["high"])
    return Row(result["cache"], _setting(result), *speeds, "tokens/s", "predicted", ratio)


def _kept(results):
    return [
        {
            "plan": _setting(result) + ", " + result["cache"],
            "fingerprint": result["plan"].fingerprint(),
            "predicted_tokens_per_second": result["predicted"],
            "measured_tokens_per_second": result["measured"],
            "error": result["error"],
            "error_by_first_profile": result["first"] / result["measured"] - 1,
            "step_milliseconds": {k: [1e3 * p, 1e3 * m] for k, (p, m) in result["steps"].items()},
        }
        for result in results
    ]


if __name__ == "__main__":
    typer.run(main)
