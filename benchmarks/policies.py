"""Cache policies side by side: tokens/s, the share of a bound that no policy can pass, and where each gives
in.

Simulated on the catalogue's machines. Traces of the presets are synthetic, their offline profile is off by
the preset's mismatch; smollm2-small and smollm2-relu-small are real recordings, each planned from the sequences
that are not replayed.
With ``oracle`` the next layer's set is predicted without error and only it is computed; with ``previous``
each set is predicted to be that of the token before and all gates are computed. Either way all active neurons
are computed: what differs is where.
"""

import json
import math
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parent))
import policies_tables
from bounds import clairvoyant_bound, free_link_bound, link_bound
from rows import OUTPUTS, Row, machine_line, write

from dinfer import bits
from dinfer.machine import ISSUES, Machine, load_machine
from dinfer.model import catalogue_models
from dinfer.plan import Plan
from dinfer.policies import CACHES
from dinfer.record.presets import preset
from dinfer.record.synth import Statistics, profile, synth
from dinfer.sim import simulate
from dinfer.solve import budget_for_share, make_plan
from dinfer.timeline import Run
from dinfer.trace import Trace
from dinfer.units import format_bytes

TRACES = Path(__file__).parents[1] / "traces"
RECORDINGS = ("smollm2-small", "smollm2-relu-small")
PREDICTIONS = {"oracle": "predicted", "previous": "exact"}  # and what is computed with it
HELD_OUT = 48
"""Decode tokens of a recording that are replayed and not planned from, at least."""


class Setting(NamedTuple):
    """One plan to be compared under all policies."""

    model: str
    machine: str
    share: float
    prediction: str

    def __str__(self) -> str:
        """All but the budget in bytes."""
        return f"{self.model}, {self.machine}, {self.share:.0%} of the neurons, {self.prediction}"


CASES = (
    ("relullama-7b", "pc-low", (0.15, 0.3, 0.5)),
    ("relullama-13b", "pc-high", (0.15, 0.3, 0.5)),
    ("prosparse-13b", "pc-high", (0.15, 0.3, 0.5)),
    *((recording, machine, (0.25, 0.5)) for recording in RECORDINGS for machine in ("pc-low", "pc-high")),
)


class Size(NamedTuple):
    """How much of a preset is drawn: ``layers`` 0 for all of the model's."""

    tokens: int
    sequences: int
    layers: int


FULL, QUICK = Size(256, 2, 0), Size(24, 2, 3)


# plans


@cache
def traces(model: str, size: Size) -> tuple[Trace, Trace, np.ndarray]:
    """The trace to plan from, the one to replay, and the offline profile float32 [layer, neuron]."""
    if model in RECORDINGS:
        seen, replayed = Trace.load(TRACES / model).hold_out(HELD_OUT)
        return seen, replayed, seen.frequency
    spec = catalogue_models()[model]
    spec = replace(spec, layers=size.layers or spec.layers)
    statistics = preset(model)
    trace = synth(spec, statistics, size.tokens, size.sequences)
    return trace, trace, profile(spec, statistics)


