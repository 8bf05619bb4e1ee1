"""The paper's accuracy table in form, for a model at hand: dense, sparse and dynamic, each cell with its interval.

    python benchmarks/quality.py smollm2 --plan out/plan.json --text traces/text/moby-dick.txt -o out/quality.json

Each way is a row: perplexity and next-token agreement of the text (exec/quality.py tells how the intervals are made),
and the accuracy of harness tasks, by default those of traces/tasks, which have the form of the paper's and are not
those. Accuracies have Wilson's interval. Run it at the repository's root; -o writes .json and .md beside each other.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from dinfer.exec import Session, quality
from dinfer.exec.quality import quality_table, read_text, text_blocks, ways_of, wilson
from dinfer.plan import Plan
from dinfer.record.fetch import resolve_model
from dinfer.report import format_table, progress

TASKS = ("dinfer_entailment", "dinfer_physical", "dinfer_causes", "dinfer_pronouns")
FORMS = dict(zip(TASKS, ("RTE", "PIQA", "COPA", "Winogrande"), strict=True))


def text_rows(plan: Plan, model: Path, text: str, block: int, tokens: int) -> list[dict[str, Any]]:
    """A row a way: the figures of the text."""
    blocks = text_blocks(model, text, block, tokens)
    with Session(plan, model, "cpu") as session, progress("scoring", "blocks") as at:
        return quality_table(quality(session, blocks, ways_of(plan), at)).to_dict("records")


def task_figures(plan_file: Path, model: Path, way: str, include: Path, tasks: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy of each task in one way, with Wilson's interval and the number of items."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from dinfer.lm_eval import Harness

    harness = Harness(str(plan_file), str(model), way=way)
    manager = TaskManager(include_path=str(include))
    results = simple_evaluate(model=harness, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)
    figures = {}
    for task in tasks:
        right = [sample["acc"] for sample in results["samples"][task]]
        share, low, high = wilson(round(sum(right)), len(right))
        figures[task] = {"accuracy": share, "low": low, "high": high, "items": len(right)}
    return figures


def markdown(report: dict[str, Any]) -> str:
    """The report as a table for reading, every cell with its interval."""
    rows = []
    for each in report["plans"]:
        for row in each["ways"]:
            cells = {"plan": each["name"], "way": row["way"], "computed": f"{row['computed_share']:.0%}"}
            cells["perplexity"] = f"{row['perplexity']:.2f} ({row['perplexity_low']:.2f}-{row['perplexity_high']:.2f})"
            cells["of dense"] = f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
            cells["agreement"] = f"{row['agreement']:.1%} ({row['agreement_low']:.1%}-{row['agreement_high']:.1%})"
            cells["KL, nats"] = f"{row['divergence']:.4f} ({row['divergence_low']:.4f}-{row['divergence_high']:.4f})"
            for task, found in row.get("tasks", {}).items():
                name = f"as {FORMS[task]}" if task in FORMS else task
                cells[name] = f"{found['accuracy']:.0%} ({found['low']:.0%}-{found['high']:.0%})"
            rows.append(cells)
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    head = f"# Quality of {report['model']}\n\n{report['note']}\n\n"
    return head + format_table(pd.DataFrame(rows), "md") + f"\n{report['date']}, {report['cpu']}, {versions}.\n"


def main() -> None:
    """Measure each plan in each of its ways and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model directory or smollm2")
    parser.add_argument("--plan", type=Path, nargs="+", required=True, help="plan files of this model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), help="harness tasks; none: text only")
    parser.add_argument("--include", type=Path, default=Path("traces/tasks"), help="where tasks of one's own lie")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".json; the table goes beside it as .md")
    given = parser.parse_args()
    model, text = resolve_model(given.model), read_text(given.text)
    plans = []
    for file in given.plan:
        plan = Plan.load(file)
        rows = text_rows(plan, model, text, given.block, given.tokens)
        for row in rows if given.tasks else []:
            print(f"{file.name}: tasks, {row['way']}", file=sys.stderr, flush=True)
            row["tasks"] = task_figures(file, model, row["way"], given.include, tuple(given.tasks))
        share = float(plan.placement.slots.sum()) / (plan.spec.layers * plan.spec.neurons)
        plans.append({"name": file.stem, "threshold": plan.threshold["name"], "gpu_share": share, "ways": rows})
    report = {
        "model": plan.spec.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": plan.machine.cpu.name,
        "versions": {name: version(name) for name in ("dinfer", "torch", "transformers", "lm_eval", "numpy")},
        "python": platform.python_version(),
        "dtype": plan.spec.dtype,
        "text": given.text.name,
        "block": given.block,
        "note": (
            f"{given.text.name}, blocks of {given.block} tokens; 95% intervals in brackets: bootstrap over blocks, "
            "Wilson for agreement and accuracies. The tasks are ours, 32 items each, in the form of those named."
        ),
        "plans": plans,
    }
    given.output.write_text(json.dumps(report, indent=1) + "\n")
    given.output.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
