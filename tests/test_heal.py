"""The script that heals a ReLU model, on a tiny random Llama: its loss, its steps, its checkpoints, its export.

The gradient is compared with torch's own KL divergence, the exported model with the student that it was made of.
"""

import json
import re
from pathlib import Path

import healing
import healing_fit
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from heal_relu import checked_out, checked_teacher, export, heal, judge, made_work, provenance, ratio
from healing import Healing, LogitKl, Run, losses
from healing_fit import measured_reach
from healing_texts import Texts
from transformers import AutoModelForCausalLM

from dinfer.errors import InputError

GIVEN = {"sparsity": 0.8, "rows a step": 4, "seed": 3}


class NoTokenizer:
    """A tokenizer that has no files."""

    def save_pretrained(self, directory: Path) -> None:
        pass


@pytest.fixture(autouse=True)
def a_small_fit(monkeypatch) -> None:
    monkeypatch.setattr(healing, "FIT_ROWS", 32)
    monkeypatch.setattr(healing, "REACH_ROWS", 8)
    monkeypatch.setattr(healing_fit, "REFINE_STEPS", 20)


def begin(teacher_directory: Path, texts: Texts, sparsity: float = 0.8) -> Healing:
    dtype = healing.dtype_of_products(torch.device("cpu"))
    teacher = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=dtype).requires_grad_(False)
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


def test_it_begins_sparse_and_near_its_teacher(teacher_directory, texts):
    """The first fit brings every layer's residual nearer to the teacher's, and the wanted share of gates is silent."""
    run, ids = begin(teacher_directory, texts), torch.from_numpy(texts.chats)
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


