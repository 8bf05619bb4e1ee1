"""Predictors side by side with a static hot set, the previous token's set and the magnitude oracle, on real recordings.

Given a model it records what the model itself writes on the repository's prompts (several processes, one trace),
trains predictors, judges them on domains that they were not trained on, and measures perplexity: exact, predicted, and
of the oracle's sets that miss as much. The bound is chosen on domains that were not learnt, what is reported is of
others that were not learnt either. Each step that is done already is taken from the working directory, so a stopped
benchmark goes on.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import pandas as pd
import typer

sys.path.insert(0, str(Path(__file__).parent))
from rows import machine_line

from dinfer import bits
from dinfer.predictors import Predictors
from dinfer.record import judge
from dinfer.record.calibrate import perplexity
from dinfer.record.fetch import resolve_model
from dinfer.record.generate import Loaded, load
from dinfer.record.predictor import Settings, thresholds, train
from dinfer.record.predictor_data import spread
from dinfer.record.restricted import exact_perplexity, perplexities, texts_of
from dinfer.report import progress
from dinfer.trace import Trace, join

PROMPTS = Path(__file__).parents[1] / "traces" / "prompts" / "prompts.jsonl"
TEST, CHOOSE = ("coding", "travel", "health"), ("maths", "language")
"""Domains that no predictor learns: those that are reported, and those by whose texts the bound is chosen."""
BOUNDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
TOLERATED = 1.025
"""The bound that is run is the largest whose perplexity on CHOOSE is at most so many times the exact one: half of the
5% that the test's may lose, as domains differ."""
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


class Texts(NamedTuple):
    """What perplexities are measured on: texts to choose by, texts to report, and the exact model's figure of each."""

    model: Loaded
    choose: list[list[int]]
    test: list[list[int]]
    exact: tuple[float, float]

    @classmethod
    def of(
        cls, model: Loaded, predictors: Predictors, trace: Trace, rows: tuple[np.ndarray, np.ndarray], most: int
    ) -> Self:
        """At most ``most`` sequences of the trace that hold the rows to choose by, and those to report."""
        choose, test = (texts_of(trace, some, most) for some in rows)
        exact = [exact_perplexity(model, predictors, texts) for texts in (choose, test)]
        return cls(model, choose, test, (exact[0], exact[1]))

    def measure(self, point: Predictors, oracle: np.ndarray) -> dict[str, float]:
        """Perplexity ratios and output errors of ``point``, and of the ``oracle``'s share [layer] of the neurons."""
        chosen_by = perplexities(self.model, point, self.choose, self.exact[0]).iloc[0]
        found = perplexities(self.model, point, self.test, self.exact[1]).iloc[0].to_dict()
        best = perplexities(self.model, point, self.test, self.exact[1], oracle).iloc[0]
        found |= {"choosing_ratio": float(chosen_by["ratio"]), "oracle_ratio": float(best["ratio"])}
        return found | {"oracle_output_error": float(best["output_error"])}


def judged(
    kind: str,
    trace: Trace,
    home: Path,
    settings: Settings,
    tokens: int,
    model: Loaded | None = None,
    texts: int = 0,
    bound: float | None = None,
) -> dict[str, Any]:
    """All figures of one predictor: thresholds by missed contribution on the domains that ``settings`` has to choose
    by, judged on those that it holds out.

    It is run at ``bound``, or where perplexity is measured at the largest bound that texts to choose by bear.
    """
    name = f"{kind}, k {settings.lookahead}"
    spec, parts = trace.spec, judge.split(trace, settings.hold_out + settings.choose)
    predictors = predictor_of(trace, home / name.replace(" ", "-").replace(",", ""), settings)
    choosing, test = (judge.of_domains(trace, domains) for domains in (settings.choose, settings.hold_out))
    measured = None if model is None else Texts.of(model, predictors, trace, (choosing, test), texts)
    choosing, test = spread(choosing, tokens), spread(test, tokens)
    score = judge.predictor_score(predictors), judge.LOGITS
    chooses = judge.Curves.measure(trace, choosing, [score], predictors.lookahead)[0]
    curves = judge.ways(predictors, trace, test, judge.frequency_of(trace, parts.train))
    curve = []
    for limit in BOUNDS:
        point = replace(predictors, thresholds=thresholds(chooses, limit))
        at = curves["trained"].at(judge.nearest_edge(point.cuts))
        oracle = curves["oracle"].at_missed(at["missed"])
        row = {"bound": limit} | {key: float(values.mean()) for key, values in at.items()}
        row |= {"static_size": float(curves["static"].at_missed(at["missed"]).mean())}
        row |= {"oracle_size": float(oracle.mean())}
        if measured is not None:
            row |= measured.measure(point, oracle)
        print(name, row, file=sys.stderr, flush=True)
        curve.append(row)
    borne = [row["bound"] for row in curve if row.get("choosing_ratio", np.inf) <= TOLERATED]
    chosen = max(borne, default=BOUNDS[0] if measured else bound or settings.bound)
    point = replace(predictors, thresholds=thresholds(chooses, chosen))
    layers = judge.evaluate(point, curves)
    modes = judge.modes(layers, point)
    return {
        "name": name,
        "kind": kind,
        "model": spec.name,
        "settings": settings.document(),
        "tokens": {"trained": len(parts.train), "chosen_on": len(choosing), "judged": len(test)},
        "ranks": list(predictors.ranks),
        "bytes": predictors.bytes,
        "share": predictors.bytes / (2 * spec.layers * spec.neurons * spec.matrices * spec.hidden),
        "density": float(layers["density"].mean()),
        "dense_perplexity": perplexity(model, measured.test) if measured and model else None,
        "chosen_bound": chosen,
        "borne": bool(borne) if measured else None,
        "curve": curve,
        "ways": sizes(curves).to_dict("records"),
        "layers": layers.to_dict("records"),
        "calibration": judge.calibration(curves["trained"]).to_dict("records"),
        "modes": modes.to_dict("records"),
        "advice": judge.advice(modes),
    }


