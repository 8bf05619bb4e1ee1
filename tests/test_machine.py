"""Machines: seconds that are affine in bytes, published figures with their sources, exact files."""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from dinfer.errors import InputError
from dinfer.machine import (
    STEP_COSTS,
    Cost,
    Device,
    Link,
    Machine,
    catalogue_machines,
    layer_costs,
    load_machine,
    prefill_choices,
    prefill_seconds,
)
from dinfer.model import ModelSpec, catalogue_models

MACHINES = catalogue_machines()
MODELS = catalogue_models()
CATALOGUE = Path(str(resources.files("dinfer") / "catalog"))
SOURCES = ("hardware ", "paper", "cases ", "facts/", "issue ", "[code]", "[card]", "[2nd]")
TEXTS = ("name", "notes")

SIMPLE: dict[str, Any] = {
    "name": "simple",
    "gpu": {
        "name": "g",
        "memory_bytes": 10**9,
        "bytes_per_second": 1e12,
        "launch_seconds": 1e-6,
        "predict": {"fixed_seconds": 7e-6},
    },
    "cpu": {
        "name": "c",
        "memory_bytes": 10**10,
        "bytes_per_second": 5e10,
        "gate": {"fixed_seconds": 2e-5},
        "schedule": {"fixed_seconds": 3e-5},
    },
    "h2d": {"name": "up", "fixed_seconds": 4e-6, "bytes_per_second": 2e10},
    "d2h": {"name": "down", "fixed_seconds": 5e-6, "bytes_per_second": 1e10},
    "dram_bytes_per_second": 6e10,
}


# Cost and Link.


def test_a_cost_is_a_fixed_part_and_the_slower_of_two_rates() -> None:
    cost = Cost(fixed_seconds=1.0, bytes_per_second=10.0, flops_per_second=100.0)
    assert cost.seconds(20, 100) == 1.0 + 2.0
    assert cost.seconds(20, 500) == 1.0 + 5.0
    assert Cost().seconds(1e18, 1e18) == 0.0


@pytest.mark.parametrize("threads", [1, 2, 4, 8, 16, 64])
def test_threads_do_not_speed_up_what_the_memory_bounds(threads: int) -> None:
    cpu = Cost(bytes_per_second=40e9, flops_per_second=threads * 50e9)  # case 17
    assert 1 / cpu.seconds(32e9, flops=32e9) == pytest.approx(1.25)


@pytest.mark.parametrize(
    "rates",
    [
        {"fixed_seconds": -1.0},
        {"fixed_seconds": math.nan},
        {"fixed_seconds": math.inf},
        {"bytes_per_second": 0.0},
        {"bytes_per_second": math.nan},
        {"flops_per_second": -1.0},
    ],
)
def test_a_cost_without_sense_is_refused(rates: dict[str, float]) -> None:
    values = {"fixed_seconds": 0.0, "bytes_per_second": math.inf, "flops_per_second": math.inf}
    shown = ", ".join(f"{key}={value}" for key, value in (values | rates).items())
    message = f"cost Cost({shown}): fixed_seconds must be 0 or more and the rates positive"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Cost(**rates)


@pytest.mark.parametrize(
    ("machine", "single", "grouped"), [("pc-low", 3.3e9, 10.8e9), ("pc-high", 5.8e9, 22.3e9)]
)
def test_links_reproduce_the_measured_copies(machine: str, single: float, grouped: float) -> None:
    link, neuron = MACHINES[machine].h2d, 24_576
    assert neuron / link.seconds(1, neuron) == pytest.approx(single, rel=0.02)
    assert 24 * neuron / link.seconds(1, 24 * neuron) == pytest.approx(grouped, rel=0.02)


def test_a_link_pays_its_fixed_part_for_each_copy() -> None:
    link = Link("l", fixed_seconds=2e-6, bytes_per_second=1e9)
    assert link.seconds(24, 1000) == pytest.approx(48e-6 + 1e-6)
    assert link.seconds(0, 0) == 0.0


