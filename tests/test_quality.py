"""Quality figures against transformers, textbook formulas and token-by-token decoding; the refusals of bad texts.
Everything runs on tiny random models."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from test_execute import make_plan
from transformers import AutoModelForCausalLM

from dinfer.errors import InputError
from dinfer.exec import Session
from dinfer.exec.decode import decode_token
from dinfer.exec.quality import Quality, Scorer, quality, quality_table, read_text, text_blocks, ways_of, wilson
from dinfer.record.generate import load, thresholded

BLOCKS = np.random.default_rng(11).integers(3, 256, (6, 24))
MEDIAN = (0.02, 0.02, 0.02, 0.02)


def transformers_logits(directory, block, thresholds=None) -> torch.Tensor:
    loaded = load(directory)
    with torch.inference_mode(), thresholded(loaded, thresholds or [-1.0] * loaded.spec.layers):
        return loaded.model(input_ids=torch.from_numpy(block)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt"])
def test_the_dense_way_is_transformers(tiny_models, name):
    plan = make_plan(tiny_models[name], 80)
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[name])
    with Session(plan, tiny_models[name], "cpu") as session:
        (found,) = quality(session, BLOCKS, ["dense"])
    ids = torch.from_numpy(BLOCKS)
    with torch.no_grad():
        logits = reference(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    assert np.allclose(found.loss.ravel(), loss.numpy(), atol=1e-4)
    row = found.row()
    assert row["perplexity"] == pytest.approx(float(loss.double().mean().exp()), rel=1e-4)
    assert (row["ratio"], row["agreement"], row["divergence"]) == (1, 1, 0)
    assert row["perplexity_low"] < row["perplexity"] < row["perplexity_high"]
    assert row["tokens"] == 6 * 23


def test_the_sparse_way_is_transformers_with_thresholds(tiny_models):
    # loss, agreement and KL against a model whose small values are set to 0 by a hook
    directory = tiny_models["llama-silu"]
    plan = make_plan(directory, 80, thresholds=MEDIAN)
    with Session(plan, directory, "cpu") as session:
        found = quality(session, BLOCKS, ways_of(plan))
    assert [one.way for one in found] == ["dense", "sparse"]
    sparse = found[1]
    for number, block in enumerate(BLOCKS):
        given, dense = (
            torch.log_softmax(transformers_logits(directory, block, thresholds)[:-1].double(), dim=-1)
            for thresholds in (MEDIAN, None)
        )
        following = torch.from_numpy(block[1:])[:, None]
        assert np.allclose(sparse.loss[number], -given.gather(1, following)[:, 0], atol=1e-4)
        assert np.array_equal(sparse.agrees[number], given.argmax(1) == dense.argmax(1))
        kl = torch.nn.functional.kl_div(given, dense, reduction="none", log_target=True).sum(1)
        assert np.allclose(sparse.divergence[number], kl, atol=1e-4)
    assert 0.2 < sparse.computed_share < 0.8
    assert sparse.divergence.mean() > 1e-5


def test_whole_texts_score_as_decoding_does(tiny_models):
    # the threshold's output for a whole block equals what decode_token computes token by token, GPU and CPU together
    directory = tiny_models["llama-silu"]
    plan = make_plan(directory, 60, thresholds=MEDIAN, cache={"name": "static"})
    with Session(plan, directory, "cpu") as session:
        scorer = Scorer(session)
        at_once = scorer.logits(BLOCKS[0], "sparse")
        one_by_one = torch.cat([decode_token(scorer.run, [int(token)], [i]) for i, token in enumerate(BLOCKS[0])])
        scorer.close()
    assert (at_once - one_by_one).norm() / one_by_one.norm() < 1e-4


def test_relu_models_have_one_exact_way(tiny_models):
    plan = make_plan(tiny_models["llama-relu"], 80)
    assert ways_of(plan) == ("dense",)
    assert ways_of(replace(plan, activation="predicted")) == ("dense", "dynamic")


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (7, 10), (813, 1000)])
def test_wilson_is_scipys(successes, trials):
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    share, low, high = wilson(successes, trials)
    assert share == successes / trials
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_the_intervals_cover_what_they_should():
    """Blocks with a known mean: some 95% of the bootstrap intervals hold it (percentiles of 24 blocks: a bit fewer);
    the paired ratio is far tighter than the perplexities that it compares."""
    rng, held = np.random.default_rng(3), 0
    for seed in range(200):
        base = 3 + rng.normal(0, 0.5, (24, 1)) + rng.normal(0, 1, (24, 50))
        loss = base + 0.1 + rng.normal(0, 0.05, base.shape)
        row = Quality("sparse", loss, base, base > 3, base * 0, 0.4).row(seed)
        held += row["perplexity_low"] < np.exp(3.1) < row["perplexity_high"]
    assert 170 <= held <= 199
    assert row["ratio"] == pytest.approx(np.exp(0.1), rel=0.01)
    assert row["ratio_high"] - row["ratio_low"] < 0.1 * (row["perplexity_high"] - row["perplexity_low"]) / np.exp(3)


def test_the_table_has_a_row_a_way():
    one = Quality("dense", *[np.ones((2, 3))] * 2, np.ones((2, 3), bool), np.zeros((2, 3)), 1.0)
    table = quality_table([one, replace(one, way="sparse")])
    assert table["way"].tolist() == ["dense", "sparse"]
    assert {"perplexity", "ratio_low", "agreement_high", "divergence", "computed_share"} <= set(table)


def refuses(message: str):
    return pytest.raises(InputError, match=f"^{re.escape(message)}$")


def test_bad_texts_are_refused(tiny_models, tmp_path):
    plan = make_plan(tiny_models["opt"], 80, context=16)
    with Session(plan, tiny_models["opt"], "cpu") as session:
        with refuses("text gives 1 blocks of 9 tokens; at least 2 of 2 are needed for an interval"):
            quality(session, BLOCKS[:1, :9])
        with refuses(
            "blocks have 24 tokens, the plan's KV cache holds 16; lower --block or plan with --context 24"
        ):
            quality(session, BLOCKS)
    with refuses(f"text {tmp_path / 'no'} is no file; give --text a file of UTF-8 text"):
        read_text(tmp_path / "no")
    (tmp_path / "empty").write_text(" \n")
    with refuses(f"text {tmp_path / 'empty'} is empty; give --text a file of UTF-8 text"):
        read_text(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with refuses(f"text {tmp_path / 'bytes'} is no UTF-8 text (byte 2); convert it first"):
        read_text(tmp_path / "bytes")
    with refuses("tokens is 10 and block 8; there must be 2 blocks of at least 2 tokens for an interval"):
        text_blocks(tmp_path, "words", 8, 10)