def plan_of(
    setting: Setting, size: Size, machine: Machine | None = None, **options: Any
) -> tuple[Plan, Trace]:
    """The plan of a setting with everything else as by default, and the trace to replay."""
    seen, replayed, frequency = traces(setting.model, size)
    machine = machine or load_machine(setting.machine)
    vram = budget_for_share(seen.spec, machine, setting.share, 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of SmolLM2 would fit
        made = make_plan(
            seen, machine, vram, context=1024, frequency=frequency, prediction=setting.prediction,
            activation=PREDICTIONS[setting.prediction], **options,
        )  # fmt: skip
    return made, replayed


def run(plan: Plan, trace: Trace, cache: str, machine: Machine | None = None, **parameters: Any) -> Run:
    """The plan simulated with another cache policy."""
    return simulate(replace(plan, cache={"name": cache, **parameters}), trace, machine, spans=False, decisions=False)


def with_link(machine: Machine, bytes_per_second: float, fixed_seconds: float | None = None) -> Machine:
    """The machine with another host-to-device rate."""
    fixed = machine.h2d.fixed_seconds if fixed_seconds is None else fixed_seconds
    return replace(machine, h2d=replace(machine.h2d, bytes_per_second=bytes_per_second, fixed_seconds=fixed))


# what is measured


def clairvoyant(plan: Plan, trace: Trace) -> float:
    """Tokens/s of belady with each set known and the constant window that suits it best, found in
    hindsight."""
    known = replace(plan, prediction="oracle")
    mean = int(bits.count(trace.phase("decode").active).mean())
    windows = {max(1, int(mean * share)) for share in (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3)}
    made = [known, *(replace(known, window=window) for window in windows)]
    speeds = [run(each, trace, "belady").timeline.tokens_per_second for each in made]
    return max(speeds + [run(known, trace, "static").timeline.tokens_per_second])


def compare(setting: Setting, size: Size) -> list[dict[str, Any]]:
    """All policies on one plan: one record each."""
    plan, trace = plan_of(setting, size)
    free, link = free_link_bound(plan, trace), link_bound(plan, trace)
    known = {"bound": min(free, link), "free_link_bound": free, "clairvoyant": clairvoyant(plan, trace)}
    names = [name for name in CACHES if setting.prediction == "oracle" or not CACHES[name].clairvoyant]
    records = []
    for name in names:
        done = run(plan, trace, name)
        records.append(
            {**setting._asdict(), "vram": format_bytes(plan.vram_bytes), "cache": name, **known,
             **figures(plan, trace, name, done)}
        )  # fmt: skip
    best = max(
        (run(replace(plan, window=window), trace, "hot_predicted").timeline.tokens_per_second, window)
        for window in (8, 32, 64, 128, 256, 512)
    )
    records.append(
        {**setting._asdict(), "vram": format_bytes(plan.vram_bytes), "cache": "hot_predicted, best window",
         **known, "tokens_per_second": best[0], "window": best[1]}
    )  # fmt: skip
    return records


def figures(plan: Plan, trace: Trace, cache: str, done: Run) -> dict[str, float]:
    """Speed, the GPU's share of active neurons and of layers (left nothing to the CPU), fetches a layer and
    token, shares in vain and hidden."""
    on_gpu, on_cpu, fetched, wasted = done.work.sum((0, 1)).astype(float)
    cells = done.work.shape[0] * done.work.shape[1]
    return {
        "tokens_per_second": done.timeline.tokens_per_second,
        "gpu_share": on_gpu / (on_gpu + on_cpu),
        "whole_share": float((done.work[:, :, 1] == 0).mean()),
        "fetched": fetched / cells,
        "wasted_share": wasted / max(fetched, 1.0),
        "hidden_share": hidden_share(plan, trace, cache, done),
    }


def hidden_share(plan: Plan, trace: Trace, cache: str, done: Run) -> float:
    """Share of the transfer time that the run does not notice; NaN when nothing is moved.

    The same decisions are timed again on a link of any bandwidth: what the run gains was exposed, be it
    waiting or the CPU's share of the DRAM.
    """
    transfer = done.work[:, :, 2].sum() * plan.costs.link_neuron_seconds
    if not transfer:
        return math.nan
    free = run(plan, trace, cache, with_link(plan.machine, math.inf))
    return 1.0 - (done.timeline.seconds - free.timeline.seconds) / transfer


def sensitivity(setting: Setting, size: Size) -> list[dict[str, Any]]:
    """Tokens/s over lambda, lookahead, window, the way a prefetch is issued, and the group that one copy moves."""
    plan, trace = plan_of(setting, size)
    last = plan.spec.layers - 1
    variants: list[tuple[str, Any, str, Plan, dict[str, Any]]] = []
    variants += [("lambda", lam, "hot_predicted", plan, {"lam": lam}) for lam in (0.5, 1, 2, 4, 8, 16)]
    variants += [("pinned", p, "hot_predicted", plan, {"pinned": p}) for p in (0.0, 0.25, 0.5, 0.75)]
    horizons = [{"horizon": h, "trailing": h} for h in (1, 2, 4, 8, 16, 32)]
    variants += [("horizon", both["horizon"], "time_saved", plan, both) for both in horizons]
    for name in ("hot_predicted", "time_saved"):
        variants += [("lookahead", k, name, replace(plan, lookahead=min(k, last)), {}) for k in (0, 1, 2, 4)]
        variants += [("window", w, name, replace(plan, window=w), {}) for w in (16, 64, 256, 1024)]
        variants += [("issue", i, name, replace(plan, issue=i), {}) for i in ISSUES]
        variants += [("group", g, name, replace(plan, issue="copy", group=g), {}) for g in (1, 4, 24, 64)]
    return [
        {**setting._asdict(), "knob": knob, "value": value, "cache": name,
         "tokens_per_second": run(made, trace, name, **parameters).timeline.tokens_per_second}
        for knob, value, name, made, parameters in variants
    ]  # fmt: skip


def placement_gap(setting: Setting, size: Size) -> list[dict[str, Any]]:
    """Greedy placement beside the ILP's: tokens/s under policies that move nothing and something."""
    records = []
    for solver in ("greedy", "ilp"):
        plan, trace = plan_of(setting, size, solver=solver)
        for name in ("static", "time_saved"):
            speed = run(plan, trace, name).timeline.tokens_per_second
            records.append({**setting._asdict(), "solver": solver, "cache": name, "tokens_per_second": speed})
    return records


CROSSED = ("static", "hot_predicted", "time_saved")


def link_crossover(size: Size) -> list[dict[str, Any]]:
    """Where prefetch loses for want of a link: host-to-device GB/s from 0.5 to 32, ReluLLaMA-7B on PC-Low."""
    records = []
    for prediction in PREDICTIONS:
        setting = Setting("relullama-7b", "pc-low", 0.3, prediction)
        for rate in (0.5, 1, 2, 4, 8, 16, 32):
            plan, trace = plan_of(setting, size, with_link(load_machine("pc-low"), rate * 1e9))
            for window in (None, 512):
                made = replace(plan, window=window)
                for name in CROSSED:
                    speed = run(made, trace, name).timeline.tokens_per_second
                    records.append(
                        {"prediction": prediction, "gigabytes_per_second": rate, "window": window or "sized",
                         "cache": name, "tokens_per_second": speed}
                    )  # fmt: skip
    return records


def precision_crossover(size: Size) -> list[dict[str, Any]]:
    """Where prefetch loses for want of a prediction: neurons equally popular, states that last more or
    less long."""
    spec = catalogue_models()["relullama-7b"]
    spec = replace(spec, layers=min(size.layers or 8, 8))
    records = []
    for machine in ("pc-low", "pc-high"):
        for persistence in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95):
            statistics = Statistics(0.33, 0.0, 0.0, persistence)
            trace = synth(spec, statistics, min(size.tokens, 128))
            there = load_machine(machine)
            vram = budget_for_share(spec, there, 0.3)
            plan = make_plan(trace, there, vram, frequency=profile(spec, statistics))
            for name in CROSSED:
                done = run(plan, trace, name)
                records.append(
                    {"machine": machine, "precision": persistence + (1 - persistence) * 0.33, "cache": name,
                     "tokens_per_second": done.timeline.tokens_per_second,
                     "fetched": float(done.work[:, :, 2].mean())}
                )  # fmt: skip
    return records


