"""Recordings of tiny models against float64 arithmetic and against transformers' own generation."""

import json
import re
import tracemalloc

import numpy as np
import pytest
import torch
from conftest import LLAMA, fatrelu, save_tiny
from transformers import AutoModelForCausalLM, LlamaConfig

from dinfer import bits
from dinfer.errors import InputError
from dinfer.families import FAMILIES, open_checkpoint
from dinfer.record.generate import Sampling, draw
from dinfer.record.recorder import _prompts, read_prompts, record
from dinfer.trace import Trace, decode_levels, join

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(3, 256, size).tolist() for size in (5, 17, 9, 12, 30, 3, 8, 11)]
KINDS = {"llama-silu": {"sparsity": 0.6}, "llama-relu": {}, "opt": {}}


@pytest.fixture(scope="module")
def recorded(tiny_models, tmp_path_factory) -> dict[str, Trace]:
    """One greedy recording of each tiny model with everything in it."""
    out = tmp_path_factory.mktemp("recorded")
    return {
        name: record(
            tiny_models[name],
            PROMPTS,
            60,
            out / name,
            **kind,
            hidden=True,
            max_new_tokens=12,
            batch=4,
            temperature=0,
        )
        for name, kind in KINDS.items()
    }


def exact(directory, ids):
    """Residual, gate and value at down's input of a text in float64: [layer][token, ...] each."""
    checkpoint = open_checkpoint(directory)
    spec, family = checkpoint.spec, FAMILIES[checkpoint.spec.family]
    model = family.dense(checkpoint, 64, torch.device("cpu"), torch.float64)
    cache = torch.zeros(2, spec.kv_heads, 64, spec.head_dim, dtype=torch.float64)
    hidden, heard = family.embed(model, torch.tensor(ids), [0]), []
    for layer in range(spec.layers):
        hidden = family.attention(model, layer, hidden, [cache], [0])
        residual, x = hidden, family.ffn_input(model, layer, hidden)
        neurons = checkpoint.neurons(layer)
        first, *rest = neurons.rows.double().unbind(1)
        gate = x @ first.T + (0 if spec.gated else neurons.up_bias.double())
        act = torch.nn.functional.silu if spec.activation == "silu" else torch.relu
        value = act(gate) * (x @ rest[0].T) if spec.gated else act(gate)
        hidden = hidden + value @ rest[-1] + (0 if spec.gated else neurons.down_bias.double())
        heard.append((residual.numpy(), gate.numpy(), value.numpy()))
    return heard