def test_a_layer_learns_on_all_sequences_and_regressions_sum_some(teacher_directory, texts, monkeypatch):
    """One batch in SUMMED comes into the fits of the output and of the first down matrix, all into the last one."""
    learnt, summed = [], []
    monkeypatch.setattr(healing, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(healing, "refine", lambda mlp, entered, *residuals: learnt.append(sum(map(len, entered))))
    monkeypatch.setattr(healing, "fit_part", lambda part, given, *residuals: summed.append(sum(map(len, given))))
    run = begin(teacher_directory, texts)
    run.begin()
    layers = len(run.student.mlps)
    assert learnt == [32] * layers
    assert summed == [8, 8, 32] * layers


def test_training_lowers_the_loss_and_reaches_the_sparsity(teacher_directory, texts, monkeypatch):
    """By its steps alone: the first fit, which leaves a random model nothing to learn, is left out."""
    monkeypatch.setattr(healing.Student, "fit", lambda student, *given: given[-1](len(student.mlps)))
    told = train(begin(teacher_directory, texts), 80, whole=80)
    monkeypatch.setattr(healing, "RATE", 0.0)
    untrained = train(begin(teacher_directory, texts), 80, whole=80)
    assert np.mean([one["loss"] for one in told[-10:]]) < 0.9 * np.mean([one["loss"] for one in untrained[-10:]])
    assert np.mean([one["sparsity"] for one in told[-10:]]) == pytest.approx(0.8, abs=0.02)
    assert len({one["threshold"] for one in told[-20:]}) == 1


def test_ffn_and_attention_weights_change_and_nothing_else(teacher_directory, texts):
    run = begin(teacher_directory, texts)
    before = {name: value.clone() for name, value in run.student.model.named_parameters()}
    train(run, 2)
    changed = {name for name, value in run.student.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert any(".mlp." in name for name in changed)
    assert any(".self_attn." in name for name in changed)


def test_what_plain_relu_makes_sparse_enough_gets_the_least_threshold(teacher_directory, texts):
    run = begin(teacher_directory, texts, sparsity=0.3)
    run.step(0)
    assert run.student.threshold >= healing.LEAST_THRESHOLD
    assert torch.isfinite(run.student.reach).all()
    assert all(torch.isfinite(weight).all() for weight in run.student.weights())


def test_a_fit_that_was_stopped_goes_on_where_it_stood(teacher_directory, texts, tmp_path):
    """Every layer is kept; from any of them on the fit ends with the very weights of one that was never stopped."""
    whole, kept = begin(teacher_directory, texts), []

    def keep() -> None:
        kept.append(tmp_path / f"checkpoint-{whole.run.fitted}.pt")
        whole.save(kept[-1])

    whole.begin(keep)
    whole.begin(keep)
    assert len(kept) == len(whole.student.mlps)
    for fitted, file in enumerate(kept, 1):
        again, later = begin(teacher_directory, texts), []
        again.resume(file)
        assert (again.run.fitted, again.run.step) == (fitted, 0)
        again.begin(lambda again=again, later=later: later.append(again.run.fitted))
        assert later == list(range(fitted + 1, len(kept) + 1))
        assert all(torch.equal(*pair) for pair in zip(again.student.weights(), whole.student.weights(), strict=True))
        assert torch.equal(again.student.reach, whole.student.reach)


@pytest.mark.parametrize("step", [1, 9, 25])
def test_a_resumed_training_takes_the_same_next_steps(teacher_directory, texts, tmp_path, step):
    first = begin(teacher_directory, texts)
    train(first, step)
    first.save(tmp_path / "checkpoint.pt")
    second = begin(teacher_directory, texts)
    second.resume(tmp_path / "checkpoint.pt")
    assert train(second, 4) == train(first, 4)
    assert all(torch.equal(a, b) for a, b in zip(first.student.weights(), second.student.weights(), strict=True))


@pytest.mark.parametrize("kind", ["fewer weights", "a field more", "no checkpoint"])
def test_a_checkpoint_of_another_recipe_is_refused_and_changes_nothing(teacher_directory, texts, tmp_path, kind):
    file, run = tmp_path / "checkpoint.pt", begin(teacher_directory, texts)
    train(run, 1)
    state = run.state()
    torch.save(state | ({"weights": state["weights"][4:]} if kind == "fewer weights" else {"softness": 1.0}), file)
    if kind == "no checkpoint":
        file.write_bytes(b"no checkpoint")
    before, fresh = file.read_bytes(), begin(teacher_directory, texts)
    weights = [weight.detach().clone() for weight in fresh.student.weights()]
    said = f"{file} is of another recipe or model; remove it to begin anew, or choose another place with --work"
    with pytest.raises(InputError, match=said):
        fresh.resume(file)
    assert all(torch.equal(*pair) for pair in zip(fresh.student.weights(), weights, strict=True))
    assert (fresh.run.step, file.read_bytes() == before) == (0, True)


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [
        ("seed", 3, 4),
        ("sparsity", 0.8, 0.85),
        ("rows a step", 4, 8),
        ("rows of chats", 20, 19),
        ("recipe", 1, healing.RECIPE),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(teacher_directory, texts, tmp_path, name, was, now):
    """Steps depend on them all; whoever would go on is told which one differs."""
    file, run = tmp_path / "checkpoint.pt", begin(teacher_directory, texts)
    run.save(file)
    if name == "recipe":
        torch.save((state := run.state()) | {"settings": state["settings"] | {"recipe": 1}}, file)
    chats = texts.chats[1:] if name == "rows of chats" else texts.chats
    sparsity, rows, seed = (now if name == one else default for one, default in GIVEN.items())
    other = Healing(run.teacher, texts._replace(chats=chats), sparsity, rows, seed)
    expected = (
        f"{file} was made with {name} {was}, this training has {now}; set it as it was, remove the file to begin anew, "
        "or choose another place with --work"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        other.resume(file)
    assert other.run == Run()


def test_a_killed_save_leaves_the_old_checkpoint(teacher_directory, texts, tmp_path, monkeypatch):
    file = tmp_path / "checkpoint.pt"
    run = begin(teacher_directory, texts)
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


def unrounded(run: Healing, teacher_directory: Path) -> torch.nn.Module:
    """The student in float32, with the teacher's weights as they are on disk where it did not train."""
    exact = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=torch.float32)
    student = run.student.model.float()
    weights = {name: value for name, value in exact.state_dict().items() if not name.endswith("_proj.weight")}
    student.load_state_dict(weights, strict=False)
    return student


def test_the_exported_model_is_the_student(teacher_directory, texts, tmp_path):
    """One threshold for all neurons gives what a threshold for each gave: transformers and dinfer read it so."""
    from dinfer.families import open_checkpoint
    from dinfer.record.generate import load

    run = begin(teacher_directory, texts)
    train(run, 12, whole=12)
    assert run.student.reach.std() > 0.1
    before = [weight.detach().clone() for weight in run.student.weights()]
    export(run, teacher_directory, NoTokenizer(), tmp_path / "healed", judge(run, 1))
    assert all(torch.equal(*pair) for pair in zip(run.student.weights(), before, strict=True))
    spec = open_checkpoint(tmp_path / "healed").spec
    assert (spec.activation, spec.gate_threshold) == ("fatrelu", run.student.threshold)
    ids = torch.from_numpy(texts.held_out_chats)
    student = unrounded(run, teacher_directory)
    remote = AutoModelForCausalLM.from_pretrained(tmp_path / "healed", trust_remote_code=True)
    recorded = load(tmp_path / "healed").model
    with torch.inference_mode():
        expected = student(ids).logits
        for model in (remote, recorded):
            assert (model(ids).logits - expected).norm() / expected.norm() < 1e-4
        assert torch.equal(remote(ids).logits, recorded(ids).logits)


def test_exporting_again_replaces_the_directory(teacher_directory, texts, tmp_path):
    run = begin(teacher_directory, texts)
    for steps in (1, 2):
        train(run, 1)
        figures = judge(run, 1)
        export(run, teacher_directory, NoTokenizer(), tmp_path / "healed", figures)
        assert json.loads((tmp_path / "healed" / "source.json").read_text())["steps"] == steps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed"]
    assert f"{figures['sparsity']:.1%} of its gates" in (tmp_path / "healed" / "README.md").read_text()


def test_nothing_but_a_healed_model_is_replaced(teacher_directory, tmp_path):
    mine = tmp_path / "mine"
    assert checked_out(mine) == mine
    mine.mkdir()
    (mine / "text").write_text("mine")
    with pytest.raises(InputError, match=f"{mine} exists and is no healed model; choose another place with --out"):
        checked_out(mine)
    with pytest.raises(InputError, match="exists and is no healed model"):
        checked_out(teacher_directory)
    for name in ("source.json", "modeling_fatrelu.py"):
        (mine / name).touch()
    assert checked_out(mine) == mine


def test_texts_and_checkpoint_need_a_directory(tmp_path):
    assert made_work(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    expected = f"{tmp_path / 'file'} cannot hold texts and checkpoint (File exists); choose another place with --work"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        made_work(tmp_path / "file")


def test_a_teacher_that_cannot_be_healed_is_refused(teacher_directory, tiny_models, monkeypatch):
    assert checked_teacher(str(teacher_directory), "cpu") == teacher_directory
    with pytest.raises(InputError, match="is of family opt; only gated Llama models are healed"):
        checked_teacher(str(tiny_models["opt"]), "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device 'cuda' is not available here; heal with --device cpu"):
        checked_teacher(str(teacher_directory), "cuda")
    assert provenance(teacher_directory) == {"title": "teacher", "licence": "unknown"}


def test_it_stops_at_its_steps_and_at_its_minutes_and_saves(teacher_directory, texts, tmp_path):
    """Between the steps it is judged on some of what is held out, at the end on all."""
    run, saved = begin(teacher_directory, texts), []

    def save(every: int) -> None:
        saved.append((run.run.step, every))

    heal(run, 3, 60, save, 60, tmp_path / "status")
    assert (run.run.step, saved) == (3, [(3, 1)])
    assert (tmp_path / "status").read_text().startswith("step 3, 66.7% of the training, ")
    heal(run, 3, 60, save, 60, tmp_path / "status")
    assert run.run.step == 3
    heal(run, 1000, run.run.seconds / 60, save, 60, tmp_path / "status")
    assert saved == [(3, 1)] * 3
    heal(run, 5, 60, save, 0, tmp_path / "status")
    assert saved[3:] == [(4, 4), (5, 4), (5, 1)]


def test_it_is_judged_by_the_perplexity_of_what_is_held_out(teacher_directory, texts):
    """Teacher and student as transformers has them, in float32; equal models lose nothing, with no interval."""
    run = begin(teacher_directory, texts)
    train(run, 2)
    figures = judge(run, 1)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=torch.float32)
    for kind, rows in (("text", texts.held_out_english), ("chat", texts.held_out_chats), ("free", texts.held_out_free)):
        ids = torch.from_numpy(rows)
        for model, said in ((teacher, figures["teacher"][kind]), (unrounded(run, teacher_directory), None)):
            with torch.inference_mode():
                expected = float(model(ids, labels=ids).loss.exp())
            assert (said or figures["healed"][kind]) == pytest.approx(expected, rel=0.02)  # products in bfloat16
        value, low, high = figures["ratio"][kind]
        assert low < value < high
        assert value == pytest.approx(figures["healed"][kind] / figures["teacher"][kind])
        assert figures["tokens"][kind] == 4 * 31
    assert judge(run, 2)["tokens"] == {"text": 62, "chat": 62, "free": 62}
    same = losses(run.teacher, ids)
    assert ratio(same, same) == [1, 1, 1]


def test_a_run_begins_at_zero():
    assert vars(Run()) == {"fitted": 0, "step": 0, "seconds": 0.0, "teacher": {}}