def flow_gap(size: Size) -> list[dict[str, Any]]:
    """Hits of every policy beside the exact bound, on a small layer: 96 neurons, a quarter of them slots,
    32 tokens."""
    records = []
    for model in ("relullama-7b", "prosparse-13b"):
        spec = replace(catalogue_models()[model], layers=2, neurons=96)
        trace = synth(spec, preset(model), 32, 1)
        plan = _small_plan(spec, trace, preset(model))
        active = bits.unpack(np.ascontiguousarray(trace.active[:, 1]), 96)
        for window in (1, 2, 4, 8, 96):
            most = clairvoyant_bound(active, bits.unpack(plan.placement.resident[1], 96), [window] * 32)
            for name in CACHES:
                made = replace(plan, window=window, prediction="oracle")
                hits = int(run(made, trace, name).work[:, 1, 0].sum())
                records.append({"model": model, "window": window, "cache": name, "hits": hits, "bound": most})
    return records


def _small_plan(spec, trace: Trace, statistics: Statistics) -> Plan:
    there = load_machine("pc-high")
    vram = budget_for_share(spec, there, 0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_plan(trace, there, vram, frequency=profile(spec, statistics), issue="gather")


# what is written


def as_rows(records: list[dict[str, Any]]) -> list[Row]:
    """One row a policy and setting; the ratio is the share of the bound."""
    return [
        Row(record["cache"], f"{Setting(*[record[f] for f in Setting._fields])} ({record['vram']})",
            record["tokens_per_second"], record["tokens_per_second"], record["tokens_per_second"], "tokens/s",
            "the bound", record["tokens_per_second"] / record["bound"])
        for record in records
    ]  # fmt: skip


def rounded(value: Any) -> Any:
    """Floats to four figures, for a compact file; NaN as None."""
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def save_json(results: dict[str, Any], path: Path) -> None:
    """Each table as the names of its columns and one line a row, so that a change is read in the diff."""
    parts = []
    for name, records in results.items():
        columns = list(dict.fromkeys(key for record in records for key in record))
        table = [columns, *([rounded(record.get(column)) for column in columns] for record in records)]
        lines = ",\n".join("  " + json.dumps(row) for row in table)
        parts.append(f' "{name}": [\n{lines}\n ]')
    path.write_text(f'{{\n "machine": {json.dumps(machine_line())},\n' + ",\n".join(parts) + "\n}\n")


# figures

COLOURS = dict(
    zip(
        ("static", "lru", "lfu", "s3fifo", "random", "hot_predicted", "time_saved", "belady"),
        ("#999999", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#0072B2", "#D55E00", "#000000"),
        strict=True,
    )
)  # Okabe and Ito
UNITS = {"window": ", neurons", "group": ", neurons a copy", "lookahead": ", layers", "horizon": ", tokens"}
MARKS = {"static": "s", "hot_predicted": "o", "time_saved": "D"}


def draw_shares(records: list[dict[str, Any]], path: Path) -> None:
    """Share of the bound by policy: one group of bars a setting, one panel a kind of prediction.

    Belady, who knows each set, is drawn with the window that suits it best.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(16, 7.4), sharex=False, layout="constrained")
    for axis, prediction in zip(axes, PREDICTIONS, strict=True):
        mine = [r for r in records if r["prediction"] == prediction and r["cache"] in COLOURS]
        settings = list(dict.fromkeys((r["model"], r["machine"], r["share"]) for r in mine))
        names = [name for name in COLOURS if any(r["cache"] == name for r in mine)]
        for place, name in enumerate(names):
            shares = [
                next(
                    100 * r["clairvoyant" if name == "belady" else "tokens_per_second"] / r["bound"]
                    for r in mine
                    if (r["model"], r["machine"], r["share"]) == key and r["cache"] == name
                )
                for key in settings
            ]
            where = np.arange(len(settings)) + (place - len(names) / 2 + 0.5) * 0.8 / len(names)
            label = f"{name}, best window" if name == "belady" else name
            axis.bar(where, shares, 0.8 / len(names), label=label, color=COLOURS[name])
        labels = [
            f"{model.removesuffix('-small')}\n{machine}\n{share:.0%} resident"
            for model, machine, share in settings
        ]
        axis.set_xticks(range(len(settings)), labels, fontsize=8)
        axis.set_xlim(-0.6, len(settings) - 0.4)
        axis.set_ylabel("share of the bound, %")
        axis.set_title(f"prediction: {prediction}", loc="left", fontsize=10)
        axis.set_ylim(0, 100)
        axis.grid(axis="y", lw=0.4, alpha=0.5)
        axis.set_axisbelow(True)
    axes[0].legend(ncols=8, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.22), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_crossover(links: list[dict[str, Any]], precisions: list[dict[str, Any]], path: Path) -> None:
    """Speed against static over the link's rate, and over the prediction's precision."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.9), layout="constrained")
    for axis, prediction in zip(axes[:2], PREDICTIONS, strict=True):
        for window, style in (("sized", "-"), (512, ":")):
            mine = [r for r in links if r["prediction"] == prediction and r["window"] == window]
            _draw_ratios(axis, mine, "gigabytes_per_second", style, f", window {window}")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("host-to-device link, GB/s")
        axis.set_title(f"ReluLLaMA-7B, PC-Low but for its link, {prediction}", fontsize=9, loc="left")
    for machine, style in (("pc-low", "-"), ("pc-high", ":")):
        mine = [r for r in precisions if r["machine"] == machine]
        _draw_ratios(axes[2], mine, "precision", style, f", {machine}")
    axes[2].set_xlabel("precision of the token before as prediction")
    axes[2].set_title("all neurons equally popular", fontsize=9, loc="left")
    for axis in axes:
        axis.axhline(1.0, color=COLOURS["static"], lw=1)
        axis.set_ylabel("speed, static = 1")
        axis.grid(lw=0.4, alpha=0.5)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ratios(axis, records: list[dict[str, Any]], key: str, style: str, suffix: str) -> None:
    static = {r[key]: r["tokens_per_second"] for r in records if r["cache"] == "static"}
    for name in CROSSED[1:]:
        mine = [r for r in records if r["cache"] == name]
        ratios = [r["tokens_per_second"] / static[r[key]] for r in mine]
        axis.plot(
            [r[key] for r in mine], ratios, style, marker=MARKS[name], ms=4, color=COLOURS[name],
            label=name + suffix,
        )  # fmt: skip


def draw_sensitivity(records: list[dict[str, Any]], path: Path) -> None:
    """Tokens/s over each knob, one panel a knob, one line a policy and kind of prediction."""
    import matplotlib.pyplot as plt

    knobs = ("lambda", "horizon", "lookahead", "window", "issue", "group")
    figure, axes = plt.subplots(1, len(knobs), figsize=(16, 3.6), layout="constrained")
    for axis, knob in zip(axes, knobs, strict=True):
        for prediction, style in (("oracle", "-"), ("previous", ":")):
            for name in CROSSED[1:]:
                mine = [
                    r for r in records if (r["knob"], r["prediction"], r["cache"]) == (knob, prediction, name)
                ]
                if mine:
                    axis.plot(
                        [str(r["value"]) for r in mine], [r["tokens_per_second"] for r in mine], style,
                        marker=MARKS[name], ms=4, color=COLOURS[name], label=f"{name}, {prediction}",
                    )  # fmt: skip
        axis.set_xlabel(knob + UNITS.get(knob, ""))
        axis.set_ylim(0)
        axis.grid(lw=0.4, alpha=0.5)
    axes[0].set_ylabel("tokens/s")
    axes[2].legend(fontsize=7, frameon=False, loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    quick: Annotated[bool, typer.Option(help="a few layers and tokens: does it run?")] = False,
    save: Annotated[Path | None, typer.Option(help="keep all tables as JSON here")] = None,
    figures: Annotated[Path | None, typer.Option(help="draw the figures into this directory")] = None,
    page: Annotated[Path | None, typer.Option(help="write the tables --save keeps into this page as well")] = None,
    output: Annotated[str, typer.Option("-o", help="md, csv or json")] = "md",
) -> None:
    """Print one row a policy and setting: tokens/s, and its share of the bound as the ratio."""
    if page is not None and save is None:
        raise typer.BadParameter("wants --save, whose tables it shows", param_hint="--page")
    if output not in OUTPUTS:
        raise typer.BadParameter(f"{output!r} is not one of {', '.join(OUTPUTS)}", param_hint="-o")
    size = QUICK if quick else FULL
    settings = [
        Setting(model, machine, share, prediction)
        for prediction in PREDICTIONS
        for model, machine, shares in (CASES[:1] if quick else CASES)
        for share in (shares[:1] if quick else shares)
    ]
    records = []
    for setting in settings:
        print(setting, file=sys.stderr)
        records += compare(setting, size)
    if save is not None or figures is not None:
        results = {"policies": records, **_others(size)}
        if save is not None:
            save.parent.mkdir(parents=True, exist_ok=True)
            save_json(results, save)
            if page is not None:
                page.write_text(policies_tables.rewritten(page.read_text(), policies_tables.read(save)))
        if figures is not None:
            _draw(results, figures)
    write(as_rows(records), output)


def _others(size: Size) -> dict[str, list[dict[str, Any]]]:
    some = [
        Setting(model, machine, 0.3, prediction)
        for model, machine in (("relullama-7b", "pc-low"), ("prosparse-13b", "pc-high"), (RECORDINGS[1], "pc-low"))
        for prediction in PREDICTIONS
    ]
    print("sensitivity, placement, crossover, exact bound", file=sys.stderr)
    return {
        "sensitivity": [record for setting in some for record in sensitivity(setting, size)],
        "placement": [record for setting in some for record in placement_gap(setting, size)],
        "link_crossover": link_crossover(size._replace(layers=size.layers or 8)),
        "precision_crossover": precision_crossover(size),
        "exact_bound": flow_gap(size),
    }


def _draw(results: dict[str, list[dict[str, Any]]], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    draw_shares(results["policies"], directory / "policies-bound.png")
    draw_crossover(
        results["link_crossover"], results["precision_crossover"], directory / "policies-crossover.png"
    )
    first = [r for r in results["sensitivity"] if r["model"] == "relullama-7b"]
    draw_sensitivity(first, directory / "policies-sensitivity.png")


if __name__ == "__main__":
    typer.run(main)