@pytest.mark.parametrize(("fixed", "rate"), [(-1.0, 1e9), (0.0, 0.0), (0.0, math.nan)])
def test_a_link_without_sense_is_refused(fixed: float, rate: float) -> None:
    message = (
        f"link 'l': fixed_seconds is {fixed} and bytes_per_second {rate}; "
        "they must be 0 or more, and positive"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Link("l", fixed_seconds=fixed, bytes_per_second=rate)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"memory_bytes": "24GiB"},
            "device 'd': memory_bytes is '24GiB'; it must be a whole number of at least 1",
        ),
        (
            {"context_bytes": -1},
            "device 'd': context_bytes is -1; it must be a whole number of at least 0",
        ),
        ({"threads": 0}, "device 'd': threads is 0; it must be a whole number of at least 1"),
    ],
)
def test_a_device_without_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Device(**{"name": "d", "memory_bytes": 1, **change})


# The file.


def test_a_device_rate_holds_for_every_step_that_gives_none() -> None:
    gpu = Machine.from_dict(SIMPLE).gpu
    assert {getattr(gpu, step).bytes_per_second for step in STEP_COSTS} == {1e12}
    assert gpu.predict == Cost(fixed_seconds=7e-6, bytes_per_second=1e12)


def test_launches_set_the_fixed_part_of_the_steps_that_launch() -> None:
    gpu = Machine.from_dict(SIMPLE).gpu
    fixed = {step: round(getattr(gpu, step).fixed_seconds * 1e6) for step in STEP_COSTS}
    assert fixed == {
        "attention": 12,
        "kv": 0,
        "gate": 4,
        "neuron": 0,
        "head": 3,
        "prefill": 0,
        "merge": 1,
        "predict": 7,
        "schedule": 0,
        "hand": 0,
        "wake": 0,
        "delay": 0,
    }


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_machine_survives_its_dict_and_its_file(name: str, tmp_path: Path) -> None:
    machine, file = MACHINES[name], tmp_path / "machine.toml"
    file.write_text(tomli_w.dumps(machine.to_dict()))
    assert Machine.from_dict(machine.to_dict()) == load_machine(str(file)) == machine
    assert load_machine(str(file)).fingerprint() == machine.fingerprint()


def figures(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each number in a machine's dict."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from figures(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, key)


def test_the_fingerprint_changes_with_every_figure() -> None:
    machine = MACHINES["pc-high"]
    paths = list(figures(machine.to_dict()))
    seen = {machine.fingerprint()}
    for path in paths:
        values = machine.to_dict()
        table = values
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] += 1
        seen.add(Machine.from_dict(values).fingerprint())
    assert len(seen) == len(paths) + 1 > 30


def test_the_fingerprint_leaves_out_the_notes() -> None:
    machine = MACHINES["pc-high"]
    assert dataclasses.replace(machine, notes="").fingerprint() == machine.fingerprint()
    assert dataclasses.replace(machine, emulated_link=machine.h2d).fingerprint() != machine.fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": None}, "machine description lacks 'gpu'; see docs/machine.md"),
        ({"d2h": None}, "machine description lacks 'd2h'; see docs/machine.md"),
        (
            {"dram_bytes_per_second": None},
            "machine description: missing 1 required positional argument: "
            "'dram_bytes_per_second'; see docs/machine.md",
        ),
        (
            {"h2d": {"name": "up", "fixed_seconds": 0.0}},
            "machine description: missing 1 required positional argument: "
            "'bytes_per_second'; see docs/machine.md",
        ),
        (
            {"speed": 1},
            "machine description: got an unexpected keyword argument 'speed'; see docs/machine.md",
        ),
        (
            {"gpu": {"name": "g", "memory_bytes": 1, "speed": 1}},
            "machine gpu: speed is not one of attention, bytes_per_second, context_bytes, delay, "
            "flops_per_second, gate, hand, head, kv, launch_seconds, memory_bytes, merge, name, neuron, "
            "predict, prefill, schedule, threads, wake",
        ),
        ({"cpu": 16}, "machine cpu is 16; it must be a table, see docs/machine.md"),
        (
            {"gpu": {"name": "g", "memory_bytes": 1, "delay": {"latency": 3}}},
            "machine gpu.delay: latency is not one of bytes_per_second, fixed_seconds, flops_per_second",
        ),
        (
            {"gpu": {"name": "g", "memory_bytes": 1, "gate": 3}},
            "machine gpu.gate is 3; it must be a table, see docs/machine.md",
        ),
        (
            {"dram_bytes_per_second": 0},
            "machine 'simple': dram_bytes_per_second is 0; it must be positive",
        ),
    ],
)
def test_a_description_with_wrong_keys_is_refused(change: dict[str, Any], message: str) -> None:
    values = {key: value for key, value in (SIMPLE | change).items() if value is not None}
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Machine.from_dict(values)


