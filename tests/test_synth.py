"""Synthetic traces: the knobs in closed form, and how near each preset comes to what is published."""

import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from test_cli import dinfer, refused

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec, load_model
from dinfer.record.presets import (
    DOMAINS,
    MODELS,
    PRESETS,
    Target,
    conflicts,
    expected,
    fit,
    fit_mismatch,
    preset,
    profile_coverage,
    reached,
    targets,
)
from dinfer.record.stats import stats
from dinfer.record.synth import Statistics, profile, statistics_of, synth
from dinfer.trace import Trace, decode_levels

FLAT = Statistics(density=0.3, popularity_sd=0.0, sequence_sd=0.0, persistence=0.0)
MIXED = Statistics(density=0.2, popularity_sd=1.5, sequence_sd=0.9, persistence=0.3, depth=1.0, token_sd=0.2)


def shape(layers=4, neurons=2048):
    """A model of which only layers and neurons count."""
    return ModelSpec("tiny", "llama", layers, 64, neurons, 1, 1, 64, 64, activation="relu")


def members(trace):
    """Bool [token, layer, neuron]."""
    return bits.unpack(trace.active, trace.spec.neurons)


def sequence_members(trace):
    """Float [sequence, token, layer, neuron] of sequences of equal length."""
    count = trace.tokens["sequence"].nunique()
    whole = members(trace).astype(np.float32)
    return whole.reshape(count, -1, *whole.shape[1:])


def table(trace):
    """The rows of ``reached`` by quantity."""
    return reached(trace).set_index("quantity")


# What is drawn


@pytest.mark.parametrize("density", [0.002, 0.03, 0.3302, 0.5, 0.97])
@pytest.mark.parametrize("persistence", [0.0, 0.6])
def test_a_neuron_is_active_as_often_as_it_should(density, persistence):
    """Without effects every neuron has the density; persistence does not move it, only widens the error."""
    trace = synth(shape(), replace(FLAT, density=density, persistence=persistence), 512, 8)
    draws = 512 * 4 * 2048 * (1 - persistence) / (1 + persistence)
    error = np.sqrt(density * (1 - density) / draws)
    assert members(trace).mean() == pytest.approx(density, abs=4 * error)


@pytest.mark.parametrize("knobs", [MIXED, replace(MIXED, sequence_sd=3.0), replace(MIXED, density=0.03)])
def test_density_by_layer(knobs):
    """The effects are strong and not symmetric in probability; the offset of each layer makes up for them."""
    trace = synth(shape(), knobs, 1024, 16)
    wanted = knobs.layer_density(4)
    assert wanted.mean() == pytest.approx(knobs.density, rel=1e-9)
    assert np.log(wanted[0] / (1 - wanted[0])) - np.log(wanted[3] / (1 - wanted[3])) == pytest.approx(1.0)
    assert np.allclose(trace.density, wanted, rtol=0.03)


def test_each_neuron_has_its_own_probability():
    """Of a long sequence the frequencies are binomial around the profile, which is exact without mismatch."""
    knobs = Statistics(density=0.2, popularity_sd=2.0, sequence_sd=0.0, persistence=0.0)
    trace, chance = synth(shape(2, 1000), knobs, 4096, 1), profile(shape(2, 1000), knobs)
    assert chance.dtype == np.float32
    assert chance.shape == (2, 1000)
    deviation = (trace.frequency - chance) / np.sqrt(chance * (1 - chance) / 4096)
    assert abs(deviation.mean()) < 0.1
    assert deviation.std() == pytest.approx(1.0, abs=0.06)
    assert np.sort(chance[0]) == pytest.approx(np.sort(chance[1]))
    assert not np.allclose(chance[0], chance[1])


@pytest.mark.parametrize("persistence", [0.0, 0.203, 0.588, 0.95])
@pytest.mark.parametrize("density", [0.05, 0.5])
def test_persistence_in_closed_form(density, persistence):
    """Tokens k apart agree with r^k + (1 - r^k) (p^2 + (1 - p)^2): their correlation is r^k."""
    trace = synth(shape(), replace(FLAT, density=density, persistence=persistence), 1024, 4)
    state = sequence_members(trace)
    for lag in (1, 2, 5):
        kept = persistence**lag
        wanted = kept + (1 - kept) * (density**2 + (1 - density) ** 2)
        assert (state[:, lag:] == state[:, :-lag]).mean() == pytest.approx(wanted, abs=2e-3)


