"""The tables of docs/policies.md, made of what benchmarks/policies.py measured, so that they never differ from it."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Table = list[str]

PREDICTIONS = ("oracle", "previous")
MOVERS = ("hot_predicted", "time_saved")
WINDOWS = ("sized", 512)
ORDER = ("static", "random", "s3fifo", "lru", "lfu", "hot_predicted", "time_saved", "belady")
KNOBS = {
    "lambda": "lambda", "pinned": "pinned", "horizon": "horizon", "lookahead": "lookahead", "window": "window",
    "issue": "issue", "group": "group, issue copy",
}  # fmt: skip
"""Each knob and how a row calls it."""
REAL_RELU = "smollm2-relu-small"


def read(file: Path) -> dict[str, list[Record]]:
    """What policies.py saved: of each table its head and its rows."""
    saved = json.loads(file.read_text())
    heads = {name: rows for name, rows in saved.items() if name != "machine"}
    return {name: [dict(zip(rows[0], row, strict=True)) for row in rows[1:]] for name, rows in heads.items()}


def rewritten(text: str, results: dict[str, list[Record]]) -> str:
    """``text`` of the page with every table that ``results`` hold made anew, and nothing else changed.

    A table is known by its head; those of one head follow each other as in ``tables``. Raises ValueError where the
    page lacks one.
    """
    made = tables(results)
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        replaced = next((table for table in made if not inside and table[0] == line), None)
        if replaced:
            lines += replaced
            made.remove(replaced)
            inside = True
        elif not (inside and line.startswith("|")):
            lines.append(line)
            inside = False
    if made:
        raise ValueError(f"the page has no table {made[0][0]}")
    return "\n".join(lines)


def tables(results: dict[str, list[Record]]) -> list[Table]:
    """All tables in the page's order."""
    policies = results["policies"]
    return [
        *(speeds([r for r in policies if r["prediction"] == name]) for name in PREDICTIONS),
        *(all_policies([r for r in policies if r["prediction"] == name]) for name in PREDICTIONS),
        *(moved([r for r in policies if r["prediction"] == name]) for name in PREDICTIONS),
        whole([r for r in policies if (r["model"], r["prediction"]) == (REAL_RELU, "oracle")]),
        sensitivity(results["sensitivity"]),
        links(results["link_crossover"]),
        precisions(results["precision_crossover"]),
        exact(results["exact_bound"]),
    ]


def speeds(records: list[Record]) -> Table:
    """Static, hot_predicted and time_saved beside belady and the bound."""
    head = "trace | machine | resident (VRAM) | static | hot_predicted | its best window | time_saved | "
    head += "against hot_predicted | against static | belady, best window | bound | share of the bound"
    rows = []
    for (model, machine, share), by in settings(records).items():
        speed = {name: r["tokens_per_second"] for name, r in by.items()}
        known, ours = by["static"], speed["time_saved"]
        cells = [model, machine, f"{share:.0%} ({known['vram']})", rate(speed["static"]), rate(speed["hot_predicted"])]
        cells += [rate(speed["hot_predicted, best window"]), f"**{rate(ours)}**"]
        cells += [f"{ours / speed[name] - 1:+.1%}" for name in ("hot_predicted", "static")]
        rows.append([*cells, rate(known["clairvoyant"]), rate(known["bound"]), f"{ours / known['bound']:.0%}"])
    return table(head, rows, words=3)


def all_policies(records: list[Record]) -> Table:
    """Tokens/s of every policy that moves."""
    names = [name for name in ORDER[1:] if any(r["cache"] == name for r in records)]
    rows = [
        [model, machine, f"{share:.0%}", *(rate(by[name]["tokens_per_second"]) for name in names)]
        for (model, machine, share), by in settings(records).items()
    ]
    return table(" | ".join(["trace | machine | resident", *names]), rows, words=3)


def moved(records: list[Record]) -> Table:
    """What hot_predicted and time_saved fetched, and what became of it."""
    head = "trace | machine | resident | GPU share: static | hot_predicted | time_saved | fetched a layer and token: "
    head += "hot_predicted | time_saved | in vain: hot_predicted | time_saved | transfer time hidden: hot_predicted | "
    head += "time_saved"
    rows = []
    for (model, machine, share), by in settings(records).items():
        cells = [model, machine, f"{share:.0%}", f"{by['static']['gpu_share']:.2f}"]
        for key, form in (("gpu_share", ".2f"), ("fetched", ".0f"), ("wasted_share", ".0%"), ("hidden_share", ".0%")):
            cells += [format(by[name][key], form) for name in MOVERS]
        rows.append(cells)
    return table(head, rows, words=3)