WAYS = ("trained", "static", "previous", "oracle")
LAYER_COLUMNS = (
    "layer", "k", "rank", "density", "recall", "precision", "predicted", "missed", "matched_recall",
    "static_matched_recall", "previous_matched_recall", "oracle_matched_recall", "static_size", "previous_size",
    "oracle_size",
)  # fmt: skip
"""Of the table of layers; the .json has more."""


def by_kind(results: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results of one model and kind together, their lookaheads ascending."""
    keys = dict.fromkeys((r["model"], r["kind"]) for r in results)
    return [[r for r in results if (r["model"], r["kind"]) == key] for key in keys]


def table(rows: Any, form: str) -> list[str]:
    """Lines of a table, and an empty one."""
    return [pd.DataFrame(rows).to_markdown(index=False, floatfmt=form), ""]


def overview(results: list[dict[str, Any]]) -> list[str]:
    """What to run of each model: one row a result whose perplexity was measured."""
    rows = []
    for r in results:
        if r["borne"] is None:
            continue
        ways = {w["way"]: w["matched_recall"] for w in r["ways"]}
        at = next(row for row in r["curve"] if row["bound"] == r["chosen_bound"])
        reads = {m["mode"]: m["ffn_share_read"] for m in r["modes"]}
        rows.append(
            {"model": r["model"], "kind": r["kind"], "k": r["settings"]["lookahead"], "density": r["density"]}
            | {f"recall, {way}": ways[way] for way in WAYS}
            | {"bound": r["chosen_bound"], "perplexity, times exact": at["ratio"]}
            | {f"reads {mode}": reads[mode] for mode in ("exact", "predicted", "static")}
            | {"run it": r["modes"][0]["mode"]}
        )
    return [
        "## Which way to run a model",
        "",
        "Recall at as many predicted as active. The bound is the largest that raises perplexity by at most",
        f"{TOLERATED - 1:.1%} on the domains that it is chosen on (5% where validation texts did, whose domains were",
        "learnt), else the smallest; the perplexity beside it is of the test's domains.",
        "The shares of the FFN's bytes that a token reads are compared at the missed contribution of that bound, the",
        "predictor's own bytes included; exact misses nothing.",
        "",
        *table(rows, ".3f"),
    ]


def lookaheads(results: list[dict[str, Any]]) -> list[str]:
    """How each figure falls with the lookahead, and recall layer by layer."""
    lines = []
    for kind in by_kind(results):
        if len(kind) < 2:
            continue
        names = ("recall", "precision", "predicted", "density", "missed", "matched_recall")
        rows, layers = [], pd.DataFrame({"layer": range(len(kind[0]["layers"]))})
        for r in kind:
            k, frame = r["settings"]["lookahead"], pd.DataFrame(r["layers"])
            rows.append({"k": k, "bound": r["chosen_bound"]} | {name: frame[name].mean() for name in names})
            for name in ("matched_recall", "predicted"):
                layers[f"{name}, k {k}"] = frame[name]
        lines += [
            f"## {kind[0]['model']}, {kind[0]['kind']}: looking ahead",
            "",
            "Mean of the layers:",
            "",
            *table(rows, ".3f"),
            "Recall at as many predicted as active, and predicted density at the bound, layer by layer (layers below k",
            "are predicted from layer 0's residual):",
            "",
            *table(layers[["layer", *sorted(layers.columns[1:])]], ".3f"),
        ]
    return lines


def markdown(results: list[dict[str, Any]]) -> str:
    """The tables for reading."""
    lines = overview(results) + lookaheads(results)
    for result in results:
        tokens, held = result["tokens"], ", ".join(result["settings"]["hold_out"])
        chosen_by = result["settings"].get("choose", [])
        how = f"chosen, as its thresholds, on {' and '.join(chosen_by)}" if chosen_by else "chosen on validation texts"
        dense, how = result["dense_perplexity"], "given" if result["borne"] is None else how
        lines += [
            f"## {result['model']}, {result['name']}, {result['share']:.1%} of the FFN's bytes",
            "",
            f"{result['machine']}. Trained on {tokens['trained']:,} tokens that the model wrote, judged on "
            f"{tokens['judged']:,} of the domains {held}, of which it saw none. True density {result['density']:.1%}. "
            f"At the bound {result['chosen_bound']:g} ({how}): {result['advice']}.",
            "",
        ]
        if dense is not None:
            lines += [f"Perplexity of the test's texts with all neurons: {dense:.4g}.", ""]
        lines += [
            *table(result["curve"], ".4g"),
            "Recall (= precision) at as many predicted as active, and the share of the neurons that each way needs to",
            "miss no more than a bound (mean of the layers):",
            "",
            *table(result["ways"], ".3f"),
            f"Layer by layer at the bound {result['chosen_bound']:g}, with sizes that miss as little of the others:",
            "",
            *table(pd.DataFrame(result["layers"])[list(LAYER_COLUMNS)], ".3f"),
            "Calibration:",
            "",
            *table(result["calibration"], ".3f"),
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
    perplexity_at: Annotated[
        str, typer.Option(help="of these lookaheads, with commas; the others take its bound")
    ] = "1",
    processes: Annotated[int, typer.Option(help="that record")] = 2,
    epochs: Annotated[int, typer.Option(help="at most")] = 6,
    sparsities: Annotated[str, typer.Option(help="of a model without ReLU, with commas")] = "0.5,0.6,0.7",
    figure: Annotated[Path | None, typer.Option(help="PNG of recall against the lookahead, of all results")] = None,
) -> None:
    """Record, train, judge; results are added to what the output holds of other models."""
    directory = resolve_model(model)
    home.mkdir(parents=True, exist_ok=True)
    loaded = load(directory)
    magnitude = loaded.spec.sparsity_kind == "magnitude"
    trace = recorded(directory, home, tokens, processes, 0.6 if magnitude else None)
    rows = judge.split(trace, TEST + CHOOSE).train
    kinds = {f"sparsity {s:.0%}": s for s in map(float, sparsities.split(","))} if magnitude else {"ReLU": None}
    measured = set(map(int, perplexity_at.split(","))) if texts else set()
    order = sorted(map(int, lookahead.split(",")), key=lambda k: (k not in measured, k))
    results: list[dict[str, Any]] = []
    for kind, sparsity in kinds.items():
        labelled = trace if sparsity is None else relabelled(trace, sparsity, rows)
        bound = None
        for k in order:
            settings = Settings(lookahead=k, hold_out=TEST, choose=CHOOSE, epochs=epochs)
            judges = loaded if k in measured else None
            result = judged(kind, labelled, home, settings, judge_tokens, judges, texts, bound)
            bound = bound or result["chosen_bound"]
            results.append(result | {"machine": machine_line()})
            everything = write(results, out)
            if figure is not None:
                draw(everything, figure)


def write(results: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Both files; results of other models and names stay. Returns all."""
    file = out.with_suffix(".json")
    before = json.loads(file.read_text()) if file.is_file() else []
    new = {(r["model"], r["name"]) for r in results}
    everything = [r for r in before if (r["model"], r["name"]) not in new] + results
    everything.sort(key=lambda r: (r["model"], r["kind"], r["settings"]["lookahead"]))
    file.write_text(json.dumps(everything, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(everything))
    return everything


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Recall at as many predicted as active against the lookahead, and layer by layer."""
    import matplotlib.pyplot as plt

    kinds = [kind for kind in by_kind(results) if len(kind) > 1]
    if not kinds:
        return
    figure, axes = plt.subplots(len(kinds), 2, figsize=(10, 3.6 * len(kinds)), layout="constrained", squeeze=False)
    for (left, right), kind in zip(axes, kinds, strict=True):
        ahead = [r["settings"]["lookahead"] for r in kind]
        for way, mark in zip(WAYS, "osv^", strict=True):
            recalls = [next(w["matched_recall"] for w in r["ways"] if w["way"] == way) for r in kind]
            left.plot(ahead, recalls, marker=mark, label=way)
        left.set_xticks(ahead)
        left.set_xlabel("lookahead k, layers")
        left.set_ylabel("recall, mean of the layers")
        left.set_title(f"{kind[0]['model']}, {kind[0]['kind']}: as many predicted as active", loc="left", fontsize=9)
        for r in kind:
            layers = pd.DataFrame(r["layers"])
            right.plot(layers["layer"], layers["matched_recall"], label=f"k = {r['settings']['lookahead']}", lw=1.2)
        right.plot(layers["layer"], layers["static_matched_recall"], color="grey", ls=":", label="static")
        right.set_xlabel("layer")
        right.set_ylabel("recall")
        for axis in (left, right):
            axis.set_ylim(0, 1)
            axis.grid(lw=0.4, alpha=0.5)
            axis.legend(fontsize=7, frameon=False, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