def test_an_unknown_machine_is_refused_with_the_names_that_are_known() -> None:
    message = (
        "machine 'rtx9999' is not in the catalogue (pc-high, pc-low, rtx3090, rtx4060ti-16gb, "
        "rtx4080, rtx4090, rtx5090); name one of these or a .toml file"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        load_machine("rtx9999")


def test_a_missing_file_is_refused_with_the_way_to_write_one(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    message = f"machine file {file} does not exist; write one with `dinfer profile -o here.toml`"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        load_machine(str(file))


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"PK\x03\x04"])
def test_a_file_that_is_not_toml_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"^machine file {re.escape(str(file))} is not TOML: "):
        load_machine(str(file))


# The catalogue.


def test_the_catalogue_holds_the_papers_machines_and_four_more() -> None:
    assert list(MACHINES) == [
        "pc-high",
        "pc-low",
        "rtx3090",
        "rtx4060ti-16gb",
        "rtx4080",
        "rtx4090",
        "rtx5090",
    ]


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_catalogue_machines_are_whole(name: str) -> None:
    machine = load_machine(name)
    assert (machine.name, machine.emulated) == (name, False)
    assert 0 < machine.gpu.context_bytes < machine.gpu.memory_bytes < machine.cpu.memory_bytes
    for device, steps in (
        (machine.gpu, ("attention", "gate", "neuron", "head", "merge", "predict")),
        (machine.cpu, ("gate", "neuron")),
    ):
        assert all(getattr(device, step).bytes_per_second < math.inf for step in steps)
    assert machine.cpu.neuron.bytes_per_second <= machine.dram_bytes_per_second
    assert machine.h2d.bytes_per_second < machine.dram_bytes_per_second


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("pc-low", 11),
        ("pc-high", 24),
        ("rtx3090", 24),
        ("rtx4060ti-16gb", 16),
        ("rtx4080", 16),
        ("rtx4090", 24),
        ("rtx5090", 32),
    ],
)
def test_catalogue_cards_have_their_memory(name: str, gib: int) -> None:
    assert MACHINES[name].gpu.memory_bytes == gib * 2**30


def test_the_context_reserve_is_that_of_the_measured_kv_pool() -> None:
    gpu, spec = MACHINES["pc-high"].gpu, MODELS["llama-3-8b"]  # case 4
    naive = 9 * gpu.memory_bytes // 10 - 2 * spec.parameters
    assert naive // (16 * spec.kv_bytes(1)) * 16 == 54_400
    assert (naive - gpu.context_bytes) // (16 * spec.kv_bytes(1)) * 16 == 41_408


def test_eight_lanes_are_half_of_sixteen() -> None:
    half, whole = MACHINES["rtx4060ti-16gb"], MACHINES["rtx4080"]
    assert half.h2d.bytes_per_second == whole.h2d.bytes_per_second / 2


