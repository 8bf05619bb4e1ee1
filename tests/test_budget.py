"""Budgets: every byte has a term, and what does not fit is refused with its numbers."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dinfer.errors import InputError, PlanWarning
from dinfer.machine import Cost, Link, Machine, load_machine
from dinfer.model import ModelSpec, load_model
from dinfer.solve import budget
from dinfer.solve.budget import (
    activation_bytes,
    budget_for_share,
    check_speed,
    host_breakdown,
    kv_capacity,
    memory_breakdown,
    neuron_capacity,
    pinned_bytes,
    speed_ceiling,
    warn_when_everything_fits,
)
from dinfer.units import parse_bytes

GIB = 2**30
TERMS = ["context", "weights", "kv", "activations", "predictor", "margin", "neurons"]
SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=8,
    neurons=100,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=16,
    activation="relu",
    dtype="float32",
    compute_dtype="float32",
)


def machine(memory_bytes: int, context_bytes: int = 0, host_bytes: int = 10**12) -> Machine:
    device = {"context_bytes": context_bytes, "bytes_per_second": 1e9}
    link = {"name": "wire", "fixed_seconds": 0.0, "bytes_per_second": 1e9}
    return Machine.from_dict(
        {
            "name": "box",
            "gpu": {"name": "card", "memory_bytes": memory_bytes, **device},
            "cpu": {"name": "chip", "memory_bytes": host_bytes, "bytes_per_second": 1e9},
            "h2d": link,
            "d2h": link,
            "dram_bytes_per_second": 1e9,
        }
    )


def refuses(message: str):
    return pytest.raises(InputError, match=f"^{re.escape(message)}$")


def test_the_terms_of_a_small_model_by_hand():
    terms = memory_breakdown(SPEC, machine(100_000, 1_000), 10, 30_000, predictor_bytes=7)
    # per layer q and o 8 x 8, k and v 8 x 4; two embeddings of 16 x 8; five norms of 8; fp32
    weights = 4 * (2 * (2 * 8 * 8 + 2 * 8 * 4) + 2 * 16 * 8 + 5 * 8)
    # per token 3 x 8, attention 2 x 4 x (2 + 1), FFN 3 x 100; ten tokens, and 16 logits; fp32
    activations = 4 * (10 * (3 * 8 + 24 + 300) + 16)
    kv = 4 * 2 * 10 * (2 * 4)
    neurons = 30_000 - 1_000 - weights - kv - activations - 7 - 300
    assert list(terms.items()) == [
        ("context", 1_000),
        ("weights", weights),
        ("kv", kv),
        ("activations", activations),
        ("predictor", 7),
        ("margin", 300),
        ("neurons", neurons),
    ]
    assert neuron_capacity(SPEC, terms) == neurons // 96 == 118


def test_a_longer_prompt_is_prefilled_in_steps():
    assert activation_bytes(SPEC, 9) < activation_bytes(SPEC, 512)
    assert activation_bytes(SPEC, 512) == activation_bytes(SPEC, 100_000)
    assert activation_bytes(SPEC, 0) == activation_bytes(SPEC, 1)


@pytest.mark.parametrize("gib", [2, 8, 24, 48])
def test_budgets_are_64_bit(gib):
    """Case 6: an OPT-6.7B whose dense part is small enough for 2 GiB in int4."""
    spec = load_model("opt-6.7b").with_dtype("int4")
    card = machine(48 * GIB, context_bytes=256 * 2**20)
    terms = memory_breakdown(spec, card, 128, gib * GIB)
    assert list(terms) == TERMS
    assert sum(terms.values()) == gib * GIB
    assert all(isinstance(count, int) and count >= 0 for count in terms.values())
    held = neuron_capacity(spec, terms)
    assert held == min(terms["neurons"] // spec.neuron_bytes, 32 * 16_384)
    assert (held == 32 * 16_384) == (gib >= 8)


def test_powerinfers_13b_example_has_64_bits():
    spec = load_model("relullama-13b")
    assert neuron_capacity(spec, {"neurons": 13_357_166_592}) == 13_357_166_592 // 30_720 == 434_803


def test_a_budget_below_the_dense_part_names_each_term_and_the_next_that_fits():
    """Cases 6 and 16."""
    spec, card = load_model("llama-2-7b"), load_machine("pc-low")
    message = (
        "budget 2.00 GiB on RTX 2080 Ti is below the 6.40 GiB that context 1.59 GiB, weights "
        "4.49 GiB, KV 256.00 MiB, activations 60.37 MiB, predictor 0 B and margin 20.48 MiB need; "
        "raise --vram to 6.5GiB"
    )
    with refuses(message):
        memory_breakdown(spec, card, 512, 2 * GIB)
    assert memory_breakdown(spec, card, 512, parse_bytes("6.5GiB"))["neurons"] >= 0


def test_a_long_context_is_refused_with_the_longest_that_fits():
    spec, card = load_model("llama-2-7b"), load_machine("pc-low")
    message = (
        "budget 7.00 GiB on RTX 2080 Ti is below the 8.20 GiB that context 1.59 GiB, weights "
        "4.49 GiB, KV 2.00 GiB, activations 60.37 MiB, predictor 0 B and margin 71.68 MiB need; "
        "raise --vram to 8.3GiB or lower --context to 1630"
    )
    with refuses(message):
        memory_breakdown(spec, card, 4096, 7 * GIB)
    assert memory_breakdown(spec, card, 1630, 7 * GIB)["neurons"] >= 0
    with pytest.raises(InputError, match=r"^budget 7\.00 GiB on RTX 2080 Ti is below"):
        memory_breakdown(spec, card, 1631, 7 * GIB)


def test_a_model_beyond_the_gpu_is_refused_without_a_vain_remedy():
    message = (
        "budget 11.00 GiB on RTX 2080 Ti is below the 28.39 GiB that context 1.59 GiB, weights "
        "26.42 GiB, KV 160.00 MiB, activations 126.49 MiB, predictor 0 B and margin 112.64 MiB "
        "need; choose a smaller dtype or a GPU with more memory"
    )
    with refuses(message):
        memory_breakdown(load_model("llama-3.1-70b"), load_machine("pc-low"), 512, 11 * GIB)


def test_a_small_models_remedy_has_a_unit_that_shows_it():
    card = machine(100_000)
    message = (
        "budget 1000 B on card is below the 19.18 KiB that context 0 B, weights 2.66 KiB, KV "
        "640 B, activations 13.66 KiB, predictor 2.00 KiB and margin 250 B need; raise --vram "
        "to 19.2KiB"
    )
    with refuses(message):
        memory_breakdown(SPEC, card, 10, 1000, predictor_bytes=2048, margin_bytes=250)
    memory_breakdown(SPEC, card, 10, parse_bytes("19.2KiB"), 2048, margin_bytes=250)


@given(st.integers(0, 2000), st.integers(0, 1_000_000))
def test_the_remedies_of_a_refusal_work(context, vram):
    card = machine(2_000_000, 5_000)
    try:
        terms = memory_breakdown(SPEC, card, context, vram)
    except InputError as error:
        refusal = str(error)
    else:
        assert sum(terms.values()) == vram
        assert min(terms.values()) >= 0
        return
    wider = re.search(r"raise --vram to (\S+)", refusal)
    shorter = re.search(r"lower --context to (\d+)", refusal)
    assert wider or shorter or "choose a smaller dtype" in refusal
    if wider:
        memory_breakdown(SPEC, card, context, parse_bytes(wider[1]))
    if shorter:
        memory_breakdown(SPEC, card, int(shorter[1]), vram)


def test_a_budget_above_the_gpu_is_refused():
    message = (
        "budget 12.00 GiB is more than the 11.00 GiB of RTX 2080 Ti; lower --vram to 11GiB or "
        "name a machine with more"
    )
    with refuses(message):
        memory_breakdown(load_model("llama-2-7b"), load_machine("pc-low"), 512, 12 * GIB)


def test_kv_capacity_stays_below_what_was_measured():
    """Case 4: vLLM on an RTX 4090, nine tenths of its memory, Llama-3.1-8B in bf16."""
    spec, card = load_model("llama-3-8b"), load_machine("pc-high")
    spec = replace(spec, max_positions=131_072)
    vram = card.gpu.memory_bytes * 9 // 10
    naive = (vram - 2 * spec.parameters) // spec.kv_bytes(1) // 16 * 16
    assert (spec.parameters, spec.kv_bytes(1), naive) == (8_030_261_248, 131_072, 54_400)
    assert 0.94 * 41_408 <= kv_capacity(spec, card, vram) <= 41_408


def test_kv_capacity_ends_at_the_positions_and_at_nothing():
    assert kv_capacity(SPEC, machine(10**9), 10**9) == SPEC.max_positions
    assert kv_capacity(SPEC, machine(10**9), 10_000) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.505, 0.75, 0.999, 1.0])
@pytest.mark.parametrize("name", ["smollm2-135m", "opt-13b", "relullama-7b"])
def test_a_budget_for_a_share_holds_exactly_that_share(name, share):
    spec, card = load_model(name), machine(10**12, 3_000_001)
    wanted = -(-spec.layers * spec.neurons * round(share * 10**6) // 10**6)
    vram = budget_for_share(spec, card, share)
    held = neuron_capacity(spec, memory_breakdown(spec, card, 512, vram))
    assert held == pytest.approx(wanted, abs=1)
    assert held / (spec.layers * spec.neurons) >= share
    if held:
        assert neuron_capacity(spec, memory_breakdown(spec, card, 512, vram - 1)) == held - 1


def test_a_tenth_is_a_tenth():
    vram = budget_for_share(SPEC, machine(10**6), 0.1)
    assert neuron_capacity(SPEC, memory_breakdown(SPEC, machine(10**6), 512, vram)) == 20


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_is_between_0_and_1(share):
    with refuses(f"share of the neurons is {share}; it must be between 0 and 1"):
        budget_for_share(SPEC, machine(10**6), share)


def test_a_share_beyond_the_gpu_is_refused():
    with pytest.raises(InputError, match=r"^budget 1\d\.\d\d GiB is more than the 11\.00 GiB of "):
        budget_for_share(load_model("llama-2-7b"), load_machine("pc-low"), 0.9)


def test_it_warns_when_everything_fits():
    """Case 9."""
    spec, card = load_model("llama-2-7b"), load_machine("pc-high")
    message = (
        "all of llama-2-7b fits on RTX 4090 with 9.31 GiB to spare: the plan keeps every neuron "
        "there; offloading what fits costs up to 19x"
    )
    with pytest.warns(PlanWarning, match=f"^{re.escape(message)}$"):
        assert warn_when_everything_fits(spec, card, memory_breakdown(spec, card, 512, 24 * GIB))
    partly = memory_breakdown(spec, card, 512, 12 * GIB)
    assert not warn_when_everything_fits(spec, card, partly)
    assert neuron_capacity(spec, partly) < spec.layers * spec.neurons


def test_torch_pins_powers_of_two():
    """Case 2."""
    assert pinned_bytes(2_236_817_408) == 4 * GIB
    assert [pinned_bytes(n) for n in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


def test_the_host_holds_one_slab():
    spec = load_model("llama-2-7b")  # 32 x 11,008 x 24,576 B = 8.06 GiB
    assert host_breakdown(spec, machine(GIB, host_bytes=10 * GIB)) == {
        "slab": spec.ffn_bytes,
        "rounding": 0,
        "left": 10 * GIB - spec.ffn_bytes,
    }
    message = (
        "the neurons of llama-2-7b take 16.00 GiB of host memory (slab 8.06 GiB, rounding 7.94 "
        "GiB), chip has 10.00 GiB; choose a smaller dtype or a machine with more memory"
    )
    with refuses(message):
        host_breakdown(spec, machine(GIB, host_bytes=10 * GIB), rounded=True)


def test_a_speed_above_the_links_ceiling_is_refused_with_the_arithmetic():
    """Case 5: 64 streamed layers of 0.42 GiB over 10.53 GiB/s."""
    wire = Link("PCIe 3.0 x16", 0.0, 10.53 * GIB)
    box = replace(machine(GIB), h2d=wire)
    token_bytes = round(64 * 0.42 * GIB)
    assert speed_ceiling(box, token_bytes) == pytest.approx(0.3917, abs=1e-4)
    check_speed(box, token_bytes, 0.39)
    message = (
        "5 tok/s is above the ceiling of PCIe 3.0 x16: it moves 10.53 GiB/s and a token needs "
        "26.88 GiB, so 0.39 tok/s at most; 5 tok/s allows 2.11 GiB a token; stream less or ask "
        "for less"
    )
    with refuses(message):
        check_speed(box, token_bytes, 5)


@pytest.mark.parametrize("threads", [8, 16, 64])
def test_threads_do_not_pass_the_bandwidth(threads):
    """Case 17: 32 GB a token at 40 GB/s are 1.25 tok/s, whatever the threads."""
    cpu = Cost(bytes_per_second=40e9, flops_per_second=threads * 50e9)
    assert 1 / cpu.seconds(32e9, flops=32e9) == pytest.approx(1.25)


def test_the_margin_is_a_hundredth():
    assert budget.MARGIN_PARTS == 100
    assert [budget._with_margin(n) for n in (0, 1, 98, 99, 100, 198, 199)] == [
        *(0, 1, 98, 99),
        *(101, 199, 201),
    ]
