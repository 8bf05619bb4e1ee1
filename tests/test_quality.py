"""Quality figures against transformers, textbook formulas and token-by-token decoding; the refusals of bad texts.
Everything runs on tiny random models."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from test_cli import PROMPTS, dinfer, refused, save_tokenizer
from test_execute import make_plan
from transformers import AutoModelForCausalLM

from dinfer.errors import InputError
from dinfer.exec import Session
from dinfer.exec.decode import decode_token, end_token
from dinfer.exec.prefill import prefill
from dinfer.exec.quality import Quality, Scorer, quality, quality_table, read_text, text_blocks, ways_of, wilson
from dinfer.families import open_checkpoint
from dinfer.plan import early_layers
from dinfer.predictors import Predictors
from dinfer.record.generate import listening, load, thresholded
from dinfer.record.restricted import restricted

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
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
    dense, sparse = found
    assert dense.computed_share == 1
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


@pytest.mark.parametrize("name", ["llama-relu", "opt"])
def test_gates_first_a_relu_model_computes_the_same_of_fewer_neurons(tiny_models, name):
    plan = make_plan(tiny_models[name], 80)
    with Session(plan, tiny_models[name], "cpu") as session:
        dense, sparse = quality(session, BLOCKS, ways_of(plan))
    assert np.allclose(sparse.loss, dense.loss, atol=1e-4)
    assert np.abs(sparse.divergence).max() < 1e-5
    assert sparse.agrees.mean() > 0.99
    assert dense.computed_share == 1
    active: list[torch.Tensor] = []
    loaded = load(tiny_models[name])
    with torch.inference_mode(), listening(loaded, lambda layer, hidden, gate, value: active.append(gate > 0)):
        for block in BLOCKS:
            loaded.model(input_ids=torch.from_numpy(block)[None], use_cache=False)
    assert sparse.computed_share == pytest.approx(float(torch.cat(active).float().mean()), abs=1e-3)
    assert 0.2 < sparse.computed_share < 0.8


def test_which_ways_a_plan_has(tiny_models):
    plan = make_plan(tiny_models["llama-relu"], 80)
    assert ways_of(plan) == ("dense", "sparse")
    assert ways_of(replace(plan, activation="predicted")) == ("dense", "sparse", "predicted")


def half_predictors(directory, lookahead: int = 1, thresholds: tuple[float, ...] = ()) -> Predictors:
    """Untrained: half of the neurons by random maps of rank 6."""
    spec, draw = open_checkpoint(directory).spec, np.random.default_rng(4).standard_normal
    shapes = {"first": (spec.hidden, 6), "second": (6, spec.neurons), "bias": (spec.neurons,)}
    parts = {k: [draw(shape).astype(np.float16) for _ in range(spec.layers)] for k, shape in shapes.items()}
    activity = thresholds or (MEDIAN if spec.sparsity_kind == "magnitude" else ())
    chance = np.full(spec.layers, 0.5, np.float32)
    return Predictors(spec=spec, lookahead=lookahead, thresholds=chance, activity=activity, **parts)


def predicted_plan(directory, predictors: Predictors, **changes):
    settings = {"activation": "predicted", "prediction": "trained", "predictor": predictors.tag()}
    settings |= {"lookahead": predictors.lookahead, "thresholds": predictors.activity}
    return make_plan(directory, 60, **settings | changes)


@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt", "raised"])
def test_the_predicted_way_is_transformers_restricted_to_the_predicted(tiny_models, name):
    directory = tiny_models["llama-relu" if name == "raised" else name]
    predictors = half_predictors(directory, thresholds=(0.3, 0.2, 0.4, 0.1) if name == "raised" else ())
    plan = predicted_plan(directory, predictors)
    with Session(plan, directory, "cpu", predictor=predictors) as session:
        found = quality(session, BLOCKS, ways_of(plan))
    assert [one.way for one in found] == ["dense", "sparse", "predicted"]
    loaded, predicted = load(directory), found[2]
    for number, block in enumerate(BLOCKS):
        with torch.inference_mode(), restricted(loaded, predictors, dense=1):
            logits = loaded.model(input_ids=torch.from_numpy(block)[None], use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(block[1:]), reduction="none")
        assert np.allclose(predicted.loss[number], loss, atol=1e-4)
    assert 0.3 < predicted.computed_share < 0.7
    assert predicted.divergence.mean() > found[1].divergence.mean()


@pytest.mark.parametrize("cache", ["static", "lru"])
@pytest.mark.parametrize("early", ["predicted", "resident"])
def test_whole_texts_score_as_predicted_decoding_does(tiny_models, cache, early):
    directory = tiny_models["llama-silu"]
    predictors = half_predictors(directory)
    slots = 160 * (np.arange(4) == 0) if early == "resident" else 0
    tag = {**predictors.tag(), "early": early_layers(1, early)}
    changes = {"cache": {"name": cache}, "window": 9, "predictor": tag}
    placed = make_plan(directory, np.maximum(60, slots)).placement
    plan = replace(predicted_plan(directory, predictors), placement=placed, **changes)
    with Session(plan, directory, "cpu", predictor=predictors) as session:
        scorer = Scorer(session)
        at_once, one_by_one = scorer.logits(BLOCKS[0], "predicted", prompt=5)[5:], []
        prefill(scorer.run, 0, BLOCKS[0][:5].tolist())
        for position, token in enumerate(BLOCKS[0][5:], start=5):
            one_by_one.append(decode_token(scorer.run, [int(token)], [position])[0])
            end_token(scorer.run)
        scorer.close()
    assert (at_once - torch.stack(one_by_one)).norm() / at_once.norm() < 1e-4


def test_ways_that_a_plan_has_not_are_refused(tiny_models):
    directory = tiny_models["llama-relu"]
    predictors = half_predictors(directory)
    with Session(make_plan(directory, 80), directory, "cpu") as session:
        for way in ("dynamic", "predicted", "fast"):
            with refuses(f"way {way!r} is not one of dense, sparse, those of this plan"):
                quality(session, BLOCKS, [way])
    with Session(make_plan(directory, 80, activation="predicted"), directory, "cpu") as session:
        with refuses(
            "plan predicts by 'previous', which says nothing of a text; plan with a trained --predictor DIR, or with "
            "--activation exact"
        ):
            quality(session, BLOCKS)
    mark = predictors.fingerprint()
    with refuses(f"plan predicts by predictor {mark}, none is given; give --predictor DIR with that one"):
        Session(predicted_plan(directory, predictors), directory, "cpu")


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


@pytest.fixture
def home(tiny_models, tmp_path):
    """A directory with model/ (words as tokens), text, predictor/, predicted.json and exact.json."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_models["llama-silu"], directory)
    save_tokenizer(directory)
    (tmp_path / "text").write_text(" ".join(PROMPTS * 4))
    predictors = half_predictors(directory)
    predictors.save(tmp_path / "predictor")
    predicted_plan(directory, predictors).save(tmp_path / "predicted.json")
    make_plan(directory, 60, thresholds=MEDIAN).save(tmp_path / "exact.json")
    return tmp_path


