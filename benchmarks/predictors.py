"""Predictors side by side with a static hot set, the previous token's set and the magnitude oracle, on real recordings.

Given a model it records what the model itself writes on the repository's prompts (several processes, one trace),
trains predictors, judges them on domains that they were not trained on, and measures perplexity, exact and predicted.
Each step that is done already is taken from the working directory, so a stopped benchmark goes on.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

sys.path.insert(0, str(Path(__file__).parent))
from rows import machine_line

from dinfer import bits
from dinfer.predictors import Predictors
from dinfer.record import judge
from dinfer.record.fetch import resolve_model
from dinfer.record.generate import load
from dinfer.record.predictor import Settings, thresholds, train
from dinfer.record.restricted import perplexities, texts_of
from dinfer.report import progress
from dinfer.trace import Trace, join

PROMPTS = Path(__file__).parents[1] / "traces" / "prompts" / "prompts.jsonl"
HOLD_OUT = ("coding", "travel", "health")
BOUNDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
SPARSITIES = (0.5, 0.6, 0.7)
TOKENS_A_SEQUENCE = 100
"""About so many tokens a prompt is continued by, to share sequences out among processes."""


def recorded(model: Path, home: Path, tokens: int, processes: int, sparsity: float | None) -> Trace:
    """The model's own trace, with residuals and levels."""
    whole = home / "trace"
    if whole.exists():
        return Trace.load(whole)
    each = -(-tokens // processes)
    parts, running = [], []
    for number in range(processes):
        part = home / f"part-{number}"
        parts.append(part)
        if part.exists():
            continue
        first = number * -(-each // TOKENS_A_SEQUENCE)
        code = (
            "from dinfer.record.recorder import record\n"
            f"record({str(model)!r}, {str(PROMPTS)!r}, {each}, {str(part)!r}, sparsity={sparsity}, hidden=True, "
            f"max_new_tokens=128, batch=32, first_sequence={first})"
        )
        running.append(subprocess.Popen([sys.executable, "-c", code]))
    if any(process.wait() for process in running):
        raise SystemExit("a recording failed; remove its part and start again")
    return join(parts, whole)


def relabelled(trace: Trace, sparsity: float, rows: np.ndarray) -> Trace:
    """The trace of a magnitude kind at another sparsity: exact, its threshold lies between two codes."""
    assert trace.score is not None
    spec = trace.spec
    counts = np.zeros((spec.layers, 256), np.int64)
    for start in range(0, len(rows), 1024):
        codes = trace.score[rows[start : start + 1024]]
        for layer in range(spec.layers):
            counts[layer] += np.bincount(codes[:, layer].ravel(), minlength=256)
    below = np.cumsum(counts, axis=1) / counts.sum(axis=1, keepdims=True)
    limit = np.argmin(np.abs(below - sparsity), axis=1)  # codes up to this one are inactive
    active = np.empty(trace.active.shape, np.uint64)
    for start in range(0, len(trace), 1024):
        part = slice(start, start + 1024)
        active[part] = bits.pack(trace.score[part] > limit[:, None])
    scale = np.array(trace.meta["score_scale"])
    values = scale * 2 ** ((limit + 0.5 - 255) / 16)
    return replace(trace, active=active, meta={**trace.meta, "thresholds": values.tolist()})


def predictor_of(trace: Trace, out: Path, settings: Settings) -> Predictors:
    """The trained predictor in ``out``, trained now where it is not yet."""
    if (out / "predictor.json").is_file():
        return Predictors.load(out)
    with progress(f"training {out.name}", "batches") as at:
        return train(trace, out, settings, at)


def sizes(curves: Mapping[str, judge.Curves]) -> pd.DataFrame:
    """Recall of each way at as many predicted as active, and the share of the neurons that it needs for each bound."""
    table = []
    for name, curve in curves.items():
        row = {"way": name, "matched_recall": curve.at_density(curve.density)["recall"].mean()}
        for bound in BOUNDS:
            row[f"size_{bound:g}"] = curve.at_missed(np.full(len(curve.density), bound)).mean()
        table.append(row)
    return pd.DataFrame(table)


def spread(rows: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of ``rows``, evenly."""
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int)]


def judged(
    name: str, trace: Trace, home: Path, settings: Settings, model: Any, tokens: int, texts: int
) -> dict[str, Any]:
    """All figures of one predictor: thresholds by missed contribution on validation prompts, judged on the test's."""
    spec, parts = trace.spec, judge.split(trace, settings.hold_out)
    predictors = predictor_of(trace, home / name.replace(" ", "-").replace(",", ""), settings)
    validation, test = spread(parts.validation, tokens), spread(parts.test, tokens)
    score = judge.predictor_score(predictors), judge.LOGITS
    chooses = judge.Curves.measure(trace, validation, [score], predictors.lookahead)[0]
    curves = judge.ways(predictors, trace, test, judge.frequency_of(trace, parts.train))
    curve = []
    for bound in BOUNDS:
        point = replace(predictors, thresholds=thresholds(chooses, bound))
        at = curves["trained"].at(judge.nearest_edge(point.cuts))
        row = {"bound": bound} | {key: float(values.mean()) for key, values in at.items()}
        if model is not None:
            row |= perplexities(model, point, texts_of(trace, parts.test, texts)).iloc[0].to_dict()
        print(name, row, file=sys.stderr, flush=True)
        curve.append(row)
    chosen = next((r["bound"] for r in reversed(curve) if r.get("ratio", np.inf) <= 1.05), BOUNDS[0])
    point = replace(predictors, thresholds=thresholds(chooses, chosen))
    layers = judge.evaluate(point, curves)
    modes = judge.modes(layers, point)
    return {
        "name": name,
        "model": spec.name,
        "settings": {**asdict(settings), "hold_out": list(settings.hold_out)},
        "tokens": {"trained": len(parts.train), "validated": len(validation), "judged": len(test)},
        "ranks": list(predictors.ranks),
        "bytes": predictors.bytes,
        "share": predictors.bytes / (2 * spec.layers * spec.neurons * spec.matrices * spec.hidden),
        "density": float(layers["density"].mean()),
        "chosen_bound": chosen,
        "curve": curve,
        "ways": sizes(curves).to_dict("records"),
        "layers": layers.to_dict("records"),
        "calibration": judge.calibration(curves["trained"]).to_dict("records"),
        "modes": modes.to_dict("records"),
        "advice": judge.advice(modes),
    }


def markdown(results: list[dict[str, Any]]) -> str:
    """The tables for reading."""
    lines = []
    for result in results:
        k = result["settings"]["lookahead"]
        lines += [
            f"## {result['model']}, {result['name']}: k = {k}, {result['share']:.1%} of the FFN's bytes",
            "",
            f"{result['machine']}. Trained on {result['tokens']['trained']:,} tokens that the model "
            f"wrote, judged on {result['tokens']['judged']:,} of the domains "
            f"{', '.join(result['settings']['hold_out'])}, of which it saw none. True density {result['density']:.1%}. "
            f"{result['advice'][:1].upper() + result['advice'][1:]}.",
            "",
            pd.DataFrame(result["curve"]).to_markdown(index=False, floatfmt=".4g"),
            "",
            "Recall (= precision) at as many predicted as active, and the share of the neurons that each way needs to",
            "miss no more than a bound (mean of the layers):",
            "",
            pd.DataFrame(result["ways"]).to_markdown(index=False, floatfmt=".3f"),
            "",
            f"Layer by layer at the bound {result['chosen_bound']:g}, the others at the same size:",
            "",
            pd.DataFrame(result["layers"]).to_markdown(index=False, floatfmt=".3f"),
            "",
            "Calibration:",
            "",
            pd.DataFrame(result["calibration"]).to_markdown(index=False, floatfmt=".3f"),
            "",
        ]
    return "# Predictors\n\nMade by `benchmarks/predictors.py`.\n\n" + "\n".join(lines)


def main(
    model: Annotated[str, typer.Argument(help="model directory, smollm2 or smollm2-relu")] = "smollm2",
    home: Annotated[Path, typer.Option(help="working directory: traces and predictors")] = Path("out/predictors"),
    out: Annotated[Path, typer.Option(help="results: this name with .json and .md")] = Path("out/predictors/results"),
    lookahead: Annotated[str, typer.Option(help="layers ahead, with commas")] = "1",
    tokens: Annotated[int, typer.Option(help="decode tokens to record")] = 50_000,
    judge_tokens: Annotated[int, typer.Option(help="tokens to judge on")] = 4096,
    texts: Annotated[int, typer.Option(help="sequences whose perplexity is measured; 0: none")] = 24,
    processes: Annotated[int, typer.Option(help="that record")] = 2,
    epochs: Annotated[int, typer.Option(help="at most")] = 4,
) -> None:
    """Record, train, judge; results are added to what the output holds of other models."""
    directory = resolve_model(model)
    home.mkdir(parents=True, exist_ok=True)
    loaded = load(directory)
    magnitude = loaded.spec.sparsity_kind == "magnitude"
    trace = recorded(directory, home, tokens, processes, 0.6 if magnitude else None)
    rows = judge.split(trace, HOLD_OUT).train
    kinds = {f"sparsity {s:.0%}": s for s in SPARSITIES} if magnitude else {"ReLU": None}
    results = []
    for kind, sparsity in kinds.items():
        labelled = trace if sparsity is None else relabelled(trace, sparsity, rows)
        for k in map(int, lookahead.split(",")):
            settings = Settings(lookahead=k, hold_out=HOLD_OUT, epochs=epochs)
            name = f"{kind}, k {k}"
            result = judged(name, labelled, home, settings, loaded if texts else None, judge_tokens, texts)
            results.append(result | {"machine": machine_line()})
            write(results, out)


def write(results: list[dict[str, Any]], out: Path) -> None:
    """Both files; results of other models and names stay."""
    file = out.with_suffix(".json")
    before = json.loads(file.read_text()) if file.is_file() else []
    new = {(r["model"], r["name"]) for r in results}
    everything = [r for r in before if (r["model"], r["name"]) not in new] + results
    file.write_text(json.dumps(everything, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(everything))


if __name__ == "__main__":
    typer.run(main)