@pytest.mark.parametrize("name", list(KINDS))
def test_active_sets_equal_float64_arithmetic(tiny_models, recorded, name):
    """Who was active is recomputed from the weights in double precision, prompt and answer in one pass:
    only neurons that stand on the threshold to 1e-4 may differ."""
    trace = recorded[name]
    for number in trace.tokens["sequence"].unique():
        sequence = trace.sequence(number)
        members = bits.unpack(sequence.active, 160)
        for layer, (residual, gate, value) in enumerate(exact(tiny_models[name], sequence.tokens["id"].tolist())):
            decides = np.abs(value) if name == "llama-silu" else gate
            over = decides - trace.meta["thresholds"][layer]
            wrong = members[:, layer] != (over > 0)
            assert (np.abs(over[wrong]) < 1e-4).all()
            assert wrong.mean() < 1e-3
            assert np.allclose(sequence.hidden[:, layer], residual, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", list(KINDS))
def test_levels_give_back_score_and_contribution(tiny_models, recorded, name):
    """The eight bits stand for |value| or gate - t, and for |value| times the norm of the down column,
    to 2.2% (3% with float32 noise)."""
    trace = recorded[name]
    checkpoint, sequence = open_checkpoint(tiny_models[name]), trace.sequence(1)
    for layer, (_, gate, value) in enumerate(exact(tiny_models[name], sequence.tokens["id"].tolist())):
        norms = checkpoint.neurons(layer).rows[:, -1].double().norm(dim=1).numpy()
        score = np.abs(value) if name == "llama-silu" else np.maximum(gate, 0)
        for kind, expected in (("score", score), ("contribution", np.abs(value) * norms)):
            scale = trace.meta[f"{kind}_scale"][layer]
            given = decode_levels(getattr(sequence, kind)[:, layer], scale)
            clear = expected > 2e-4 * scale
            assert clear.any()
            assert (np.abs(given / np.maximum(expected, 1e-30) - 1)[clear] < 0.03).all()


def test_gated_relu_goes_by_its_gate(recorded, tiny_models):
    """A neuron whose up product is negative is active too:
    gate * up > 0 would miss half of them."""
    trace = recorded["llama-relu"]
    sequence = trace.sequence(0)
    gate, value = exact(tiny_models["llama-relu"], sequence.tokens["id"].tolist())[0][1:]
    active = bits.unpack(sequence.active, 160)[:, 0]
    assert 0.3 < active[value < 0].mean() <= 1
    assert (active == (sequence.score[:, 0] > 0)).all()


def test_fatrelu_counts_from_its_threshold(tmp_path):
    """ProSparse's FATReLU keeps a gate only above t:
    below it the neuron is inactive, and its value is exactly 0."""
    directory = fatrelu(tmp_path / "fat")
    trace = record(directory, PROMPTS, 10, tmp_path / "t", max_new_tokens=5)
    active = bits.unpack(trace.active, 160)
    assert trace.meta["thresholds"] == [pytest.approx(0.4)] * 4
    assert 0.1 < active.mean() < 0.48
    assert not trace.contribution[~active].any()
    assert trace.contribution[active].all()


def check_against_generate(directory, trace, max_new_tokens):
    """Each sequence of ``trace`` is its prompt and what generate() writes after it, without the stop id."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    end = model.generation_config.eos_token_id
    for number in trace.tokens["sequence"].unique():
        sequence = trace.sequence(number).tokens
        prompt = sequence["id"][sequence["phase"] == "prefill"].tolist()
        assert prompt == PROMPTS[trace.meta["prompt_indices"][number]]
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        stop = set(end if isinstance(end, list) else [end])
        expected = [i for i in written[0, len(prompt) :].tolist() if i not in stop]
        assert sequence["id"][sequence["phase"] == "decode"].tolist() == expected


@pytest.mark.parametrize("name", list(KINDS))
def test_decode_ids_equal_transformers_generate(tiny_models, recorded, name):
    """The recorder's own batched loop writes what generate() writes greedily for each prompt alone."""
    check_against_generate(tiny_models[name], recorded[name], 12)


@pytest.mark.filterwarnings("ignore:.*decode tokens of:UserWarning")
def test_sequences_that_stop_early_leave_the_batch(tmp_path):
    """One prompt's stop id must not end, shift or disturb the others that are decoded with it."""
    directory = save_tiny(LlamaConfig(**LLAMA, hidden_act="relu", eos_token_id=list(range(0, 256, 6))), tmp_path / "m")
    settings = {"max_new_tokens": 12, "temperature": 0, "hidden": True}
    trace = record(directory, PROMPTS, 70, tmp_path / "t", batch=6, **settings)
    lengths = trace.phase("decode").tokens["sequence"].value_counts()
    assert lengths.max() > lengths.min()  # some stopped before others
    check_against_generate(directory, trace, 12)
    for number in trace.tokens["sequence"].unique():
        sequence = trace.sequence(number)
        for layer, (residual, *_) in enumerate(exact(directory, sequence.tokens["id"].tolist())):
            assert np.allclose(sequence.hidden[:, layer], residual, rtol=2e-3, atol=2e-3)


def test_rows_are_sequence_after_sequence(recorded):
    """A reader walks a sequence by position,
    and no padding of the batch has become a row."""
    for trace in recorded.values():
        tokens = trace.tokens
        assert (np.diff(tokens["sequence"]) >= 0).all()
        for _, sequence in tokens.groupby("sequence"):
            assert sequence["position"].tolist() == list(range(len(sequence)))
            assert sequence["phase"].is_monotonic_decreasing  # prefill, then decode
        assert (tokens["phase"] == "decode").sum() >= 60


@pytest.mark.parametrize("name", list(KINDS))
def test_a_batch_records_what_single_sequences_do(tiny_models, recorded, tmp_path, name):
    """Batching is for speed only: the same text,
    and the same active sets but for float32 noise on the threshold."""
    settings = {"max_new_tokens": 12, "batch": 1, "temperature": 0, **KINDS[name]}
    single = record(tiny_models[name], PROMPTS, 60, tmp_path / "t", **settings)
    together = recorded[name]
    assert single.tokens.equals(together.tokens)
    assert np.allclose(single.meta["thresholds"], together.meta["thresholds"], rtol=0.005)
    differing = bits.count(single.active ^ together.active).sum() / (len(single) * 4 * 160)
    assert differing < 2e-3


def test_sampled_text_does_not_depend_on_the_batch(tiny_models, tmp_path):
    """Each sequence has its own random stream, so a seed gives the same text in any batch."""
    settings = {"max_new_tokens": 8, "temperature": 1.0, "levels": False}
    model = tiny_models["llama-relu"]
    traces = [
        record(model, PROMPTS, 50, tmp_path / f"{seed}-{batch}", batch=batch, seed=seed, **settings)
        for seed, batch in ((1, 1), (1, 4), (2, 4))
    ]
    assert traces[0].tokens.equals(traces[1].tokens)
    assert not traces[0].tokens.equals(traces[2].tokens)
    assert traces[0].optional_arrays == ()


def test_sparsity_is_what_was_asked_for(recorded):
    """A magnitude threshold is calibrated on prompts that are not recorded,
    and its cost stands in the meta: error per layer and both perplexities."""
    trace = recorded["llama-silu"]
    decode = trace.phase("decode")
    assert abs(1 - decode.density.mean() - 0.6) < 0.05
    cost = trace.meta["calibration"]
    assert abs(cost["sparsity"] - 0.6) < 0.05
    assert cost["held_out"]
    assert len(cost["output_error"]) == 4
    assert all(0.05 < error < 0.5 for error in cost["output_error"])
    assert cost["perplexity_dense"] > 1
    assert cost["perplexity_sparse"] != cost["perplexity_dense"]
    assert not set(trace.meta["prompt_indices"]) & {0, 7}


def test_relu_costs_nothing(recorded):
    """Dropping what ReLU made 0 changes no output, and the meta says so."""
    cost = recorded["llama-relu"].meta["calibration"]
    assert cost["output_error"] == [0.0] * 4
    assert cost["perplexity_sparse"] == cost["perplexity_dense"]
    assert recorded["llama-relu"].meta["thresholds"] == [0.0] * 4


def test_given_thresholds_are_used(tiny_models, tmp_path):
    """Whoever brings thresholds gets exactly these, and still the cost of them."""
    thresholds = [0.01, 0.02, 0.03, 0.04]
    settings = {"thresholds": thresholds, "max_new_tokens": 6}
    trace = record(tiny_models["llama-silu"], PROMPTS, 12, tmp_path / "t", **settings)
    assert trace.meta["thresholds"] == pytest.approx(thresholds)
    assert trace.meta["calibration"]["perplexity_sparse"] > 1


def test_meta_says_how_it_was_made(recorded, tiny_models):
    """A trace names its model by name and by weights,
    its sampling, its versions and its day."""
    trace = recorded["opt"]
    made = trace.meta
    assert made["kind"] == "recorded"
    assert not trace.synthetic
    assert made["weights"] == open_checkpoint(tiny_models["opt"]).fingerprint
    assert made["sampling"] == {"temperature": 0, "top_p": 0.95, "seed": 0, "max_new_tokens": 12, "batch": 4}
    assert set(made["versions"]) == {"torch", "transformers"}
    assert made["date"].endswith("+00:00")
    assert trace.spec.dtype == "float32"


def test_memory_does_not_grow_with_the_trace(tiny_models, tmp_path):
    """Eight times the tokens take the same memory: the recorder holds one batch, the disk the rest."""
    peaks = []
    for tokens in (32, 256):
        tracemalloc.start()
        record(tiny_models["llama-relu"], PROMPTS, tokens, tmp_path / str(tokens), batch=2, max_new_tokens=16)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_shortfall_is_said(tmp_path):
    """Prompts that end early at temperature 0 give fewer tokens than asked for,
    which is a warning with both numbers, and a whole trace."""
    directory = save_tiny(LlamaConfig(**LLAMA, hidden_act="relu", eos_token_id=list(range(200))), tmp_path / "m")
    with pytest.warns(UserWarning, match=r"holds \d+ decode tokens of 30: all 6 prompts are used"):
        trace = record(directory, PROMPTS, 30, tmp_path / "t", max_new_tokens=5, temperature=0)
    assert trace.tokens["sequence"].nunique() == 6


def test_draw_is_that_of_sorting_all_ids():
    """Leaving out what no nucleus reaches changes neither the ids nor the random stream."""

    def plainly(logits, sampling, stream):
        likely, order = (logits / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
        likely[likely.cumsum(0) - likely >= sampling.top_p] = 0
        return int(order[torch.multinomial(likely, 1, generator=stream)])

    for top_p in (0.5, 0.95, 1.0):
        ours, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        for spread in (0.1, 1.0, 4.0):
            logits = spread * torch.randn(500, generator=torch.Generator().manual_seed(5))
            for _ in range(20):
                sampling = Sampling(0.8, top_p)
                assert draw(logits, sampling, ours) == plainly(logits, sampling, theirs)


def test_parts_of_a_recording_join_to_the_whole(tiny_models, tmp_path):
    """Recorded from a later sequence on and joined, with some sequences twice, it is the recording of one process."""
    prompts = [[3 + i, 9, 5] for i in range(6)]
    parts = {"whole": (0, 60), "first": (0, 30), "rest": (4, 20)}
    made = {
        name: record(
            tiny_models["llama-relu"], prompts, tokens, tmp_path / name, hidden=True, max_new_tokens=5, batch=3,
            first_sequence=first,
        )  # fmt: skip
        for name, (first, tokens) in parts.items()
    }
    joined = join([tmp_path / "first", tmp_path / "rest"], tmp_path / "joined")
    whole = made["whole"].rows((made["whole"].tokens["sequence"] <= joined.tokens["sequence"].max()).to_numpy())
    assert joined.tokens.equals(whole.tokens)
    for name in ("active", "score", "contribution"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name))
    assert np.allclose(joined.hidden, whole.hidden, atol=1e-2)
    record(tiny_models["llama-relu"], prompts, 5, tmp_path / "bare", max_new_tokens=5, seed=1)
    with pytest.raises(InputError, match="bare has another score_scale than .*first; join parts of one recording$"):
        join([tmp_path / "first", tmp_path / "bare"], tmp_path / "no")


def test_domains_of_the_prompts_are_kept(tiny_models, tmp_path):
    """A file with a domain for each prompt gives those of the recorded ones, in their order."""
    lines = [{"prompt": str(i), "domain": f"d{i // 3}"} for i in range(9)]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    texts, name, domains = _prompts(file)
    assert (texts[4], name, domains[4]) == ("4", "p.jsonl", "d1")
    file.write_text("\n".join(json.dumps({**line, "domain": ""}) for line in lines))
    assert _prompts(file)[2] == []
    made = record(tiny_models["llama-relu"], [[3], [4], [5], [6]], 2, tmp_path / "t", max_new_tokens=2).meta
    assert "domains" not in made


def test_draw_is_greedy_or_from_the_nucleus():
    """Temperature 0 takes the best; a small top_p leaves only the best; a high one leaves a choice."""
    logits, stream = torch.tensor([0.0, 2.0, 1.0, -1.0]), torch.Generator().manual_seed(0)
    assert draw(logits, Sampling(0.0), stream) == 1
    assert {draw(logits, Sampling(1.0, 0.5), stream) for _ in range(50)} == {1}
    assert {draw(logits, Sampling(1.0, 0.8), stream) for _ in range(50)} == {1, 2}


def refusal(model, prompts, out, tokens=10, **settings):
    with pytest.raises(InputError) as caught:
        record(model, prompts, tokens, out, **settings)
    assert not out.exists()
    return str(caught.value)


def test_silu_without_threshold_is_refused(tiny_models, tmp_path):
    """A SiLU neuron is never exactly 0: without a magnitude threshold there is nothing to record."""
    assert refusal(tiny_models["llama-silu"], PROMPTS, tmp_path / "t") == (
        "llama-silu (silu): sparsity is None, but its neurons are never exactly 0 and need a magnitude threshold; "
        "give --sparsity (0.6, say) or thresholds"
    )
    assert refusal(tiny_models["llama-silu"], PROMPTS, tmp_path / "t", sparsity=60) == (
        "llama-silu (silu): sparsity is 60; it must lie between 0 and 1"
    )
    assert refusal(tiny_models["llama-silu"], PROMPTS, tmp_path / "t", thresholds=[0.1]) == (
        "llama-silu (silu): thresholds has shape (1,); it must be 4 numbers of at least 0, one a layer"
    )


@pytest.mark.parametrize("name", ["llama-relu", "opt", "fatrelu"])
def test_a_wanted_sparsity_raises_a_relus_threshold(tiny_models, tmp_path, name):
    """Active is then what is above the raised one, the score still counts from the model's own, and it costs."""
    directory = fatrelu(tmp_path / "fat") if name == "fatrelu" else tiny_models[name]
    own = 0.4 if name == "fatrelu" else 0.0
    trace = record(directory, PROMPTS, 40, tmp_path / "t", sparsity=0.8, max_new_tokens=10)
    thresholds, cost = np.array(trace.meta["thresholds"]), trace.meta["calibration"]
    assert (thresholds > own).all()
    assert len(set(thresholds)) == 1
    assert trace.spec.raised(thresholds.tolist())
    assert not trace.spec.raised([own] * 4)
    assert cost["sparsity"] == pytest.approx(0.8, abs=0.05)
    assert 1 - bits.unpack(trace.active, 160).mean() == pytest.approx(0.8, abs=0.05)
    assert cost["perplexity_sparse"] != cost["perplexity_dense"]
    assert min(cost["output_error"]) > 0.01
    active = bits.unpack(trace.active, 160)
    for layer in range(4):
        scale = trace.meta["score_scale"][layer]
        score = decode_levels(trace.score[:, layer], scale)
        clear = np.abs(score / (thresholds[layer] - own) - 1) > 0.05
        assert np.array_equal(active[:, layer][clear], (score > thresholds[layer] - own)[clear])
        assert (trace.contribution[:, layer][~active[:, layer]] > 0).mean() > 0.03  # what the raised threshold drops


def test_a_relus_threshold_is_not_lowered(tiny_models, tmp_path):
    """Below its own the model has nothing."""
    assert refusal(tiny_models["opt"], PROMPTS, tmp_path / "t", thresholds=[-0.1] * 4) == (
        "opt (relu): thresholds has shape (4,); it must be 4 numbers of at least 0, one a layer"
    )
    assert refusal(fatrelu(tmp_path / "fat"), PROMPTS, tmp_path / "t", thresholds=[0.5, 0.5, 0.3, 0.5]) == (
        "fat (fatrelu): thresholds has 0.3, but its gates are 0 up to 0.4; it can be raised only: give at least that, "
        "or leave it out"
    )


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ([], {}, "prompts has 0 entries; it needs at least 1"),
        ([[5], []], {}, "prompt 1 is empty; it needs at least one token"),
        (["  "], {}, None),
        ([[5, 256]], {}, "prompt 0 holds the id 256; llama-relu has 256 ids"),
        (
            [[5] * 250],
            {"max_new_tokens": 7},
            "prompt 0 has 250 tokens, with 7 new ones more than the 256 positions of llama-relu; "
            "shorten it or lower --new-tokens",
        ),
        ([[5]], {"batch": 0}, "batch is 0; it must be at least 1"),
        ([[5]], {"tokens": 0}, "tokens is 0; it must be at least 1"),
        ([[5]], {"temperature": -1.0}, "temperature is -1; it must be at least 0 (0 is greedy)"),
        ([[5]], {"top_p": 0.0}, "top_p is 0; it must lie above 0 and be at most 1"),
        ([[5]], {"dtype": "int8"}, "dtype 'int8' is not one of float32, float16, bfloat16"),
        (
            [[5]],
            {"temperature": 0, "max_new_tokens": 4},
            "tokens is 10, but 1 prompts of 4 new tokens give at most 4 at temperature 0; "
            "give more prompts, more new tokens or a temperature",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tiny_models, tmp_path, prompts, settings, said):
    """One line with the value, the rule and the remedy, and no directory left behind."""
    model = tiny_models["llama-relu"]
    said = said or f"model {model} has no tokenizer; give prompts as lists of token ids"
    assert refusal(model, prompts, tmp_path / "t", **settings) == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device whose absence is told")
def test_missing_device_is_an_error(tiny_models, tmp_path):
    """There is no silent fall back to the CPU."""
    assert refusal(tiny_models["opt"], PROMPTS, tmp_path / "t", device="cuda") == (
        "device 'cuda' is not available here; record with --device cpu"
    )


def test_an_existing_trace_is_not_overwritten(tiny_models, tmp_path):
    """The place is checked before the model is loaded, and what lies there stays."""
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(InputError, match="a recording never overwrites"):
        record(tiny_models["opt"], PROMPTS, 10, tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_prompt_files(tmp_path):
    """JSON lines or plain lines; a bad line is named by its number."""
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "one", "id": "a"}\n\n{"prompt": "two"}\n')
    assert read_prompts(lines) == ["one", "two"]
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two"]
    for text, said in (
        ('{"prompt": "one"}\n{"text": "two"}\n', 'line 2: \'{"text": "two"}\' is no JSON object with a field prompt'),
        ("", "has 0 prompts; it needs at least 1"),
    ):
        lines.write_text(text)
        with pytest.raises(InputError) as caught:
            read_prompts(lines)
        assert str(caught.value).endswith(said)
    with pytest.raises(InputError) as caught:
        read_prompts(tmp_path / "none.jsonl")
    assert str(caught.value) == (f"prompts {tmp_path / 'none.jsonl'} is no file; give JSON lines with a field prompt")


@pytest.mark.slow
def test_the_real_model_through_its_chat_template(smollm2, tmp_path):
    """SmolLM2 at 60% sparsity: the perplexity of its own text rises by a few percent, not by a half."""
    prompts = ["Name three rivers.", "What is a prime number?", "Write a rhyme.", "Why is ice slippery?"]
    trace = record(smollm2, prompts, 40, tmp_path / "t", sparsity=0.6, max_new_tokens=24)
    cost = trace.meta["calibration"]
    assert 1 < cost["perplexity_sparse"] / cost["perplexity_dense"] < 1.25
    assert abs(cost["sparsity"] - 0.6) < 0.03
    assert trace.tokens["id"].iloc[0] == 1  # <|im_start|>


def test_prompts_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"ok\n\x89PNG")
    message = f"prompts {tmp_path / 'prompts.txt'} is no UTF-8 text (byte 3); give JSON lines or text"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        read_prompts(tmp_path / "prompts.txt")
