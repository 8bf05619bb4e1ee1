"""The paper's accuracy table in form, for models at hand: dense, sparse, dynamic, predicted, each with its interval.

    python benchmarks/quality.py smollm2 --plan out/balanced.json --plan out/predicted.json --predictor out/predictor \
        --text traces/text/moby-dick.txt -o out/quality.json

Each way of a plan is a row: perplexity and next-token agreement of the text (exec/quality.py tells how the intervals
are made), and the accuracy of harness tasks, by default those of traces/tasks, which have the form of the paper's and
are not those. Accuracies have Wilson's interval. What the output holds of other models and plans stays. With --raise a
plan of a ReLU model is scored at each of these thresholds instead, with --teacher also against another model's dense
way. Run it at the repository's root; -o writes .json and .md beside each other.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

sys.path.insert(0, str(Path(__file__).parent))
from rows import machine_line

from dinfer.exec import Session, quality
from dinfer.exec.quality import quality_table, read_text, text_blocks, ways_of, wilson
from dinfer.families import open_checkpoint
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.predictors import Predictors
from dinfer.record.fetch import resolve_model
from dinfer.report import format_table, progress

TASKS = ("dinfer_entailment", "dinfer_physical", "dinfer_causes", "dinfer_pronouns")
FORMS = dict(zip(TASKS, ("RTE", "PIQA", "COPA", "Winogrande"), strict=True))


def scored(
    session: Session, blocks: np.ndarray, ways: Sequence[str], label: str, teacher: np.ndarray | None
) -> list[dict[str, Any]]:
    """A row a way: the figures of the text; the ratio of the ``teacher``'s losses [block, token] too where given."""
    with progress(f"scoring {label}", "blocks") as at:
        found = quality(session, blocks, ways, at)
    rows = quality_table(found).to_dict("records")
    if teacher is not None:
        for row, one in zip(rows, found, strict=True):
            against = replace(one, dense_loss=teacher).row()
            row |= {f"teacher_{name}": against[name] for name in ("ratio", "ratio_low", "ratio_high")}
    return rows


def task_figures(
    plan_file: Path, model: Path, way: str, predictor: Path | None, include: Path, tasks: Sequence[str]
) -> dict[str, Any]:
    """Accuracy of each task in one way, with Wilson's interval and the number of items."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from dinfer.lm_eval import Harness

    harness = Harness(str(plan_file), str(model), way=way, predictor=None if predictor is None else str(predictor))
    manager = TaskManager(include_path=str(include))
    results = simple_evaluate(model=harness, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)
    figures = {}
    for task in tasks:
        right = [sample["acc"] for sample in results["samples"][task]]
        share, low, high = wilson(round(sum(right)), len(right))
        figures[task] = {"accuracy": share, "low": low, "high": high, "items": len(right)}
    return figures


def dense_losses(model: Path, like: Plan, blocks: np.ndarray) -> np.ndarray:
    """Negative log likelihoods [block, token] of another model's dense way, on the machine of the plan ``like``."""
    checkpoint = open_checkpoint(model)
    spec = checkpoint.spec.with_dtype(like.spec.dtype)
    frequency = np.zeros((spec.layers, spec.neurons), np.float32)
    placement = Placement.hottest(frequency, np.zeros(spec.layers, np.int64))
    plan = Plan(spec=spec, machine=like.machine, placement=placement, frequency=frequency, context=like.context)
    with Session(plan, checkpoint, "cpu") as session, progress(f"scoring {spec.name}", "blocks") as at:
        return quality(session, blocks, ["dense"], at)[0].loss


def cell(row: Mapping[str, Any], name: str, form: str) -> str:
    """A figure with its interval, or nothing where it was not measured."""
    if name not in row:
        return ""
    value, low, high = (format(row[name + end], form) for end in ("", "_low", "_high"))
    return f"{value} ({low}-{high})"