def test_sequences_begin_with_a_fresh_draw():
    """Nothing is carried over from one sequence to the next, and the first token has the density too."""
    state = sequence_members(synth(shape(), replace(FLAT, persistence=0.9), 512, 32))
    assert state[:, 0].mean() == pytest.approx(0.3, abs=5e-3)
    assert (state[1:, 0] == state[:-1, -1]).mean() == pytest.approx(0.3**2 + 0.7**2, abs=5e-3)


def test_draws_are_independent():
    """No trace of the counter: neighbours in token, layer, neuron, word and sequence do not correlate."""
    state = sequence_members(synth(shape(), replace(FLAT, density=0.5), 256, 2)) * 2 - 1
    pairs = [
        (state[1:], state[:-1]),
        (state[:, 1:], state[:, :-1]),
        (state[:, :, 1:], state[:, :, :-1]),
        *[(state[..., lag:], state[..., :-lag]) for lag in (1, 2, 32, 63, 64, 65, 128)],
    ]
    for a, b in pairs:
        assert abs((a * b).mean()) < 4.5 / np.sqrt(a.size)


def test_the_token_effect_moves_all_neurons_together():
    """Active counts vary far more than independent draws would: p (1 - p) times the effect's spread."""
    knobs = Statistics(density=0.17, popularity_sd=0.0, sequence_sd=0.0, persistence=0.0, token_sd=0.16)
    share = members(synth(shape(), knobs, 2048, 4)).mean(axis=(1, 2))
    assert share.mean() == pytest.approx(0.17, abs=2e-3)
    assert share.std() == pytest.approx(0.17 * 0.83 * 0.16, rel=0.1)


def test_bits_past_the_last_neuron_are_0():
    trace = synth(shape(3, 70), replace(MIXED, density=0.9), 64, 2)
    assert trace.active.shape == (64, 3, 2)
    assert not (trace.active[..., 1] >> np.uint64(6)).any()


# Nothing but seed, sequence, position, layer and neuron counts


def test_chunks_do_not_matter():
    whole = synth(shape(2, 300), MIXED, 100, 3, seed=5, levels=True)
    for chunk in (1, 7, 1000):
        again = synth(shape(2, 300), MIXED, 100, 3, seed=5, levels=True, chunk=chunk)
        assert np.array_equal(again.active, whole.active)
        assert np.array_equal(again.score, whole.score)
        assert np.array_equal(again.contribution, whole.contribution)


def test_more_tokens_and_sequences_only_append():
    few, many = synth(shape(2, 300), MIXED, 60, 3), synth(shape(2, 300), MIXED, 120, 4)
    for number in range(3):
        longer = many.sequence(number).active
        assert np.array_equal(few.sequence(number).active, longer[:20])


