"""Replay speed of each cache policy at ReluLLaMA-7B shape, on one core, with full timing.

Three parts. *Policies*: a synthetic trace in which each neuron of each layer is active by its own popularity, drawn
from a beta distribution; half of the neurons are resident, the window is sized, the prediction is the token before.
Beside them, in turn in the same run: libCacheSim's LRU on the same stream, one request an active neuron (per access,
not set-wise, and without timing), and SimPy with one timeout for each op that the replay times (and nothing else).
*Thresholds*: the preset relullama-7b with its published predictor (recall 0.91, 41% of the neurons predicted), only
the predicted set computed, thresholds fixed and balanced. *Growth*: microseconds a token-layer over tokens, neurons
and layers; the exponent is that of the whole time, by least squares over its logarithms: 1 is linear.

Spans are not kept, and which neurons moved only where a row says so: their ids are more to write than all else.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import libcachesim
import numpy as np
import pandas as pd
import simpy
from rows import OUTPUTS, Row, measure_in_turn, save, spread, write

from dinfer import bits
from dinfer.machine import load_machine
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.policies import CACHES
from dinfer.record.presets import preset
from dinfer.record.synth import synth
from dinfer.sim import simulate
from dinfer.sim.predictor import Predictor, implied_precision
from dinfer.systems import fixed, predict
from dinfer.trace import Trace

TIMEOUTS = 50_000
PREDICTOR = {"recall": 0.9089, "predicted": 0.4105, "share": 0.0671}
"""ReluLLaMA-7B's, ProSparse Table 2; the share of the parameters is PowerInfer's of OPT-13B."""

GROWN = ("static", "hot_predicted")
SIZES = {
    "tokens": (256, 512, 1024, 2048, 4096),
    "neurons": (2752, 5504, 11008, 22016, 44032),
    "layers": (8, 16, 32, 64, 80),
}
PEERS = ("libcachesim LRU", "simpy timeouts")
UNIT = "token-layers/s"


def synthetic_trace(spec: ModelSpec, tokens: int) -> Trace:
    """Independent draws by a fixed popularity, 15% on average; seeded."""
    rng = np.random.default_rng(0)
    popularity = rng.beta(0.35, 1.9, (spec.layers, spec.neurons)).astype(np.float32)
    drawn = (
        bits.pack(rng.random(popularity.shape, np.float32) < popularity) for _ in range(tokens)
    )
    active = np.stack(list(drawn))
    table = pd.DataFrame({"id": 0, "sequence": 0, "position": np.arange(tokens), "phase": "decode"})
    return Trace(spec, table, active, {"kind": "synthetic"})


def write_requests(trace: Trace, tokens: int, path: Path) -> int:
    """The first layer of the first ``tokens`` as libCacheSim's oracleGeneral records; returns how many."""
    ids = np.concatenate(
        [bits.ids(words, trace.spec.neurons) for words in trace.active[:tokens, 0]]
    )
    layout = [("clock", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]
    records = np.zeros(len(ids), layout)
    records["clock"], records["id"], records["size"] = np.arange(len(ids)), ids, 1
    records["next"] = -1
    path.write_bytes(records.tobytes())
    return len(ids)


def lru_requests(path: Path, slots: int) -> Callable[[], object]:
    """Run the requests of ``path`` through a fresh LRU of ``slots`` objects."""

    def function() -> None:
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        libcachesim.LRU(cache_size=slots, hashpower=16).process_trace(reader)

    return function


def simpy_timeouts() -> None:
    """One process that waits ``TIMEOUTS`` times."""
    environment = simpy.Environment()

    def process():
        for _ in range(TIMEOUTS):
            yield environment.timeout(1.0)

    environment.process(process())
    environment.run()


def ops_per_token_layer(plan: Plan, trace: Trace) -> float:
    """Ops that a replay of the first tokens times, waiting left out."""
    few = trace.rows(np.arange(len(trace)) < 8)
    frame = simulate(plan, few).timeline.to_frame()
    return float((frame["step"] != "wait").sum() / (len(few) * trace.spec.layers))


def plan_of(trace: Trace, cache: str, **options: str) -> Plan:
    """Half of the neurons resident on pc-high, the hottest of the trace."""
    spec = trace.spec
    placement = Placement.hottest(trace.frequency, np.full(spec.layers, spec.neurons // 2))
    machine = load_machine("pc-high")
    return Plan(spec, machine, placement, trace.frequency, {"name": cache}, vram_bytes=2**50, **options)


def replay(plan: Plan, trace: Trace, decisions: bool = False, **options: Predictor) -> Callable[[], object]:
    """Simulate when called."""
    return lambda: simulate(plan, trace, spans=False, decisions=decisions, **options)


def policy_rows(spec: ModelSpec, tokens: int, repeat: int) -> list[Row]:
    """One row for each peer, then one for each policy and peer."""
    trace = synthetic_trace(spec, tokens)
    plans = {name: plan_of(trace, name) for name in CACHES}
    ops = ops_per_token_layer(plans["hot_predicted"], trace)
    with tempfile.TemporaryDirectory() as folder:
        path, of_peer = Path(folder) / "requests.bin", min(tokens, 64)
        requests = write_requests(trace, of_peer, path)
        functions: dict[str, Callable[[], object]] = {
            PEERS[0]: lru_requests(path, spec.neurons // 2),
            PEERS[1]: simpy_timeouts,
        }
        functions |= {name: replay(plan, trace) for name, plan in plans.items()}
        seconds = measure_in_turn(functions, repeat)
    work = dict.fromkeys(CACHES, tokens * spec.layers)
    work |= {PEERS[0]: of_peer, PEERS[1]: TIMEOUTS / ops}
    speed = {name: work[name] / seconds[name] for name in functions}
    settings = {
        PEERS[0]: f"{requests / of_peer:.0f} requests a token-layer",
        PEERS[1]: f"{ops:.1f} ops a token-layer",
    }
    rows = [Row(name, settings[name], *spread(speed[name]), UNIT, "", None) for name in PEERS]
    for name in CACHES:
        for peer in PEERS:
            ratio = float(np.median(speed[name] / speed[peer]))
            rows.append(Row(f"replay {name}", shape_of(spec, tokens), *spread(speed[name]), UNIT, peer, ratio))
    return rows


def shape_of(spec: ModelSpec, tokens: int) -> str:
    """What was replayed."""
    return f"synthetic, {spec.layers} x {spec.neurons}, {tokens} tokens"


def threshold_rows(spec: ModelSpec, tokens: int, repeat: int) -> list[Row]:
    """hot_predicted and static where a predictor says what is computed, thresholds fixed and balanced."""
    statistics = preset("relullama-7b")
    trace = synth(spec, statistics, tokens, 1)
    published = PREDICTOR["recall"], PREDICTOR["predicted"]
    precision = implied_precision(published[0], statistics.density, published[1])
    balanced = predict(trace, published[0], precision, PREDICTOR["share"])
    functions = {}
    for cache in ("static", "hot_predicted"):
        plan = plan_of(trace, cache, activation="predicted", prediction="oracle")
        for name, predictor in (("fixed", fixed(balanced)), ("balanced", balanced)):
            functions[f"replay {cache}, thresholds {name}"] = replay(plan, trace, predictor=predictor)
    functions["replay hot_predicted, thresholds balanced, ids kept"] = replay(plan, trace, True, predictor=balanced)
    shape = f"{shape_of(spec, tokens)}, {published[1]:.0%} predicted"
    return [
        Row(name, shape, *spread(tokens * spec.layers / seconds), UNIT, "", None)
        for name, seconds in measure_in_turn(functions, repeat).items()
    ]


def growth_rows(spec: ModelSpec, tokens: int, repeat: int, sizes: dict[str, tuple[int, ...]]) -> list[Row]:
    """Microseconds of static and hot_predicted over each of ``sizes``, and the exponent of the whole time."""
    rows = []
    for axis, values in sizes.items():
        traces = [synthetic_trace(*_sized(spec, tokens, axis, value)) for value in values]
        functions = {(c, t.spec, len(t)): replay(plan_of(t, c), t) for t in traces for c in GROWN}
        found = measure_in_turn(functions, repeat)
        for cache in GROWN:
            mine = {key: seconds for key, seconds in found.items() if key[0] == cache}
            for value, ((_, made, count), seconds) in zip(values, mine.items(), strict=True):
                per = seconds * 1e6 / (count * made.layers)
                if axis == "neurons":
                    per *= 1000 / made.neurons
                unit = "us a token-layer" + (" and 1,000 neurons" if axis == "neurons" else "")
                rows.append(Row(f"growth {cache}, {axis} {value}", shape_of(made, count), *spread(per), unit, "", None))
            if len(values) < 3:  # too few to tell
                continue
            exponents = np.polyfit(np.log(values), np.log(list(mine.values())), 1)[0]
            name, setting = f"growth {cache}, exponent of {axis}", f"{values[0]} to {values[-1]} {axis}"
            rows.append(Row(name, setting, *spread(exponents), "exponent", "", None))
    return rows


def _sized(spec: ModelSpec, tokens: int, axis: str, value: int) -> tuple[ModelSpec, int]:
    return (spec, value) if axis == "tokens" else (replace(spec, **{axis: value}), tokens)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", choices=OUTPUTS, default="md")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and repetitions")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--tokens", type=int, help="default: 1024, or 128 if quick")
    parser.add_argument("--save", type=Path, help="keep the rows as JSON and as Markdown under this name")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    given = arguments()
    spec = ModelSpec(
        "relullama-7b",
        "llama",
        given.layers,
        4096,
        given.neurons,
        32,
        32,
        128,
        32000,
        activation="relu",
    )
    tokens = given.tokens or (128 if given.quick else 1024)
    repeat = 5 if given.quick else 15
    sizes = {"tokens": (tokens, 2 * tokens)} if given.quick else SIZES
    rows = policy_rows(spec, tokens, repeat) + threshold_rows(spec, tokens, repeat)
    rows += growth_rows(spec, min(tokens, 256), 3 if given.quick else 5, sizes)
    if given.save is not None:
        save(rows, given.save)
    write(rows, given.output)


if __name__ == "__main__":
    main()