def table(results: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a way of each plan, every cell with its interval, but for those that an earlier plan has too."""
    rows, seen = [], set()
    for each in results:
        for row in each["ways"]:
            figures = tuple(row[name] for name in ("way", "computed_share", "perplexity", "ratio", "divergence"))
            if figures in seen:
                continue
            seen.add(figures)
            cells = {"plan": each["plan"], "way": row["way"], "computed": f"{row['computed_share']:.0%}"}
            cells["perplexity"] = cell(row, "perplexity", ".2f")
            cells["of dense"] = cell(row, "ratio", ".3f")
            cells["agreement"] = cell(row, "agreement", ".1%")
            cells["KL, nats"] = cell(row, "divergence", ".4f")
            if "teacher_ratio" in row:
                cells["of teacher"] = cell(row, "teacher_ratio", ".3f")
            for task, found in row.get("tasks", {}).items():
                name = f"as {FORMS[task]}" if task in FORMS else task
                cells[name] = f"{found['accuracy']:.0%} ({found['low']:.0%}-{found['high']:.0%})"
            rows.append(cells)
    return pd.DataFrame(rows).fillna("")


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """All results as tables for reading, one for each model and kind."""
    lines = [
        "# Quality",
        "",
        "Made by `benchmarks/quality.py`. 95% intervals in brackets: bootstrap over blocks, of the ratio from paired",
        "differences; Wilson for agreement and accuracies. The tasks are ours, 32 items each, in the form of those",
        "named.",
        "Computed: the share of the neurons above the thresholds, or predicted. Rows that a plan shares with one above",
        "are left out.",
    ]
    for model, kind in dict.fromkeys((each["model"], each["kind"]) for each in results):
        mine = [each for each in results if (each["model"], each["kind"]) == (model, kind)]
        heading = f"## {model}, raised thresholds" if kind == "raised" else f"## {model}"
        lines += ["", heading, "", format_table(table(mine), "md")]
        for measured in dict.fromkeys(f"{each['measured']}. {each['machine']}." for each in mine):
            lines += [measured, ""]
    return "\n".join(lines).rstrip() + "\n"


def write(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Both files; results of other models, kinds and plans stay."""
    before = json.loads(file.read_text()) if file.is_file() else []
    new = {(each["model"], each["kind"], each["plan"]) for each in results}
    kept = [each for each in before if (each["model"], each["kind"], each["plan"]) not in new]
    everything = [*kept, *results]
    file.write_text(json.dumps(everything, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(everything))


def result(plan: Plan, name: str, kind: str, rows: list[dict], text: str, block: int) -> dict[str, Any]:
    """What is kept of one plan."""
    share = float(plan.placement.slots.sum()) / (plan.spec.layers * plan.spec.neurons)
    tokens = rows[0]["tokens"] // (block - 1) * block
    return {
        "model": plan.spec.name,
        "kind": kind,
        "plan": name,
        "activation": plan.activation,
        "threshold": plan.threshold["name"],
        "thresholds": list(plan.thresholds),
        "predictor": plan.predictor.get("fingerprint", ""),
        "gpu_share": share,
        "dtype": plan.spec.dtype,
        "measured": f"{text}, {tokens:,} tokens in blocks of {block}, {plan.spec.dtype}",
        "machine": machine_line(),
        "ways": rows,
    }


def main(
    model: Annotated[str, typer.Argument(help="model directory, smollm2 or smollm2-relu")],
    plan: Annotated[list[Path], typer.Option(help="plan file of this model; repeat it for more")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to score")],
    output: Annotated[Path, typer.Option("-o", "--output", help=".json; the table goes beside it as .md")],
    predictor: Annotated[Path | None, typer.Option(help="of the plans that name it")] = None,
    tokens: Annotated[int, typer.Option(help="of the text, at most")] = 4096,
    block: Annotated[int, typer.Option(help="tokens of a block")] = 256,
    tasks: Annotated[str, typer.Option(help="harness tasks, with commas; empty: text only")] = ",".join(TASKS),
    include: Annotated[Path, typer.Option(help="where tasks of one's own lie")] = Path("traces/tasks"),
    raised: Annotated[str, typer.Option("--raise", help="thresholds of a ReLU model, with commas: at these")] = "",
    teacher: Annotated[str, typer.Option(help="model whose dense way is compared with too")] = "",
) -> None:
    """Measure each plan in each of its ways and write both files."""
    directory, words = resolve_model(model), read_text(text)
    blocks = text_blocks(directory, words, block, tokens)
    trained = None if predictor is None else Predictors.load(predictor)
    other = dense_losses(resolve_model(teacher), Plan.load(plan[0]), blocks) if teacher else None
    for file in plan:
        read = Plan.load(file)
        used = trained if read.predictor else None
        if raised:
            rows = []
            for threshold in map(float, raised.split(",")):
                at = replace(read, thresholds=(threshold,) * read.spec.layers)
                with Session(at, directory, "cpu", predictor=used) as session:
                    (row,) = scored(session, blocks, ["sparse"], f"t = {threshold:g}", other)
                rows.append(row | {"way": f"t = {threshold:.4g}", "threshold": threshold})
                write([result(read, file.stem, "raised", rows, text.name, block)], output)
            continue
        with Session(read, directory, "cpu", predictor=used) as session:
            rows = scored(session, blocks, ways_of(read), file.stem, other)
        for row in rows if tasks else []:
            print(f"{file.name}: tasks, {row['way']}", file=sys.stderr, flush=True)
            named = predictor if used else None
            row["tasks"] = task_figures(file, directory, row["way"], named, include, tuple(tasks.split(",")))
        write([result(read, file.stem, "ways", rows, text.name, block)], output)
    print(output.with_suffix(".md").read_text())


if __name__ == "__main__":
    typer.run(main)
