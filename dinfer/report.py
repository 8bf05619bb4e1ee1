"""Tables as Markdown, CSV, JSON or on a terminal, and what a run did in one row."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dinfer.bits import unpack
from dinfer.errors import InputError
from dinfer.machine import Machine
from dinfer.model import ModelSpec
from dinfer.plan import Plan, early_layers
from dinfer.timeline import WORK, Run
from dinfer.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from dinfer.predictors import Predictors

FORMS = ("md", "csv", "json")
PERCENT = ("error", "gap", "residual")
"""Columns shown as percent, besides those that end in ``_share``."""

LONG = 26
"""Characters beyond which a column of a table on a terminal wraps."""


def format_table(frame: pd.DataFrame, form: str) -> str:
    """``frame`` as text that ends in a newline; ``form`` is one of FORMS.

    Markdown rounds for reading; CSV and JSON (a list of objects) keep every digit, missing values empty or null.
    Raises InputError for another form.
    """
    if form not in FORMS:
        raise InputError(f"output {form!r} is not one of {', '.join(FORMS)}")
    if form == "csv":
        return frame.to_csv(index=False)
    if form == "json":
        return json.dumps([_plain(row) for row in frame.to_dict("records")], indent=1) + "\n"
    rows = _cells(frame)
    right = [_is_number(frame[name]) for name in frame]
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in escaped)) for i in range(len(frame.columns))]
    rule = ["-" * (width - 1) + (":" if is_right else "-") for width, is_right in zip(widths, right, strict=True)]
    return "".join(f"| {' | '.join(_padded(row, widths, right))} |\n" for row in [escaped[0], rule, *escaped[1:]])


def print_table(frame: pd.DataFrame, form: str | None = None, title: str = "") -> None:
    """Print ``frame`` on stdout: in ``form``, else as a rich table on a terminal and as Markdown elsewhere.

    The title stands over tables for reading only.
    """
    if form is None and sys.stdout.isatty():
        from rich.console import Console

        table = rich_table(frame, title)
        least = 2 + sum((column.min_width or 0) + 1 for column in table.columns)
        Console(width=max(Console().width, least)).print(table)  # the terminal wraps what is wider: no column is lost
        return
    heading = f"{title}\n\n" if title and form is None else ""
    sys.stdout.write(heading + format_table(frame, form or "md"))


def print_tables(
    tables: Mapping[str, list[dict[str, Any]]], form: str | None = None, titles: Mapping[str, str] | None = None
) -> None:
    """Print several tables: JSON is one object of lists, CSV one table whose first column names the table."""
    if form == "json":
        plain = {name: [_plain(row) for row in rows] for name, rows in tables.items()}
        sys.stdout.write(json.dumps(plain, indent=1) + "\n")
    elif form == "csv":
        rows = [{"table": name, **row} for name, part in tables.items() for row in part]
        sys.stdout.write(format_table(pd.DataFrame(rows), "csv"))
    else:
        for name, part in tables.items():
            title = (titles or {}).get(name, name)
            if form == "md" or not sys.stdout.isatty():
                sys.stdout.write(f"\n### {title}\n\n")
            print_table(pd.DataFrame(part), form, title)


def rich_table(frame: pd.DataFrame, title: str = "") -> "Table":
    """``frame`` as a rich table, numbers to the right, rounded for reading; columns without any value are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    frame = frame.dropna(axis="columns", how="all")
    table = Table(title=Text(title) if title else None, box=box.SIMPLE_HEAD, title_justify="left", padding=0)
    rows = _cells(frame)
    rows[0] = [header.replace("_", " ") for header in rows[0]]  # wraps at words
    for column, name in zip(zip(*rows, strict=True), frame, strict=True):
        width: int | None = max(map(len, [*column[0].split(), *column[1:]]))
        least = min(width or 0, LONG)
        justify: Any = "right" if _is_number(frame[name]) else "left"
        width = None if width and width > LONG else width  # only long text wraps
        table.add_column(column[0], justify=justify, width=width, min_width=least, overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


@contextmanager
def progress(text: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, drawn only when told (done, total), so that it disturbs no measurement.

    Elsewhere than on a terminal it is a line at each quarter.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _quarters(text, unit)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn()
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(text, total=None)
        bar.refresh()
        yield lambda done, total: bar.update(task, completed=min(done, total), total=total, refresh=True)


def _quarters(text: str, unit: str) -> Callable[[int, int], None]:
    said = 0

    def at(done: int, total: int) -> None:
        nonlocal said
        if (quarter := min(4, 4 * done // max(total, 1))) > said:
            said = quarter
            print(f"{text}: {min(done, total):,} of {total:,} {unit}", file=sys.stderr, flush=True)

    return at


def run_summary(run: Run, plan: Plan) -> dict[str, Any]:
    """What ``run`` did and where: plain values for JSON.

    ``gpu_share`` and ``cpu_share`` are of the active neurons, ``gpu_device`` and ``cpu_device`` who computed them.
    ``gigabytes_per_second`` are the weight bytes that the plan's steps read, over the whole time: attention, head,
    what is examined of every neuron and the rest of the active ones. ``fetched`` and ``wasted`` are neurons a token.
    ``prefill_seconds`` are of all prompts together, predicted or measured; no other figure counts them.
    ``quantisation_error`` of an int8 or int4 run is the layers' mean RMS change of the neurons' weights, relative.
    """
    timeline = run.timeline
    tokens = max(timeline.tokens, 1)
    moved = dict(zip(WORK, run.work.sum(axis=(0, 1), dtype=np.int64).tolist(), strict=True))
    return {
        "source": timeline.meta.get("source", ""),
        "plan": timeline.meta.get("plan", ""),
        "model": plan.spec.name,
        "machine": timeline.meta.get("machine", plan.machine.name),
        "cache": plan.cache["name"],
        **_quantisation(run),
        "tokens": timeline.tokens,
        "seconds": timeline.seconds,
        "tokens_per_second": timeline.tokens_per_second,
        "prompt_tokens": sum(tokens for tokens, _ in timeline.meta.get("prefills", ())),
        "prefill_seconds": sum(seconds for _, seconds in timeline.meta.get("prefills", ())),
        "gigabytes_per_second": touched_bytes(plan, run) / timeline.seconds / 1e9 if timeline.seconds > 0 else 0.0,
        "gpu_device": timeline.meta.get("device", plan.machine.gpu.name),
        "gpu_share": run.gpu_share,
        "cpu_device": plan.machine.cpu.name,
        "cpu_share": 1 - run.gpu_share if moved["cpu_active"] else 0.0,
        "fetched": moved["fetched"] / tokens,
        "wasted": moved["wasted"] / tokens,
        "step_milliseconds": {name: 1e3 * value for name, value in timeline.step_seconds().items() if value > 0},
    }


def _quantisation(run: Run) -> dict[str, float]:
    errors = run.timeline.meta.get("quantisation_errors") or ()
    return {"quantisation_error": sum(errors) / len(errors)} if errors else {}


def touched_bytes(plan: Plan, run: Run) -> float:
    """Weight bytes that the steps of ``run`` read: a model of the algorithm, not a counter of the hardware."""
    spec, costs, tokens = plan.spec, plan.costs, run.timeline.tokens
    active = float(run.work[..., :2].sum(dtype=np.int64))
    dense = tokens * (spec.layers * spec.attention_bytes + spec.head_bytes)
    examined = tokens * spec.layers * spec.neurons * costs.gate_bytes
    return dense + examined + active * (costs.neuron_bytes - costs.gate_bytes)


def print_run(summary: Mapping[str, Any], form: str | None = None, to_stderr: bool = False) -> None:
    """Print ``run_summary``: lines for reading and the steps' times, or all of it in ``form``.

    JSON is one object; Markdown and CSV have a row a quantity.
    """
    if form == "json":
        sys.stdout.write(json.dumps(_plain(summary), indent=1) + "\n")
        return
    if form is not None:
        flat: dict[str, Any] = {}
        for name, value in summary.items():
            flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
        values = list(flat.values()) if form == "csv" else [_cell(name, value) for name, value in flat.items()]
        print_table(pd.DataFrame({"quantity": list(flat), "value": values}, dtype=object), form)
        return
    print("\n".join(summary_lines(summary)), file=sys.stderr if to_stderr else sys.stdout)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """``run_summary`` as a few lines for a terminal."""
    steps = ", ".join(f"{name} {value:.2f}" for name, value in summary["step_milliseconds"].items())
    share = f"{summary['gpu_share']:.1%} on the GPU ({summary['gpu_device']})"
    share += f", {summary['cpu_share']:.1%} on the CPU ({summary['cpu_device']})"
    lines = [
        f"{summary['source'] or 'run'} on {summary['machine']}: {summary['tokens']} tokens in "
        f"{summary['seconds']:.3f} s",
        f"  {summary['tokens_per_second']:.2f} tok/s, {summary['gigabytes_per_second']:.2f} GB/s of weights read",
        f"  active neurons computed: {share}",
        f"  neurons fetched a token: {summary['fetched']:.0f}, of which {summary['wasted']:.0f} in vain",
        f"  ms a token: {steps}",
    ]
    if summary["prompt_tokens"]:
        lines.append(f"  before: {summary['prompt_tokens']} prompt tokens in {summary['prefill_seconds']:.2f} s")
    return lines


def plan_lines(plan: Plan) -> list[str]:
    """How the neurons are placed, by which rules they move, and how good the placement is known to be."""
    slots, spec = slots_summary(plan), plan.spec
    window = "sized from the time left" if plan.window is None else f"{plan.window} neurons"
    issue = f"copy of {plan.group}" if plan.issue == "copy" else plan.issue
    lines = [
        f"slots: {slots['slots']:,} of {spec.layers * spec.neurons:,} neurons ({slots['slots_share']:.1%}), "
        f"{slots['least']} to {slots['most']} of {slots['neurons']} in a layer",
        f"rules: cache {plan.cache['name']}, lookahead {plan.lookahead}, window {window}, activation "
        f"{plan.activation}, prediction {plan.prediction}, issue {issue}",
    ]
    if plan.predictor:
        lines.append(
            f"predictor: {plan.predictor['fingerprint']}, mean rank {plan.predictor['rank']}, "
            f"{format_bytes(plan.predictor['bytes'])}"
        )
        lines.append(early_line(plan))
    if plan.solver:
        record = plan.solver
        lines.append(f"solver: {record['name']}, {record['status']}, gap to the LP bound {record['gap']:.2%}")
    return lines


def early_line(plan: Plan) -> str:
    """Which layers cannot be predicted as far ahead as the plan's predictor looks, why, and what becomes of them."""
    early = plan.predictor.get("early") or early_layers(plan.lookahead)
    layers = early["layers"]
    if not layers:
        return f"no layer is predicted ahead: {own_residual(0)}"
    names = "layer 0" if len(layers) == 1 else f"layers 0 to {layers[-1]}"
    if early["way"] == "resident":
        return f"not predicted {plan.lookahead} ahead: {names}, as {early['why']}; resident and computed whole"
    cold = sum(plan.spec.neurons - int(plan.placement.slots[layer]) for layer in layers)
    return (
        f"not predicted {plan.lookahead} ahead: {names}, as {early['why']}; predicted from layer 0's residual, "
        f"k = {'0' if len(layers) == 1 else f'0 to {layers[-1]}'}: layer 0's prefetch is not hidden, and {cold:,} "
        f"neurons of {'it' if len(layers) == 1 else 'them'} are not resident"
    )


def layers_table(plan: Plan) -> pd.DataFrame:
    """One row a layer: slots, expected active neurons and their share on the GPU, threshold, how it is predicted.

    ``ahead`` is how many layers before the prediction is known: of ``previous`` a token before, so that it is empty.
    """
    spec, slots, frequency = plan.spec, plan.placement.slots, plan.frequency.astype(float)
    resident = unpack(plan.placement.resident, spec.neurons)
    active, served = frequency.sum(axis=1), (frequency * resident).sum(axis=1)
    trained, held = plan.prediction == "trained", plan.held
    rows: dict[str, Any] = {
        "layer": np.arange(spec.layers),
        "slots": slots,
        "slots_share": slots / spec.neurons,
        "active": active,
        "gpu_share": np.divide(served, active, out=np.zeros(spec.layers), where=active > 0),
    }
    if plan.thresholds:
        rows["threshold"] = plan.thresholds
    rows["prediction"] = ["none: resident" if whole else plan.prediction for whole in held]
    if trained:
        ahead = np.minimum(np.arange(spec.layers), plan.lookahead)
        rows["ahead"] = pd.Series([None if w else int(k) for w, k in zip(held, ahead, strict=True)], dtype=object)
    return pd.DataFrame(rows)


def own_residual(lookahead: int) -> str:
    """Which layers cannot be predicted ``lookahead`` layers ahead, and what they are predicted from."""
    if lookahead == 0:
        return "each layer is predicted from its own residual (k = 0)"
    whose = "layer 0 is" if lookahead == 1 else f"layers 0 to {lookahead - 1} are"
    return (
        f"{whose} predicted from layer 0's residual (k = {'0' if lookahead == 1 else f'0 to {lookahead - 1}'}): "
        f"no layer stands {lookahead} before"
    )


def predictor_lines(predictors: "Predictors") -> list[str]:
    """What a trained predictor is and how good it was on the prompts that stopped its training."""
    spec, quality = predictors.spec, predictors.quality
    ranks = predictors.ranks
    share = predictors.bytes / (spec.layers * spec.neurons * 2 * spec.matrices * spec.hidden)

    def mean(name: str) -> float:
        return sum(quality[name]) / spec.layers

    return [
        f"predictor {predictors.fingerprint()} of {spec.name}: ranks {min(ranks)} to {max(ranks)}, "
        f"{predictors.bits}-bit, {format_bytes(predictors.bytes)}, {share:.1%} of the FFN's 16-bit bytes",
        f"lookahead {predictors.lookahead}; {own_residual(predictors.lookahead)}",
        f"on {quality['measured_on']}: recall {mean('recall'):.1%}, precision {mean('precision'):.1%}, predicted "
        f"{mean('predicted'):.1%} of the neurons where {mean('density'):.1%} are active, missing "
        f"{mean('missed'):.1%} of the output's norm",
    ]


def memory_table(memory: Mapping[str, int]) -> pd.DataFrame:
    """A plan's memory breakdown: term, bytes, and the bytes for reading; the last row is the sum."""
    terms = [*memory, "total"]
    count = [*memory.values(), sum(memory.values())]
    return pd.DataFrame({"term": terms, "bytes": count, "size": [format_bytes(value) for value in count]})


def slots_summary(plan: Plan) -> dict[str, Any]:
    """How the neurons are placed: slots in all, their share of all neurons, and the range over layers."""
    slots, spec = plan.placement.slots, plan.spec
    return {
        "slots": int(slots.sum()),
        "slots_share": float(slots.sum()) / (spec.layers * spec.neurons),
        "least": int(slots.min()),
        "most": int(slots.max()),
        "neurons": spec.neurons,
    }


def machine_toml(machine: Machine, fits: pd.DataFrame, model: str) -> str:
    """``machine`` as a TOML file that says when, where and with what it was measured, and how well each fit holds."""
    import platform
    from datetime import UTC, datetime
    from importlib.metadata import version

    import tomli_w

    packages = ", ".join(f"{name} {version(name)}" for name in ("dinfer", "torch", "numba", "numpy"))
    kind = "the GPU and its link are emulated on the CPU" if machine.emulated else "a real GPU"
    header = [
        f"Measured by `dinfer profile` at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC with the shapes of {model}.",
        f"Where: {platform.node()}, {machine.cpu.name}, {platform.system()} {platform.release()}; {kind}.",
        f"With: Python {platform.python_version()}, {packages}.",
        "Fits (residual: median of |fit / measured - 1|):",
        *("  " + line for line in format_table(fits, "md").splitlines()),
    ]
    return "".join(f"# {line}\n" for line in header) + "\n" + tomli_w.dumps(machine.to_dict())


def models_table(models: Mapping[str, ModelSpec]) -> pd.DataFrame:
    """One row a model: its shape and bytes."""
    return pd.DataFrame(
        {
            "model": name,
            "activation": spec.activation,
            "layers": spec.layers,
            "hidden": spec.hidden,
            "neurons": spec.neurons,
            "parameters_1e9": spec.parameters / 1e9,
            "dtype": spec.dtype,
            "neuron_bytes": spec.neuron_bytes,
            "dense": format_bytes(spec.dense_bytes),
            "ffn": format_bytes(spec.ffn_bytes),
        }
        for name, spec in models.items()
    )


def machines_table(machines: Mapping[str, Machine]) -> pd.DataFrame:
    """One row a machine: its processors, memories, link and DRAM."""
    return pd.DataFrame(
        {
            "machine": name,
            "gpu": machine.gpu.name,
            "gpu_memory": format_bytes(machine.gpu.memory_bytes),
            "cpu": machine.cpu.name.split(",")[0],
            "cpu_memory": format_bytes(machine.cpu.memory_bytes),
            "link": machine.h2d.name,
            "link_GB/s": machine.h2d.bytes_per_second / 1e9,
            "dram_GB/s": machine.dram_bytes_per_second / 1e9,
        }
        for name, machine in machines.items()
    )


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): _plain_value(value) for name, value in row.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _cells(frame: pd.DataFrame) -> list[list[str]]:
    # header, then one list a row
    columns = [[_cell(str(name), value) for value in frame[name]] for name in frame]
    return [[str(name) for name in frame], *map(list, zip(*columns, strict=True))]


def _cell(name: str, value: Any) -> str:
    value = _plain_value(value)
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if name in PERCENT:
        return f"{value:+.1%}" if name == "error" else f"{value:.1%}"
    if name.endswith("_share"):
        return f"{value:.1%}"
    return _rounded(value)


def _rounded(value: float) -> str:
    # four significant digits without an exponent where that stays short
    if value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _padded(row: list[str], widths: list[int], right: list[bool]) -> list[str]:
    return [
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(row, widths, right, strict=True)
    ]