def scoring(home, plan: str, *more) -> list:
    command = ["quality", home / plan, "--model", home / "model", "--text", home / "text", "--device", "cpu"]
    return [*command, "--block", "16", *more]


def test_the_command_line_scores_predicted_sets(home):
    out, _ = dinfer(*scoring(home, "predicted.json", "--predictor", home / "predictor", "-o", "json"))
    rows = json.loads(out)
    assert [row["way"] for row in rows] == ["dense", "sparse", "predicted"]
    assert rows[2]["divergence"] > rows[1]["divergence"] > 0
    assert rows[2]["computed_share"] == pytest.approx(0.5, abs=0.2)


def test_the_command_line_refuses_what_does_not_fit_at_the_door(home):
    mark = Predictors.load(home / "predictor").fingerprint()
    expected = f"plan predicts by predictor {mark}, none is given; give --predictor DIR with that one"
    assert refused(*scoring(home, "predicted.json")) == expected
    expected = "plan predicts by 'previous' and takes no predictor; leave --predictor out"
    assert refused(*scoring(home, "exact.json", "--predictor", home / "predictor")) == expected
    expected = f"{home / 'no'} is no predictor: it lacks predictor.json; train one with `dinfer train-predictor`"
    assert refused(*scoring(home, "predicted.json", "--predictor", home / "no")) == expected


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/quality.py as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "quality", raising=False)
    return importlib.import_module("quality")


def test_the_benchmark_keeps_what_it_has_of_other_plans(home, benchmark):
    # each plan's ways are what the command line says of it, and a plan that is measured again replaces itself only
    text, out = home / "text", home / "quality.json"
    plans = [home / "predicted.json", home / "exact.json"]
    settings = {"text": text, "output": out, "predictor": home / "predictor", "block": 16, "tasks": "", "tokens": 64}
    settings |= {"include": home, "raised": "", "teacher": ""}
    benchmark.main(str(home / "model"), plan=plans, **settings)
    benchmark.main(str(home / "model"), plan=plans[:1], **settings | {"teacher": str(home / "model")})
    exact, predicted = json.loads(out.read_text())
    assert [row["way"] for row in exact["ways"]] == ["dense", "sparse"]
    assert [row["way"] for row in predicted["ways"]] == ["dense", "sparse", "predicted"]
    command = scoring(home, "predicted.json", "--predictor", home / "predictor", "--tokens", 64, "-o", "json")
    rows = json.loads(dinfer(*command)[0])
    for row, said in zip(predicted["ways"], rows, strict=True):
        assert {name: row[name] for name in said} == said
        assert row["teacher_ratio"] == pytest.approx(said["ratio"])  # the teacher is the model itself
    table = out.with_suffix(".md").read_text()
    assert f"{predicted['ways'][2]['ratio']:.3f} (" in table
    assert "computed" in table


def test_the_benchmark_raises_thresholds(tiny_models, home, benchmark):
    directory = home / "relu"
    shutil.copytree(tiny_models["llama-relu"], directory)
    save_tokenizer(directory)
    make_plan(directory, 60).save(home / "relu.json")
    settings = {"output": home / "raised.json", "text": home / "text", "block": 16, "tokens": 64, "tasks": ""}
    settings |= {"raised": "0,0.3,0.6", "teacher": "", "predictor": None}
    benchmark.main(str(directory), plan=[home / "relu.json"], **settings)
    (found,) = json.loads((home / "raised.json").read_text())
    assert found["kind"] == "raised"
    assert [row["threshold"] for row in found["ways"]] == [0, 0.3, 0.6]
    assert found["ways"][0]["ratio"] == pytest.approx(1, abs=1e-5)
    shares = [row["computed_share"] for row in found["ways"]]
    assert shares == sorted(shares, reverse=True)
    assert found["ways"][2]["divergence"] > found["ways"][1]["divergence"] > 1e-4