def test_the_seed_matters_and_an_equal_one_gives_the_same():
    a, b, c = (synth(shape(2, 300), MIXED, 50, 2, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(a.active, b.active)
    assert (members(a) == members(c)).mean() < 0.9
    assert a.fingerprint != c.fingerprint


def test_the_stream_is_pinned():
    """Golden counts elsewhere rest on these draws; a change of the generator is a change of format."""
    trace = synth(shape(3, 200), MIXED, 96, 2, seed=7)
    assert bits.count(trace.active).sum(axis=0).tolist() == [5490, 3581, 2336]
    assert trace.fingerprint == "3e3489f30fa307b3"


def test_on_disk_as_in_memory(tmp_path):
    told = []
    kept = synth(shape(2, 300), MIXED, 100, 3, levels=True)
    synth(shape(2, 300), MIXED, 100, 3, out=tmp_path / "t", levels=True, progress=lambda *at: told.append(at))
    loaded = Trace.load(tmp_path / "t")
    assert loaded.meta == kept.meta
    assert loaded.tokens.equals(kept.tokens.astype(loaded.tokens.dtypes))
    for name in ("active", "score", "contribution"):
        assert np.array_equal(getattr(loaded, name), getattr(kept, name))
    assert told[-1] == (100, 100)
    assert told == sorted(told)


def test_memory_does_not_grow_with_a_trace_on_disk(tmp_path):
    """What is held are a sequence's probabilities and one chunk, whatever is written."""
    spec, peaks = shape(4, 8192), []
    for tokens in (128, 2048):
        tracemalloc.start()
        synth(spec, FLAT, tokens, 1, out=tmp_path / str(tokens))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / "2048" / "active.bin").stat().st_size == 2048 * 4 * 1024
    assert peaks[1] < peaks[0] + 1e6


# Rows


def test_rows_and_phases():
    """Decoding starts after the prompt, whose rows come only when asked for; lengths differ by 1 at most."""
    tokens = synth(shape(1, 64), FLAT, 7, 3).tokens
    assert tokens["sequence"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert tokens["position"].tolist() == [64, 65, 66, 64, 65, 64, 65]
    assert set(tokens["phase"]) == {"decode"}
    trace = synth(shape(1, 64), FLAT, 4, 2, prompt=3, prefill=True)
    assert trace.tokens["position"].tolist() == [0, 1, 2, 3, 4] * 2
    assert trace.tokens["phase"].tolist() == (["prefill"] * 3 + ["decode"] * 2) * 2
    assert len(trace.phase("decode")) == 4
    assert synth(shape(1, 64), FLAT, 300).tokens["sequence"].nunique() == 3


def test_a_synthetic_trace_says_so(tmp_path):
    trace = synth(shape(1, 64), preset("relullama-7b"), 10, seed=3, out=tmp_path / "t")
    assert trace.synthetic
    assert trace.summary().loc[0, "kind"] == "synthetic"
    made = trace.meta
    assert (made["kind"], made["preset"], made["model"], made["seed"]) == (
        "synthetic",
        "relullama-7b",
        "tiny",
        3,
    )
    assert statistics_of(trace) == PRESETS["relullama-7b"]


def test_only_a_drawn_trace_has_knobs():
    trace = replace(synth(shape(1, 64), FLAT, 4), meta={"kind": "recorded"})
    with pytest.raises(InputError) as caught:
        statistics_of(trace)
    assert str(caught.value) == "trace of tiny is not drawn from statistics; it has no knobs"


def test_levels_grow_with_a_neuron_s_popularity():
    """0 for the inactive and only for them; scores are lognormal, and stronger neurons contribute more."""
    spec = shape(1, 2048)
    knobs = Statistics(density=0.3, popularity_sd=1.5, sequence_sd=0.0, persistence=0.0)
    trace = synth(spec, knobs, 256, 1, levels=True)
    active = members(trace)
    for name in ("score", "contribution"):
        codes = getattr(trace, name)
        assert ((codes > 0) == active).all()
        assert (codes == 255).mean() < 1e-3
        value = np.log(decode_levels(codes, trace.meta[f"{name}_scale"][0])[active])
        popular = np.broadcast_to(profile(spec, knobs) > 0.5, active.shape)[active]
        rare = np.broadcast_to(profile(spec, knobs) < 0.1, active.shape)[active]
        assert value[popular].mean() > value[rare].mean() + 0.5
    assert synth(spec, knobs, 4).score is None


# Knobs


KNOBS = {
    "popularity_sd": 0.7,
    "sequence_sd": 2.0,
    "persistence": 0.8,
    "token_sd": 0.0,
    "depth": -2.0,
    "mismatch": 0.9,
}


@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_moves_the_density(knob):
    frame = stats(synth(shape(), replace(MIXED, **{knob: KNOBS[knob]}), 1024, 16))
    assert frame["density"].mean() == pytest.approx(MIXED.density, rel=0.02)


def test_what_each_knob_moves():
    """Popularity the coverage, the sequence effect the hot sets, persistence the neighbours and only them."""
    before = stats(synth(shape(), MIXED, 1024, 8)).mean()
    popular = stats(synth(shape(), replace(MIXED, popularity_sd=2.5), 1024, 8)).mean()
    assert popular["coverage_40"] > before["coverage_40"] + 0.08
    assert popular["jaccard_hot"] < before["jaccard_hot"] - 0.1
    sequence = stats(synth(shape(), replace(MIXED, sequence_sd=2.0), 1024, 8)).mean()
    assert sequence["jaccard_hot"] > before["jaccard_hot"] + 0.1
    lasting = stats(synth(shape(), replace(MIXED, persistence=0.6), 1024, 8)).mean()
    assert lasting["jaccard_adjacent"] < before["jaccard_adjacent"] - 0.1
    assert lasting["jaccard_independent"] == pytest.approx(before["jaccard_independent"], abs=0.01)
    assert lasting["coverage_40"] == pytest.approx(before["coverage_40"], abs=0.01)


def test_mismatch_is_of_the_profile_alone():
    spec = shape(2, 4096)
    apart = replace(MIXED, mismatch=1.0)
    assert np.array_equal(synth(spec, apart, 64, 2).active, synth(spec, MIXED, 64, 2).active)
    same, other = profile(spec, MIXED), profile(spec, apart)
    assert np.corrcoef(same[0], other[0])[0, 1] == pytest.approx(0, abs=0.06)
    half = profile(spec, replace(MIXED, mismatch=0.6))
    assert np.corrcoef(same[0], half[0])[0, 1] == pytest.approx(0.8, abs=0.06)
    assert np.sort(half[0]) == pytest.approx(np.sort(same[0]), abs=0.05)


@pytest.mark.parametrize("mismatch", [0.0, 0.7, 1.0])
def test_what_a_static_placement_by_the_profile_serves(mismatch):
    """Measured on the trace as predicted; an unrelated profile serves as much as it holds."""
    spec, knobs = shape(), replace(MIXED, mismatch=mismatch)
    hottest = np.argsort(-profile(spec, knobs), axis=1)[:, : int(0.3 * 2048)]
    frequency = synth(spec, knobs, 1024, 16).frequency
    served = np.take_along_axis(frequency, hottest, 1).sum(axis=1) / frequency.sum(axis=1)
    assert served.mean() == pytest.approx(profile_coverage(knobs, layers=4), abs=0.02)
    if mismatch == 1:
        assert served.mean() == pytest.approx(0.3, abs=0.02)


def test_the_expected_quantities_are_those_of_a_long_trace():
    """Quadrature against 4,096 tokens of 32 sequences: each closed form within the sampling error."""
    wanted = expected(MIXED, 4)
    shown = table(synth(shape(), MIXED, 4096, 32))["reached"]
    assert set(shown.index) == set(wanted)
    assert table(synth(shape(), MIXED, 10, 2))["endless"].to_dict() == pytest.approx(wanted)
    for name, value in wanted.items():
        assert shown[name] == pytest.approx(value, rel=0.02), name


def test_windows_against_plain_sets():
    """New: in none of the four before; held: in any of four. Tokens without four before them do not count."""
    trace = synth(shape(2, 200), replace(MIXED, persistence=0.6), 30, 3)
    new = held = whole = 0
    for number in range(3):
        active = [set(np.flatnonzero(row)) for row in members(trace.sequence(number)).reshape(10, -1)]
        for t in range(4, 10):
            before = set().union(*active[t - 4 : t])
            new, held, whole = new + len(active[t] - before), held + len(before), whole + len(active[t])
    shown = table(trace)["reached"]
    assert shown["window_new"] == pytest.approx(new / whole)
    assert shown["window_held"] == pytest.approx(held / whole)


# Presets


MISSED = {
    "relullama-7b": {"coverage_40", "jaccard_adjacent"},
    "relullama-13b": {"coverage_40", "jaccard_adjacent"},
    "relullama-70b": set(),
    "prosparse-7b": set(),
    "prosparse-13b": set(),
    "opt-6.7b": {"window_held"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_reaches_its_targets(name):
    """Within 1% of the range, but for those that exclude one another; the missed ones are named here."""
    # OPT's layers differ, and a rare neuron's frequency needs many tokens.
    layers, tokens = (8, 16_384) if name == "opt-6.7b" else (4, 4096)
    shown = table(synth(shape(layers), preset(name), tokens))
    with_target = shown[shown["low"].notna()]
    assert set(with_target.index) == {target.quantity for target in targets(name)}
    assert set(with_target.index[with_target["met"] == "no"]) == MISSED[name]
    assert (with_target["source"] != "").all()
    assert (shown.loc[shown["low"].isna(), "met"] == "").all()
    assert (shown["lowest_layer"] <= shown["reached"]).all()
    assert (shown["reached"] <= shown["highest_layer"]).all()


def test_the_compromise_of_relullama():
    """The published distance and coverage exclude one another at 33% active; the fit lies between them."""
    shown = table(synth(shape(), preset("relullama-7b"), 4096, 32))["reached"]
    assert shown["coverage_40"] == pytest.approx(0.675, abs=0.01)
    assert shown["jaccard_adjacent"] == pytest.approx(0.651, abs=0.01)
    assert conflicts(targets("relullama-7b")) == [
        "top 40% covering 77% at density 0.330 puts adjacent tokens at most 0.650 apart, the target begins "
        "at 0.70: they cannot be met together"
    ]
    assert [name for name in MODELS if conflicts(targets(name))] == ["relullama-7b"]


def test_the_proof_of_a_conflict_is_tight():
    """Two kinds of neurons, each with one probability, come to the bound: no activity goes beyond it."""
    chance = np.where(np.arange(1000) < 400, 0.3302 * 0.77 / 0.4, 0.3302 * 0.23 / 0.6)
    state = np.random.default_rng(0).random((400, 1, 1000)) < chance
    trace = replace(synth(shape(1, 1000), FLAT, 400, 1), active=bits.pack(state))
    frame = stats(trace)
    assert frame["coverage_40"][0] == pytest.approx(0.77, abs=0.005)
    assert frame["jaccard_adjacent"][0] == pytest.approx(0.650, abs=0.005)


@pytest.mark.parametrize("name", DOMAINS)
def test_a_domain_shifts_the_density_only(name):
    for domain, sparsity in DOMAINS[name].items():
        knobs = preset(name, domain)
        assert knobs.density == pytest.approx(1 - sparsity / 100)
        assert replace(knobs, density=PRESETS[name].density, domain="mixed") == PRESETS[name]
    assert DOMAINS[name]["mixed"] == MODELS[name][0]
    shown = table(synth(shape(), preset(name, "wiki"), 1024))
    assert shown.loc["density", "met"] == "yes"
    assert shown.loc["density", "source"] == "ProSparse Table 8, wiki"


def test_presets_are_of_catalogue_models():
    for name, knobs in PRESETS.items():
        assert load_model(name).name == knobs.preset == name
        assert knobs.domain == "mixed"
        assert knobs.density == pytest.approx(1 - MODELS[name][0] / 100)
        if name != "opt-6.7b":
            assert profile_coverage(knobs) == pytest.approx(0.47, abs=0.003)


def test_a_family_stands_for_the_model_s_preset():
    assert preset("relullama") == PRESETS["relullama-7b"]
    assert preset("relullama", model="relullama-70b") == PRESETS["relullama-70b"]
    assert preset("opt", model="relullama-70b") == PRESETS["opt-6.7b"]


def test_fitting_finds_the_knobs_again():
    """Targets computed from known knobs lead back to them, from a start far away."""
    known = Statistics(density=0.15, popularity_sd=1.2, sequence_sd=0.8, persistence=0.4)
    shown = expected(known)
    names = ("density", "coverage_40", "jaccard_adjacent")
    wanted = [Target(name, shown[name], shown[name], "known") for name in names]
    found = fit(wanted, replace(known, popularity_sd=2.0, persistence=0.1), ("popularity_sd", "persistence"))
    assert found.popularity_sd == pytest.approx(1.2, abs=0.01)
    assert found.persistence == pytest.approx(0.4, abs=0.01)
    assert found.density == pytest.approx(0.15, abs=1e-3)
    assert profile_coverage(fit_mismatch(known, 0.5)) == pytest.approx(0.5, abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relullama-7b", "prosparse-7b"])
def test_the_presets_are_what_the_fit_gives(name):
    found = fit(targets(name), PRESETS[name])
    for knob in ("popularity_sd", "sequence_sd", "persistence"):
        assert getattr(found, knob) == pytest.approx(getattr(PRESETS[name], knob), abs=0.02)


@pytest.mark.slow
def test_a_thousand_tokens_of_the_7b_shape_take_seconds():
    spec = load_model("relullama-7b")
    synth(spec, preset("relullama-7b"), 2, 1)  # compile
    started = time.perf_counter()
    trace = synth(spec, preset("relullama-7b"), 1024)
    assert time.perf_counter() - started < 10
    assert trace.active.shape == (1024, 32, 172)


# Refusals


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: preset("llama"),
            "preset 'llama' is not one of relullama-7b, relullama-13b, relullama-70b, prosparse-7b, "
            "prosparse-13b, opt-6.7b",
        ),
        (
            lambda: preset("prosparse-7b", "poems"),
            "domain 'poems' has no published density for prosparse-7b; it has mixed, starcoder, wiki, pile, "
            "ultrachat, p3, paq, flan, unnatural, super-ni",
        ),
        (
            lambda: preset("relullama-70b", "wiki"),
            "domain 'wiki' has no published density for relullama-70b; it has mixed",
        ),
        (lambda: replace(FLAT, density=1.0), "density is 1.0; it must be between 0 and 1"),
        (lambda: replace(FLAT, sequence_sd=-1.0), "sequence_sd is -1.0; it must be between 0 and 20"),
        (lambda: replace(FLAT, depth=30.0), "depth is 30.0; it must be between -20 and 20"),
        (lambda: replace(FLAT, persistence=1.0), "persistence is 1.0; it must be at least 0 and below 1"),
        (lambda: replace(FLAT, mismatch=1.5), "mismatch is 1.5; it must be between 0 and 1"),
        (lambda: synth(shape(), FLAT, 0), "tokens is 0; it must be at least 1"),
        (lambda: synth(shape(), FLAT, 3, 4), "sequences is 4; it must be between 1 and the 3 tokens"),
        (lambda: synth(shape(), FLAT, 3, seed=-1), "seed is -1; it must be at least 0 and below 2**63"),
        (lambda: synth(shape(), FLAT, 3, prompt=-1), "prompt is -1; it must be at least 0 tokens"),
        (lambda: synth(shape(), FLAT, 3, chunk=0), "chunk is 0; it must be at least 1 token"),
        (
            lambda: fit([Target("speed", 1, 2, "")], FLAT),
            "target 'speed' is not one of density, coverage_20, coverage_40, share_80, jaccard_adjacent, "
            "jaccard_independent, jaccard_hot, window_new, window_held",
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_value_and_the_rule(call, text):
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == text


def test_an_existing_directory_is_not_overwritten(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"):
        synth(shape(1, 64), FLAT, 4, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# Command line


def test_the_command(tmp_path):
    out, err = dinfer("synth", "smollm2-135m", "--preset", "prosparse-7b", "--domain", "wiki", "--tokens", 40,
                      "--seed", 3, "--sequences", 4, "-o", tmp_path / "t")  # fmt: skip
    trace = Trace.load(tmp_path / "t")
    assert (trace.spec.name, len(trace), trace.tokens["sequence"].nunique()) == ("smollm2-135m", 40, 4)
    assert (trace.meta["preset"], trace.meta["statistics"]["domain"], trace.meta["seed"]) == (
        "prosparse-7b",
        "wiki",
        3,
    )
    assert "| synthetic |" in out
    assert "| density             | 0.1567 | 0.1567 |" in out
    assert err.endswith(f"synthetic: {tmp_path / 't'} is drawn from published statistics, no model ran\n")


def test_the_command_refuses_before_it_writes(tmp_path):
    at = tmp_path / "t"
    line = refused("synth", "--tokens", 4, "-o", at)
    assert line == "neither MODEL nor --preset given; give one, such as --preset relullama-7b"
    assert refused("synth", "smollm2-135m", "--tokens", 4, "-o", at).startswith(
        "preset 'smollm2-135m' is not one of"
    )
    assert refused("synth", "--preset", "opt", "--domain", "wiki", "--tokens", 4, "-o", at) == (
        "domain 'wiki' has no published density for opt-6.7b; it has mixed"
    )
    assert (
        refused("synth", "--preset", "opt", "--tokens", 0, "-o", at) == "tokens is 0; it must be at least 1"
    )
    assert not at.exists()


def test_synth_loads_no_torch():
    code = "import sys, dinfer.record.presets; print({'torch', 'matplotlib', 'pulp'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