@pytest.mark.parametrize(
    "file", sorted(CATALOGUE.glob("*/*.toml")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_every_figure_names_its_source(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if re.match(r"\w+ = ", line)]
    assert len(lines) >= 14
    for line in lines:
        key, comment = line.split(" = ")[0], line.partition("  # ")[2]
        assert key in TEXTS or comment.startswith((*SOURCES, "derived: ", "ours: ")), line


# What one layer costs.


def test_layer_costs_with_exact_activation_in_closed_form() -> None:
    spec, machine = MODELS["relullama-7b"], Machine.from_dict(SIMPLE)
    costs = layer_costs(spec, machine)
    assert (costs.neuron_bytes, costs.gate_bytes) == (24_576, 8192)
    assert costs.gpu_seconds(100, 30) == pytest.approx(4e-6 + (100 * 8192 + 30 * 16_384) / 1e12)
    assert costs.cpu_seconds(100, 30) == pytest.approx(2e-5 + (100 * 8192 + 30 * 16_384) / 5e10)


def test_layer_costs_with_predicted_activation_touch_only_the_predicted() -> None:
    spec, machine = MODELS["relullama-7b"], Machine.from_dict(SIMPLE)
    costs = layer_costs(spec, machine, activation="predicted", predictor_rank=1024)
    assert costs.cpu_seconds(11_008, 30) == pytest.approx(2e-5 + 30 * 24_576 / 5e10)
    assert costs.predict_seconds == pytest.approx(7e-6 + 1024 * (4096 + 11_008) * 2 / 1e12)


def test_layer_costs_outside_the_ffn_in_closed_form() -> None:
    spec, machine = MODELS["llama-3-8b"], Machine.from_dict(SIMPLE)
    costs = layer_costs(spec, machine)
    attention_bytes = 2 * 4096 * 128 * (32 + 32 + 8 + 8)
    assert costs.attention_seconds == pytest.approx(12e-6 + attention_bytes / 1e12)
    assert costs.attention_token_seconds == pytest.approx(131_072 / 32 / 1e12)
    assert costs.head_seconds == pytest.approx(3e-6 + 2 * 128_256 * 4096 / 1e12)
    assert costs.schedule_seconds == 3e-5
    assert costs.predict_seconds == 0.0


def test_layer_costs_of_the_link_in_closed_form() -> None:
    costs = layer_costs(MODELS["relullama-7b"], Machine.from_dict(SIMPLE), issue="block")
    assert costs.state_up_seconds == pytest.approx(4e-6 + 4 * 4096 / 2e10)
    assert costs.state_down_seconds == pytest.approx(5e-6 + 4 * 4096 / 1e10)
    assert costs.merge_seconds == pytest.approx(1e-6 + 4 * 4096 / 1e12)


@pytest.mark.parametrize(
    ("issue", "seconds"),
    [
        ("copy", 24 * (4e-6 + 24_576 / 2e10)),
        ("block", 4e-6 + 24 * 24_576 / 2e10),
        ("gather", 4e-6 + 24 * 24_576 / 2e10),
    ],
)
def test_only_single_copies_pay_the_link_for_each_neuron(issue: str, seconds: float) -> None:
    costs = layer_costs(MODELS["relullama-7b"], Machine.from_dict(SIMPLE), issue=issue)
    assert costs.prefetch_seconds(24) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("link", "group", "rate"),
    [("pc-low", 1, 3.3e9), ("pc-low", 24, 10.8e9), ("pc-high", 1, 5.8e9), ("pc-high", 24, 22.3e9)],
)
def test_copies_of_24_kb_reach_the_published_rates(link: str, group: int, rate: float) -> None:
    """PCIe 3 and 4 with single copies of 24 KB and with groups of 24 of them."""
    spec = MODELS["relullama-7b"]
    costs = layer_costs(spec, load_machine(link), issue="copy", group=group)
    link_of = load_machine(link).h2d
    seconds = group * 24_576 / link_of.bytes_per_second + link_of.fixed_seconds
    assert group * 24_576 / seconds == pytest.approx(rate, rel=0.01)
    assert costs.prefetch_seconds(group) == pytest.approx(link_of.seconds(1, group * spec.neuron_bytes))
    assert costs.prefetch_seconds(group + 1) == pytest.approx(link_of.seconds(2, (group + 1) * spec.neuron_bytes))


@pytest.mark.parametrize(
    ("model", "share"), [("relullama-7b", 1 / 3), ("llama-2-7b", 2 / 3), ("opt-6.7b", 1 / 2)]
)
def test_exact_activation_examines_the_rows_that_decide(model: str, share: float) -> None:
    costs = layer_costs(MODELS[model], Machine.from_dict(SIMPLE))
    assert costs.gate_bytes == pytest.approx(share * costs.neuron_bytes)


@pytest.mark.parametrize(("dtype", "flops_per_byte"), [("float16", 1.0), ("int4", 16 / 4.5)])
def test_a_slow_processor_is_bound_by_its_flops(dtype: str, flops_per_byte: float) -> None:
    slow = {**SIMPLE, "cpu": {**SIMPLE["cpu"], "flops_per_second": 1e9}}
    spec = MODELS["relullama-7b"].with_dtype(dtype)
    costs = layer_costs(spec, Machine.from_dict(slow), activation="predicted")
    assert costs.cpu_neuron_seconds == pytest.approx(spec.neuron_bytes * flops_per_byte / 1e9)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"activation": "guessed"}, "activation 'guessed' is not one of exact, predicted"),
        ({"issue": "pigeon"}, "issue 'pigeon' is not one of copy, block, gather"),
        ({"issue": "copy", "group": 65}, "group is 65 neurons; it must be between 1 and 64"),
        (
            {"issue": "block", "group": 24},
            "group is 24 with issue block, which moves all at once; leave it 1 or plan with copy",
        ),
    ],
)
def test_an_unknown_choice_is_refused(choice: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        layer_costs(MODELS["opt-6.7b"], MACHINES["pc-high"], **choice)


def test_a_prompt_is_computed_where_it_is_sooner() -> None:
    """The GPU's flops are cheap, but what is not resident must come over the link: once for each chunk of 512."""
    spec = ModelSpec("tiny", "llama", 2, 64, 128, 4, 4, 16, 100)
    slow, fast = ({"bytes_per_second": 1e12, "flops_per_second": rate} for rate in (1e8, 1e10))
    machine = Machine.from_dict(
        SIMPLE
        | {"cpu": {"name": "cpu", "memory_bytes": 1, "prefill": slow}}
        | {"gpu": {"name": "gpu", "memory_bytes": 1, "prefill": fast}}
        | {"h2d": {"name": "wire", "fixed_seconds": 0.0, "bytes_per_second": 1e5}}
    )
    flops = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    half = prefill_choices(spec, machine, 600, resident=128)
    assert half["cpu"] == pytest.approx(2 * 600 * flops / 1e8)
    assert half["stream"] == pytest.approx(2 * 2 * 64 * spec.neuron_bytes / 1e5)
    whole = prefill_choices(spec, machine, 600, resident=256)
    assert whole == {"cpu": half["cpu"], "stream": pytest.approx(2 * 600 * flops / 1e10)}
    assert prefill_seconds(spec, machine, 600, 256) == whole["stream"] < half["cpu"] < half["stream"]
    assert "stream" not in prefill_choices(spec, replace(machine, gpu=replace(machine.gpu, prefill=Cost())), 600)


def test_prefill_takes_each_chunk_through_every_layer() -> None:
    """600 tokens are chunks of 512 and 88; each layer costs its fixed part and its flops, or its bytes if longer."""
    spec = ModelSpec("tiny", "llama", 2, 64, 128, 4, 4, 16, 100)
    step = {"fixed_seconds": 0.5, "bytes_per_second": 1e9, "flops_per_second": 1e6}
    machine = Machine.from_dict(SIMPLE | {"cpu": {"name": "cpu", "memory_bytes": 1, "prefill": step}})
    weights = 4 * 64 * 64 + 3 * 64 * 128
    head = machine.gpu.head.seconds(spec.head_bytes, 2 * 100 * 64)
    assert prefill_choices(spec, machine, 600)["cpu"] == pytest.approx(2 * (2 * 0.5 + 2 * weights * 600 / 1e6) + head)
    assert prefill_choices(spec, machine, 0)["cpu"] == head
    slow = {**step, "bytes_per_second": 1.0}
    machine = Machine.from_dict(SIMPLE | {"cpu": {"name": "cpu", "memory_bytes": 1, "prefill": slow}})
    assert prefill_choices(spec, machine, 1)["cpu"] == pytest.approx(2 * (0.5 + 2 * weights) + head)