def whole(records: list[Record]) -> Table:
    """Share of layers and tokens that leave nothing to the CPU."""
    rows = [
        [machine, f"{share:.0%}", *(f"{by[name]['whole_share']:.0%}" for name in ORDER)]
        for (_, machine, share), by in settings(records).items()
    ]
    return table(" | ".join(["machine | resident", *ORDER]), rows, words=2)


def sensitivity(records: list[Record]) -> Table:
    """Tokens/s over each knob's values."""
    columns = [(prediction, name) for prediction in PREDICTIONS for name in MOVERS]
    head = "trace, machine | knob: its values | " + " | ".join(f"{prediction}: {name}" for prediction, name in columns)
    rows = []
    for model, machine in dict.fromkeys((r["model"], r["machine"]) for r in records):
        for knob, called in KNOBS.items():
            mine = [r for r in records if (r["model"], r["machine"], r["knob"]) == (model, machine, knob)]
            values = ", ".join(dict.fromkeys(str(r["value"]).removesuffix(".0") for r in mine))
            cells = [f"{model}, {machine}", f"{called}: {values}"]
            for column in columns:
                found = [r["tokens_per_second"] for r in mine if (r["prediction"], r["cache"]) == column]
                cells.append(", ".join(map(rate, found)))
            rows.append(cells)
    return table(head, rows, words=6)


def links(records: list[Record]) -> Table:
    """Speed over static's by the link's rate."""
    columns = [(p, window, name) for p in PREDICTIONS for window in WINDOWS for name in MOVERS]
    head = "link, GB/s | " + " | ".join(f"{p}, window {window}: {name}" for p, window, name in columns)
    keys = ("gigabytes_per_second", "prediction", "window", "cache")
    speed = {tuple(r[key] for key in keys): r["tokens_per_second"] for r in records}
    rows = [
        [f"{link:g}", *(f"{speed[link, p, w, name] / speed[link, p, w, 'static']:.2f}" for p, w, name in columns)]
        for link in dict.fromkeys(r["gigabytes_per_second"] for r in records)
    ]
    return table(head, rows, words=0)


def precisions(records: list[Record]) -> Table:
    """Speed over static's by how many of a token's neurons are active at the next one."""
    machines = list(dict.fromkeys(r["machine"] for r in records))
    head = "precision | " + " | ".join(f"{m}: hot_predicted | time_saved | its fetches" for m in machines)
    found = {(r["machine"], r["precision"], r["cache"]): r for r in records}
    rows = []
    for precision in dict.fromkeys(r["precision"] for r in records):
        cells = [f"{precision:.2f}"]
        for machine in machines:
            static = found[machine, precision, "static"]["tokens_per_second"]
            cells += [f"{found[machine, precision, name]['tokens_per_second'] / static:.3f}" for name in MOVERS]
            cells.append(f"{found[machine, precision, 'time_saved']['fetched']:.0f}")
        rows.append(cells)
    return table(head, rows, words=0)


def exact(records: list[Record]) -> Table:
    """Hits as a share of the exact bound."""
    names = ("static", "random", "lru", "s3fifo", "hot_predicted", "lfu", "belady")
    found = {(r["model"], r["window"], r["cache"]): r for r in records}
    rows = []
    for model, window in dict.fromkeys((r["model"], r["window"]) for r in records):
        by = [found[model, window, name] for name in names]
        rows.append([model, str(window), str(by[0]["bound"]), *(f"{r['hits'] / r['bound']:.1%}" for r in by)])
    return table(" | ".join(["shape | window | exact bound, hits", *names]), rows, words=1)


def settings(records: list[Record]) -> dict[tuple[str, str, float], dict[str, Record]]:
    """Records by model, machine and resident share, and of each by policy."""
    found: dict[tuple[str, str, float], dict[str, Record]] = {}
    for r in records:
        found.setdefault((r["model"], r["machine"], r["share"]), {})[r["cache"]] = r
    return found


def rate(speed: float) -> str:
    """Tokens/s in three digits."""
    return f"{speed:.1f}" if speed < 100 else f"{speed:.0f}"


def table(head: str, rows: list[list[str]], words: int) -> Table:
    """Markdown lines; all columns but the first ``words`` stand to the right."""
    count = head.count("|") + 1
    rule = "|" + "---|" * words + "--:|" * (count - words)
    return [f"| {head} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
