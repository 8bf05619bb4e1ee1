"""Locality figures against plain loops over sets, on traces whose answer is known."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.record.stats import plot_stats, stats
from dinfer.trace import Trace

SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=5,
    hidden=8,
    neurons=70,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=8,
    activation="relu",
)


def make(members, sequences=None, phase="decode", hidden=None):
    """A trace of bool ``members`` [token, layer, neuron]; positions count up in each sequence."""
    sequence = np.zeros(len(members), int) if sequences is None else np.asarray(sequences)
    table = pd.DataFrame({"id": 0, "sequence": sequence, "phase": phase})
    table["position"] = table.groupby("sequence").cumcount()
    return Trace(SPEC, table, bits.pack(members), {}, hidden=hidden)


def random_members(tokens, seed=0):
    """Independent draws with skewed frequencies, other ones in each layer."""
    random = np.random.default_rng(seed)
    frequency = random.beta(0.6, 1.4, (SPEC.layers, SPEC.neurons))
    return random.random((tokens, SPEC.layers, SPEC.neurons)) < frequency


def distance(a, b):
    """Jaccard distance of two sets."""
    return 1 - len(a & b) / len(a | b) if a | b else 0.0


def sets(members, layer):
    """The active set of each token in a layer."""
    return [set(np.flatnonzero(row)) for row in members[:, layer]]


def test_every_figure_equals_a_plain_loop():
    """Chunks, words and popcounts are for speed:
    each column is recomputed with Python sets and sorted lists."""
    members = random_members(200)
    frame = stats(make(members))
    for layer in range(SPEC.layers):
        row, active = frame.loc[layer], sets(members, layer)
        counts = np.sort(members[:, layer].sum(axis=0))[::-1]
        assert row["density"] == pytest.approx(members[:, layer].mean())
        assert row["coverage_20"] == pytest.approx(counts[:14].sum() / counts.sum())
        assert row["coverage_40"] == pytest.approx(counts[:28].sum() / counts.sum())
        needed = next(n for n in range(1, 71) if counts[:n].sum() >= 0.8 * counts.sum())
        assert row["share_80"] == pytest.approx(needed / 70)
        neighbours = [distance(a, b) for a, b in pairwise(active)]
        assert row["jaccard_adjacent"] == pytest.approx(np.mean(neighbours))
        pairs = [(a, b) for i, a in enumerate(active) for b in active[:i]]
        shared, union = (np.mean([len(op(a, b)) for a, b in pairs]) for op in (set.__and__, set.__or__))
        assert row["jaccard_independent"] == pytest.approx(1 - shared / union)


def test_independent_draws_show_no_locality():
    """The skew of frequencies alone makes neighbours alike;
    beside the baseline with the same skew nothing is left."""
    frame = stats(make(random_members(3000)))
    assert np.allclose(frame["jaccard_adjacent"], frame["jaccard_independent"], atol=0.01)


def test_persistence_shows_beside_the_baseline():
    """Each set kept for five tokens has the same frequencies, so only the adjacent distance falls."""
    members = np.repeat(random_members(600), 5, axis=0)
    frame = stats(make(members))
    assert (frame["jaccard_adjacent"] < 0.3 * frame["jaccard_independent"]).all()


def test_the_baseline_does_not_lean_on_few_tokens():
    """Of 20 tokens the mean p squared is too high by chance;
    counting pairs of distinct tokens is right on average."""
    few = np.mean([stats(make(random_members(20_000)[i * 20 :][:20]))["jaccard_independent"] for i in range(40)])
    many = stats(make(random_members(20_000)))["jaccard_independent"].mean()
    assert few == pytest.approx(many, abs=0.01)


def test_neighbours_are_of_one_sequence():
    """Two sequences that alternate in the file are each walked by position,
    and no pair crosses from one to the other."""
    members = np.zeros((6, SPEC.layers, 70), bool)
    members[0::2, :, :10] = True
    members[1::2, :, 40:60] = True
    trace = make(members, [0, 1, 0, 1, 0, 1])
    trace.tokens.loc[1::2, "position"] += 3  # goes on where the other one ends
    frame = stats(trace)
    assert (frame["jaccard_adjacent"] == 0).all()
    assert (frame["jaccard_hot"] == 1).all()


def test_a_gap_in_positions_is_no_neighbourhood():
    """Tokens with a prefill chunk between them are not adjacent."""
    trace = make(random_members(2))
    trace.tokens["position"] = [3, 5]
    assert stats(trace)["jaccard_adjacent"].isna().all()


def test_hot_sets_are_the_most_active_of_a_sequence():
    """Two sequences share 7 of 14 hot neurons: 7 of 21 are in both, a distance of two thirds."""
    members = np.zeros((40, SPEC.layers, 70), bool)
    members[:20, :, :14] = members[20:, :, 7:21] = True
    members[[0, 20], :, 50:] = True  # once is not hot
    frame = stats(make(members, [0] * 20 + [1] * 20))
    assert np.allclose(frame["jaccard_hot"], 2 / 3)
    assert stats(make(members))["jaccard_hot"].isna().all()


def test_phase_is_chosen():
    """A system prompt that all sequences share must not count as locality: prefill is left out."""
    members = random_members(100)
    members[:50] = True
    trace = make(members, phase=["prefill"] * 50 + ["decode"] * 50)
    assert stats(trace)["density"].max() < 0.6
    assert stats(trace, phase=None)["density"].min() > 0.5
    assert (stats(trace, phase="prefill")["density"] == 1).all()
    with pytest.raises(InputError) as caught:
        stats(trace.phase("prefill"))
    assert str(caught.value) == "trace of tiny has 0 tokens of phase 'decode'; take another"


def test_residual_cosine_between_layers():
    """Layers turned by 90 degrees each: 1 apart is 0, 2 apart is -1, 4 apart is 1, and the last have none."""
    turn = np.array([[0, -1], [1, 0]])
    hidden = np.zeros((70, SPEC.layers, 8), np.float16)
    vector = np.array([3, 4])
    for layer in range(SPEC.layers):
        hidden[:, layer, :2] = vector * (layer + 1)
        vector = turn @ vector
    frame = stats(make(random_members(70), hidden=hidden))
    for lag, cosine in ((1, 0.0), (2, -1.0), (4, 1.0)):
        given = frame[f"cosine_{lag}"]
        assert np.allclose(given[:-lag], cosine, atol=1e-6)
        assert given[-lag:].isna().all()
    assert stats(make(random_members(5)))[["cosine_1", "cosine_2", "cosine_4"]].isna().all(axis=None)


def test_dead_layers_and_single_tokens_have_figures_or_nan():
    """Nothing active, or nothing to compare with, is told as such and divides by no zero."""
    frame = stats(make(np.zeros((10, SPEC.layers, 70), bool), [0] * 5 + [1] * 5))
    assert (frame["density"] == 0).all()
    assert frame[["coverage_20", "coverage_40", "share_80"]].isna().all(axis=None)
    assert (frame[["jaccard_adjacent", "jaccard_independent", "jaccard_hot"]] == 0).all(axis=None)
    single = stats(make(random_members(1)))
    assert single[["jaccard_adjacent", "jaccard_independent", "jaccard_hot"]].isna().all(axis=None)


def test_the_recorded_trace_of_the_repository():
    """traces/smollm2-small is the real model at 60% sparsity: 40% active,
    and adjacent tokens nearer to each other than independent draws."""
    trace = Trace.load(Path(__file__).parents[1] / "traces" / "smollm2-small")
    frame = stats(trace)
    assert trace.spec.layers == len(frame) == 30
    assert frame["density"].mean() == pytest.approx(0.4, abs=0.03)
    assert (frame["jaccard_independent"] - frame["jaccard_adjacent"]).mean() > 0.02


def test_stats_load_no_torch():
    """Looking at a trace is light work: neither torch nor a plot library is loaded for it."""
    code = "import sys, dinfer.record.stats; print({'torch', 'matplotlib'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_figure_names_its_units(tmp_path):
    """Four panels over the layers, every axis labelled, and a panel without data says so."""
    figure = plot_stats(stats(make(random_members(50))))
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == [
        "active neurons (share)",
        "activations covered (share)",
        "Jaccard distance",
        "residual cosine",
    ]
    assert {axes.get_xlabel() for axes in figure.axes} == {"layer"}
    assert [text.get_text() for text in figure.axes[3].texts] == ["not recorded"]
    figure.savefig(tmp_path / "stats.png")
