"""Replay speed of each cache policy at ReluLLaMA-7B shape, on one core, with full timing.

A synthetic trace: each neuron of each layer is active by its own popularity, drawn from a beta
distribution. Half of the neurons are resident, the window is sized, the prediction is the token
before, spans are not kept. Beside it, in turn in the same run: libCacheSim's LRU on the same stream,
one request an active neuron (per access, not set-wise, and without timing), and SimPy with one
timeout for each op that the replay times (and nothing else).
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import libcachesim
import numpy as np
import pandas as pd
import simpy
from rows import OUTPUTS, Row, measure_in_turn, spread, write

from dinfer import bits
from dinfer.machine import load_machine
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.policies import CACHES
from dinfer.sim import simulate
from dinfer.trace import Trace

TIMEOUTS = 50_000
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


def rows_of(spec: ModelSpec, tokens: int, repeat: int) -> list[Row]:
    """One row for each peer, then one for each policy and peer."""
    trace = synthetic_trace(spec, tokens)
    slots = np.full(spec.layers, spec.neurons // 2)
    placement = Placement.hottest(trace.frequency, slots)
    machine = load_machine("pc-high")
    plans = {
        name: Plan(spec, machine, placement, trace.frequency, {"name": name}, vram_bytes=2**50)
        for name in CACHES
    }
    ops = ops_per_token_layer(plans["hot_predicted"], trace)
    with tempfile.TemporaryDirectory() as folder:
        path, of_peer = Path(folder) / "requests.bin", min(tokens, 64)
        requests = write_requests(trace, of_peer, path)
        functions: dict[str, Callable[[], object]] = {
            PEERS[0]: lru_requests(path, spec.neurons // 2),
            PEERS[1]: simpy_timeouts,
        }
        for name, plan in plans.items():
            functions[name] = lambda plan=plan: simulate(plan, trace, spans=False)
        seconds = measure_in_turn(functions, repeat)
    work = dict.fromkeys(CACHES, tokens * spec.layers)
    work |= {PEERS[0]: of_peer, PEERS[1]: TIMEOUTS / ops}
    speed = {name: work[name] / seconds[name] for name in functions}
    shape = f"synthetic, {spec.layers} x {spec.neurons}, {tokens} tokens"
    settings = {
        PEERS[0]: f"{requests / of_peer:.0f} requests a token-layer",
        PEERS[1]: f"{ops:.1f} ops a token-layer",
    }
    rows = [Row(name, settings[name], *spread(speed[name]), UNIT, "", None) for name in PEERS]
    for name in CACHES:
        for peer in PEERS:
            ratio = float(np.median(speed[name] / speed[peer]))
            rows.append(Row(f"replay {name}", shape, *spread(speed[name]), UNIT, peer, ratio))
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", choices=OUTPUTS, default="md")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and repetitions")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--tokens", type=int, help="default: 1024, or 128 if quick")
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
    write(rows_of(spec, tokens, 5 if given.quick else 15), given.output)


if __name__ == "__main__":
    main()
