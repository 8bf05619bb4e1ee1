"""The harness's own tasks through the adapter, against the harness's own transformers model. Tiny random models with a
tokenizer of bytes; the tasks are those of traces/tasks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_execute import make_plan

from dinfer.errors import InputError

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own

REPOSITORY = Path(__file__).parents[1]
TASKS = ["dinfer_causes", "dinfer_entailment", "dinfer_physical", "dinfer_pronouns"]


def save_bytes_tokenizer(directory: Path) -> None:
    """256 tokens, one for each byte; byte 0 begins and ends texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = chr(256)  # byte 0 as the alphabet writes it
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)
    fast.save_pretrained(directory)


@pytest.fixture(scope="module")
def home(tiny_models, tmp_path_factory) -> Path:
    """A directory with a tiny model that has a tokenizer, a dense plan and one with thresholds."""
    home = tmp_path_factory.mktemp("harness")
    shutil.copytree(tiny_models["llama-silu"], home / "model")
    save_bytes_tokenizer(home / "model")
    make_plan(home / "model", 80, context=256).save(home / "dense.json")
    make_plan(home / "model", 80, context=256, thresholds=(0.05,) * 4).save(home / "sparse.json")
    return home


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
    monkeypatch.chdir(REPOSITORY)


def evaluated(model, limit: int):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path="traces/tasks", include_defaults=False)
    return simple_evaluate(model=model, tasks=TASKS, task_manager=manager, limit=limit, bootstrap_iters=0)


def likelihoods(results) -> np.ndarray:
    """Log likelihood of each choice of each item, task after task."""
    samples = [sample for task in TASKS for sample in results["samples"][task]]
    return np.array([[response[0][0] for response in sample["resps"]] for sample in samples], float)


def test_tasks_score_as_the_harnesss_own_model_does(home):
    from lm_eval.models.huggingface import HFLM

    from dinfer.lm_eval import Harness

    ours = evaluated(Harness(str(home / "dense.json"), str(home / "model")), 5)
    theirs = evaluated(HFLM(pretrained=str(home / "model"), device="cpu", dtype="float32", batch_size=1), 5)
    assert likelihoods(ours).shape == (20, 2)
    assert likelihoods(ours) == pytest.approx(likelihoods(theirs), rel=1e-4)
    for task in TASKS:
        assert ours["results"][task]["acc,none"] == theirs["results"][task]["acc,none"]
    sparse = evaluated(Harness(str(home / "sparse.json"), str(home / "model")), 5)
    assert np.abs(likelihoods(sparse) - likelihoods(ours)).max() > 0.01
    again = evaluated(Harness(str(home / "sparse.json"), str(home / "model"), way="dense"), 5)
    assert likelihoods(again) == pytest.approx(likelihoods(ours), rel=1e-6)


def test_rolling_and_generation_are_the_harnesss_own_models(home):
    """A text longer than the context in windows, and greedy continuations up to a stop text."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from dinfer.lm_eval import Harness

    text = "It was a Saturday night in December. " * 9  # 333 tokens, the context holds 256
    ours = Harness(str(home / "dense.json"), str(home / "model"))
    theirs = HFLM(pretrained=str(home / "model"), device="cpu", dtype="float32", batch_size=1)
    rolling = [Instance("loglikelihood_rolling", {}, (each,), 0) for each in (text, "Short.")]
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), rel=1e-4)
    settings = {"until": ["zz"], "max_gen_toks": 12, "do_sample": False}
    starts = ("Once upon", "The river", "A", "Bread and", "1, 2,", "He said")
    prompts = [Instance("generate_until", {}, (each, settings), 0) for each in starts]
    written = ours.generate_until(prompts)
    assert written == theirs.generate_until(prompts)
    longest = max(range(6), key=lambda i: len(written[i]))
    stop = written[longest][-1]
    stopped = [Instance("generate_until", {}, (starts[longest], {**settings, "until": [stop]}), 0)]
    assert ours.generate_until(stopped) == [written[longest].split(stop)[0]]


def test_a_way_that_the_plan_lacks_is_refused(home):
    from dinfer.lm_eval import Harness

    message = "way 'dynamic' is not one of dense, sparse, those of this plan"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Harness(str(home / "dense.json"), str(home / "model"), way="dynamic")


def test_a_plan_with_a_predictor_answers_by_predicted_sets(home):
    """What the harness sees is what the scorer says of the predicted way; without its predictor a plan is refused."""
    from test_quality import half_predictors, predicted_plan

    from dinfer.exec import Session
    from dinfer.exec.quality import Scorer
    from dinfer.lm_eval import Harness

    predictors = half_predictors(home / "model")
    predictors.save(home / "predictor")
    plan = predicted_plan(home / "model", predictors, context=256)
    plan.save(home / "predicted.json")
    harness = Harness(str(home / "predicted.json"), str(home / "model"), predictor=str(home / "predictor"))
    assert harness.way == "predicted"
    ids = list(b"The river froze.")
    ((likelihood, _),) = harness._loglikelihood_tokens([(None, ids[:10], ids[10:])])
    with Session(plan, home / "model", "cpu", predictor=predictors) as session:
        scorer = Scorer(session)
        rows = scorer.logits(ids[:-1], "predicted", prompt=10).log_softmax(dim=-1)[9:]
        scorer.close()
    assert likelihood == pytest.approx(float(rows.gather(1, torch.tensor(ids[10:])[:, None]).sum()), rel=1e-5)
    with pytest.raises(InputError, match="^plan predicts by predictor [0-9a-f]{16}, none is given; give --predictor"):
        Harness(str(home / "predicted.json"), str(home / "model"))


@pytest.mark.slow
def test_the_harnesss_command_line_knows_the_model(home, tmp_path):
    command = [sys.executable, "-m", "dinfer.lm_eval", "run", "--model", "dinfer", "--tasks", "dinfer_causes"]
    command += ["--model_args", f"plan={home / 'dense.json'},model={home / 'model'}", "--limit", "3"]
    command += ["--include_path", "traces/tasks"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "dinfer_causes" in run.stdout
