"""Plans: the bytes of the format, the way back, and every file that is refused."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dinfer.errors import InputError
from dinfer.machine import Cost, Device, Link, Machine, layer_costs
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.policies.balanced import Levels
from dinfer.policies.hot_predicted import HotPredicted

SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=8,
    neurons=4,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=16,
    activation="relu",
    dtype="float32",
    compute_dtype="float32",
)
MACHINE = Machine(
    "box",
    Device("card", 10**6, neuron=Cost(1e-6, 1e9)),
    Device("chip", 10**7),
    Link("up", 1e-6, 1e9),
    Link("down", 1e-6, 1e9),
    2e9,
)
FREQUENCY = np.array([[0.5, 0.25, 0, 1], [0, 0.5, 0.5, 0]], np.float32)
PLACEMENT = Placement.hottest(FREQUENCY, np.array([2, 1]))
PLAN = Plan(
    SPEC,
    MACHINE,
    PLACEMENT,
    FREQUENCY,
    vram_bytes=4096,
    memory={"neurons": 384},
    solver={"name": "greedy", "objective": 2.0},
)

LEVELS = Levels(
    np.array([[0.5, 0.25], [0.5, 0]], np.float32),
    np.array([[0, 0.125], [0, 0.25]], np.float32),
    np.arange(20.0).reshape(2, 5, 2),
    np.array([[1, 1, 1, 2], [0, 1, 2, 3]]),
)

TEXT = """\
{
 "format": "dinfer-plan",
 "version": 1,
 "model": {
  "name": "tiny",
  "family": "llama",
  "layers": 2,
  "hidden": 8,
  "neurons": 4,
  "heads": 2,
  "kv_heads": 1,
  "head_dim": 4,
  "vocab": 16,
  "gated": true,
  "tied": false,
  "activation": "relu",
  "gate_threshold": 0.0,
  "dtype": "float32",
  "compute_dtype": "float32",
  "max_positions": 2048,
  "bias": false,
  "learned_positions": 0,
  "windows": []
 },
 "model_fingerprint": "34380918aa138adb",
 "weights": "",
 "machine": {
  "name": "box",
  "gpu": {
   "name": "card",
   "memory_bytes": 1000000,
   "context_bytes": 0,
   "threads": 1,
   "attention": {
    "fixed_seconds": 0.0
   },
   "kv": {
    "fixed_seconds": 0.0
   },
   "gate": {
    "fixed_seconds": 0.0
   },
   "neuron": {
    "fixed_seconds": 1e-06,
    "bytes_per_second": 1000000000.0
   },
   "head": {
    "fixed_seconds": 0.0
   },
   "prefill": {
    "fixed_seconds": 0.0
   },
   "merge": {
    "fixed_seconds": 0.0
   },
   "predict": {
    "fixed_seconds": 0.0
   },
   "schedule": {
    "fixed_seconds": 0.0
   },
   "hand": {
    "fixed_seconds": 0.0
   },
   "wake": {
    "fixed_seconds": 0.0
   },
   "delay": {
    "fixed_seconds": 0.0
   }
  },
  "cpu": {
   "name": "chip",
   "memory_bytes": 10000000,
   "context_bytes": 0,
   "threads": 1,
   "attention": {
    "fixed_seconds": 0.0
   },
   "kv": {
    "fixed_seconds": 0.0
   },
   "gate": {
    "fixed_seconds": 0.0
   },
   "neuron": {
    "fixed_seconds": 0.0
   },
   "head": {
    "fixed_seconds": 0.0
   },
   "prefill": {
    "fixed_seconds": 0.0
   },
   "merge": {
    "fixed_seconds": 0.0
   },
   "predict": {
    "fixed_seconds": 0.0
   },
   "schedule": {
    "fixed_seconds": 0.0
   },
   "hand": {
    "fixed_seconds": 0.0
   },
   "wake": {
    "fixed_seconds": 0.0
   },
   "delay": {
    "fixed_seconds": 0.0
   }
  },
  "h2d": {
   "name": "up",
   "fixed_seconds": 1e-06,
   "bytes_per_second": 1000000000.0
  },
  "d2h": {
   "name": "down",
   "fixed_seconds": 1e-06,
   "bytes_per_second": 1000000000.0
  },
  "dram_bytes_per_second": 2000000000.0,
  "notes": ""
 },
 "machine_fingerprint": "c22f4e8ef1077e4c",
 "trace": "",
 "cache": {
  "name": "static"
 },
 "lookahead": 1,
 "window": null,
 "activation": "exact",
 "prediction": "previous",
 "predictor": {},
 "issue": "gather",
 "group": 1,
 "vram": "4KiB",
 "context": 512,
 "batch": 1,
 "memory": {
  "neurons": 384
 },
 "thresholds": [],
 "threshold": {
  "name": "fixed"
 },
 "slots": [
  2,
  1
 ],
 "solver": {
  "name": "greedy",
  "objective": 2.0
 },
 "fingerprint": "203167bf34e2e6a5"
}
"""

ARRAYS = (
    b'{"__metadata__":{"plan":"203167bf34e2e6a5"},'
    b'"resident":{"dtype":"U64","shape":[2,1],"data_offsets":[0,16]},'
    b'"frequency":{"dtype":"F32","shape":[2,4],"data_offsets":[16,48]}}'
)


@pytest.fixture
def saved(tmp_path) -> Path:
    PLAN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def refuses(message: str):
    return pytest.raises(InputError, match=f"^{re.escape(message)}$")


# the format


def test_the_text_of_a_tiny_plan(saved):
    assert saved.read_text() == TEXT


def test_the_arrays_of_a_tiny_plan(saved):
    content = saved.with_suffix(".safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert content[8 : 8 + size].rstrip() == ARRAYS
    words = (9).to_bytes(8, "little") + (2).to_bytes(8, "little")  # neurons 0 and 3; neuron 1
    assert content[8 + size :] == words + FREQUENCY.tobytes()


def test_a_plan_comes_back_equal(saved):
    plan = Plan.load(saved)
    assert plan == PLAN
    assert plan.fingerprint() == PLAN.fingerprint()
    for field in fields(Plan):
        if field.name not in ("placement", "frequency"):
            assert getattr(plan, field.name) == getattr(PLAN, field.name), field.name
    assert (plan.placement.resident == PLACEMENT.resident).all()
    assert (plan.frequency == FREQUENCY).all()


def test_levels_come_back_equal_and_are_part_of_the_plan(tmp_path):
    plan = replace(PLAN, threshold={"name": "balanced"}, levels=LEVELS)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    for name in ("gpu", "cpu", "tables", "expected"):
        assert (getattr(again.levels, name) == getattr(LEVELS, name)).all()
    assert replace(plan, levels=replace(LEVELS, gpu=LEVELS.gpu / 2)) != plan
    with refuses("levels: gpu has shape (1, 2); it must be (2, 2)"):
        replace(LEVELS, gpu=LEVELS.gpu[:1])


def test_saving_again_replaces_and_leaves_nothing_else(saved):
    other = replace(PLAN, lookahead=0)
    other.save(saved)
    assert Plan.load(saved) == other
    assert sorted(p.name for p in saved.parent.iterdir()) == ["plan.json", "plan.safetensors"]


@given(
    vram=st.integers(288, 2**50),
    lookahead=st.integers(0, 1),
    window=st.one_of(st.none(), st.integers(0, 4)),
    activation=st.sampled_from(["exact", "predicted"]),
    moved=st.sampled_from([("copy", 1), ("copy", 24), ("block", 1), ("gather", 1)]),
    levels=st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8),
    cache=st.sampled_from([{"name": "lru"}, {"name": "hot_predicted", "lam": 0.7}]),
    note=st.text(max_size=8),
)
def test_any_plan_comes_back_equal(
    tmp_path_factory, vram, lookahead, window, activation, moved, levels, cache, note
):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = replace(
        PLAN,
        machine=replace(MACHINE, notes=note),
        frequency=np.array(levels, np.float32).reshape(2, 4),
        vram_bytes=vram,
        lookahead=lookahead,
        window=window,
        activation=activation,
        issue=moved[0],
        group=moved[1],
        cache=cache,
    )
    plan.save(path)
    assert Plan.load(path) == plan
    path.unlink()
    path.with_suffix(".safetensors").unlink()


def test_a_float64_frequency_is_saved_as_float32(tmp_path):
    plan = replace(PLAN, frequency=np.full((2, 4), 0.1))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "change",
    [
        {"lookahead": 0},
        {"window": 3},
        {"cache": {"name": "lru"}},
        {"context": 513},
        {"batch": 2},
        {"weights": "abc"},
        {"trace": "abc"},
        {"vram_bytes": 4097},
        {"frequency": FREQUENCY / 2},
        {"placement": Placement.hottest(FREQUENCY, np.array([1, 2]))},
        {"machine": replace(MACHINE, dram_bytes_per_second=3e9)},
        {"spec": replace(SPEC, name="other")},
        {"threshold": {"name": "balanced"}, "levels": LEVELS},
    ],
)
def test_whatever_differs_makes_another_plan(change):
    other = replace(PLAN, **change)
    assert other != PLAN
    assert other.fingerprint() != PLAN.fingerprint()


def test_readers_ignore_fields_that_they_do_not_know(saved):
    saved.write_text(json.dumps({**json.loads(TEXT), "comment": "by hand"}))
    assert Plan.load(saved) == PLAN


def test_a_plan_gives_policy_costs_and_thresholds():
    assert PLAN.costs == layer_costs(SPEC, MACHINE)
    assert PLAN.value_thresholds.tolist() == [0, 0]
    plan = replace(PLAN, cache={"name": "hot_predicted", "lam": 2.0})
    assert plan.policy == HotPredicted(lam=2.0)
    silu = replace(SPEC, activation="silu")
    assert replace(PLAN, spec=silu, thresholds=(0.5, 0.25)).value_thresholds.tolist() == [0.5, 0.25]
    fat = replace(PLAN, spec=replace(SPEC, activation="fatrelu", gate_threshold=0.25))
    assert fat.value_thresholds.tolist() == [0.25, 0.25]
    assert replace(fat, thresholds=(0.5, 0.25)).value_thresholds.tolist() == [0.5, 0.25]


# what is refused


def test_a_plan_is_a_json_file_in_a_directory(tmp_path):
    with refuses(f"plan file {tmp_path / 'plan'} must end in .json"):
        PLAN.save(tmp_path / "plan")
    path = tmp_path / "missing" / "plan.json"
    message = f"plan file {path} cannot be written: {path.parent} is no directory; make it first"
    with refuses(message):
        PLAN.save(path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_plan_is_named(tmp_path):
    path = tmp_path / "plan.json"
    with refuses(f"plan {path} does not exist; make one with `dinfer plan TRACE -o {path}`"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan {path} is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[1]", "{path} does not say format 'dinfer-plan'; it is not a plan of dinfer"),
        ('{"format": "x"}', "{path} does not say format 'dinfer-plan'; it is not a plan of dinfer"),
        (
            '{"format": "dinfer-plan", "version": 2}',
            "plan {path} has version 2, this dinfer reads up to 1; upgrade dinfer",
        ),
        (
            '{"format": "dinfer-plan"}',
            "plan {path} has version None, this dinfer reads up to 1; upgrade dinfer",
        ),
        (
            '{"format": "dinfer-plan", "version": 1}',
            "plan {path} lacks 'model'; make it again with `dinfer plan`",
        ),
    ],
)
def test_a_foreign_file_is_refused(saved, text, message):
    saved.write_text(text)
    with refuses(message.format(path=saved)):
        Plan.load(saved)


def test_a_binary_file_is_refused(saved):
    saved.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=f"^plan {re.escape(str(saved))} is not JSON "):
        Plan.load(saved)


@pytest.mark.parametrize("name", sorted(set(json.loads(TEXT)) - {"format", "version"}))
def test_every_field_is_needed(saved, name):
    saved.write_text(json.dumps({k: v for k, v in json.loads(TEXT).items() if k != name}))
    with pytest.raises(InputError, match="lacks|do not belong together"):
        Plan.load(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lookahead", 0),
        ("window", 3),
        ("context", 1024),
        ("batch", 2),
        ("vram", "8KiB"),
        ("cache", {"name": "lru"}),
        ("slots", [1, 2]),
        ("model_fingerprint", "0" * 16),
        ("machine_fingerprint", "0" * 16),
        ("fingerprint", "0" * 16),
        ("memory", {"neurons": 385}),
        ("trace", "abc"),
    ],
)
def test_an_edited_field_is_found(saved, name, value):
    saved.write_text(json.dumps({**json.loads(TEXT), name: value}))
    message = f"plan {saved} and its arrays do not belong together or were edited; make it again"
    with refuses(message):
        Plan.load(saved)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lookahead", 2, "lookahead is 2; it must be between 0 and 1 layers"),
        ("window", -1, "window is -1 neurons; it must be 0 or more, or left out to be sized"),
        ("activation", "guess", "activation 'guess' is not one of exact, predicted"),
        ("prediction", "crystal", "prediction 'crystal' is not one of oracle, previous, trained"),
        ("threshold", {"name": "magic"}, "threshold 'magic' is not one of fixed, balanced"),
        (
            "threshold",
            {"name": "balanced"},
            "threshold 'balanced' and levels do not belong together; plan again",
        ),
        ("issue", "mail", "issue 'mail' is not one of copy, block, gather"),
        ("group", 24, "group is 24 with issue gather, which moves all at once; leave it 1 or plan with copy"),
        ("group", 0, "group is 0 neurons; it must be between 1 and 64"),
        ("group", 1.5, "group is 1.5; it must be a whole number of neurons"),
        ("thresholds", [0.5], "thresholds has 1 values for 2 layers"),
        (
            "thresholds",
            [0.5, -0.5],
            "thresholds has -0.5, but tiny is a ReLU model whose gates are 0 up to 0; they can be raised only: give at "
            "least that, or leave them out",
        ),
        ("vram", "287B", "placement takes 288 B, its budget is 287 B; raise --vram"),
        (
            "vram",
            "much",
            "size 'much' is not a number with B, KB, MB, GB, KiB, MiB or GiB; write 8GiB or 8GB",
        ),
    ],
)
def test_a_bad_field_is_named(saved, name, value, message):
    saved.write_text(json.dumps({**json.loads(TEXT), name: value}))
    with refuses(message):
        Plan.load(saved)


@pytest.mark.parametrize("name", ["lookahead", "thresholds", "cache", "model", "machine", "memory"])
def test_a_field_of_a_wrong_type_is_refused(saved, name):
    saved.write_text(json.dumps({**json.loads(TEXT), name: 1.5 if name != "lookahead" else "one"}))
    with pytest.raises(InputError):
        Plan.load(saved)


def test_an_unknown_cache_is_refused():
    with refuses("cache 'mru' is not one of belady, hot_predicted, lfu, lru, random, s3fifo, static, time_saved"):
        _ = replace(PLAN, cache={"name": "mru"}).policy
    with refuses("cache lru has no parameter 'lam'; it has none"):
        _ = replace(PLAN, cache={"name": "lru", "lam": 1}).policy


def test_arrays_are_missed(saved):
    arrays = saved.with_suffix(".safetensors")
    arrays.unlink()
    message = (
        f"plan arrays {arrays} do not exist; a plan is its .json and the .safetensors beside it"
    )
    with refuses(message):
        Plan.load(saved)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_arrays_are_refused(saved, size):
    arrays = saved.with_suffix(".safetensors")
    arrays.write_bytes(arrays.read_bytes()[:size])
    with pytest.raises(InputError, match=rf"^plan arrays {re.escape(str(arrays))} cannot be read"):
        Plan.load(saved)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("resident", np.array([[5], [2]], np.uint64), None),
        ("resident", np.array([[9], [3]], np.uint64), None),
        ("frequency", FREQUENCY / 2, None),
        (
            "frequency",
            FREQUENCY[:1],
            "frequency has shape (1, 4); it must be (2, 4)",
        ),
        (
            "resident",
            np.zeros((3, 1), np.uint64),
            "placement has 3 layers of 4 neurons, tiny has 2 of 4; make the plan for this model",
        ),
    ],
)
def test_tampered_arrays_are_refused(saved, name, array, message):
    arrays = saved.with_suffix(".safetensors")
    save_file({**load_file(arrays), name: np.ascontiguousarray(array)}, arrays)
    edited = f"plan {saved} and its arrays do not belong together or were edited; make it again"
    with refuses(message or edited):
        Plan.load(saved)


def test_an_array_is_missed(saved):
    arrays = saved.with_suffix(".safetensors")
    save_file({"resident": PLACEMENT.resident}, arrays)
    with refuses(f"plan {saved} lacks 'frequency'; make it again with `dinfer plan`"):
        Plan.load(saved)


def test_a_plan_for_another_model_is_refused():
    other = replace(SPEC, name="other", hidden=16)
    message = (
        f"plan is for tiny ({SPEC.fingerprint()}), the model is other ({other.fingerprint()}); "
        "make a plan for this model with `dinfer plan`"
    )
    with refuses(message):
        PLAN.check_model(other)


def test_a_plan_for_other_weights_is_refused_where_both_are_known():
    plan = replace(PLAN, weights="abc")
    message = (
        "plan is for other weights of tiny (abc, the model has def); record these weights and "
        "plan again"
    )
    with refuses(message):
        plan.check_model(SPEC, "def")
    plan.check_model(SPEC, "abc")
    plan.check_model(SPEC)
    PLAN.check_model(SPEC, "def")


def test_name_and_dtype_do_not_make_another_model():
    PLAN.check_model(replace(SPEC, name="other"))
    PLAN.check_model(SPEC.with_dtype("float16"))
