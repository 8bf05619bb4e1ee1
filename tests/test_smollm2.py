"""The real model, end to end: slow, needs SmolLM2 (the package index, once)."""

import pytest
import torch
from test_execute import dense_greedy, make_plan, splits
from transformers import AutoModelForCausalLM

from dinfer.exec import Session
from dinfer.families import open_checkpoint
from dinfer.policies import CACHES
from dinfer.sim import simulate
from dinfer.trace import Trace

pytestmark = pytest.mark.slow

PROMPTS = (
    "Why is the sky blue?",
    "Name three rivers of Europe.",
    "Write one sentence about bread.",
    "What is 17 times 4?",
    "Translate 'good morning' into French.",
    "Who wrote Hamlet?",
    "Give a reason to plant trees.",
    "Explain what a compiler does.",
)


@pytest.mark.parametrize("split", ["none", "one", "half", "all but one", "all"])
def test_every_split_writes_what_the_dense_model_writes(smollm2, split):
    # 64 greedy tokens of 8 prompts in fp32: the same tokens, logits within 1e-4
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    checkpoint = open_checkpoint(smollm2)
    plan = make_plan(smollm2, splits(1536, 30)[split], cache={"name": "hot_predicted"})
    with Session(plan, checkpoint, "cpu") as session:
        for prompt in PROMPTS:
            ids = tokenizer(prompt)["input_ids"]
            seen: list[torch.Tensor] = []
            run = session.generate(ids, max_tokens=64, stop=False, on_logits=seen.append)
            expected, logits = dense_greedy(reference, ids, 64)
            assert list(run.ids) == expected
            assert (torch.stack(seen) - logits).norm() / logits.norm() < 1e-4


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("cache", sorted(CACHES))
def test_replaying_the_repositorys_trace_decides_as_the_simulator(smollm2, cache, lookahead):
    trace = Trace.load("traces/smollm2-small").sequence(0)
    thresholds = tuple(trace.meta["thresholds"])
    plan = make_plan(
        smollm2, 500, cache={"name": cache}, lookahead=lookahead, thresholds=thresholds, context=256
    )
    with Session(plan, smollm2, "cpu") as session:
        executed = session.replay(trace)
    simulated = simulate(plan, trace)
    assert executed.same_decisions(simulated)
    # the recording listened to the dense model, the run silences what is below the thresholds: nearly the same work
    counts = [run.work[..., :2].sum() for run in (executed, simulated)]
    assert counts[0] == pytest.approx(counts[1], rel=0.03)
