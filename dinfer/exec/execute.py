"""From plan, model and prompt to a real run."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dinfer.errors import InputError
from dinfer.exec import kernels_gpu
from dinfer.exec.bank import Bank, fill_bank
from dinfer.exec.clock import Clock
from dinfer.exec.decode import Running, decode_token, end_token
from dinfer.exec.link import CudaLink, EmulatedLink, Transport
from dinfer.exec.predictor import LivePredictor
from dinfer.exec.workers import Workers
from dinfer.families import FAMILIES, TORCH_DTYPES, Checkpoint, open_checkpoint
from dinfer.machine import PREFILL_CHUNK
from dinfer.plan import Plan
from dinfer.predictors import Predictors
from dinfer.timeline import Run, Timeline
from dinfer.trace import Trace

SWITCH_SECONDS = 1e-4
"""How long a Python thread may keep the others from the GIL; Python's own 5 ms cost 5% of the tokens/s on 2 cores."""


def execute(
    plan: Plan,
    model: str | Path,
    prompt: str | Sequence[int] | None = None,
    *,
    replay: Trace | None = None,
    device: str = "cuda",
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = True,
    on_text: Callable[[str], None] | None = None,
    cpu_threads: int | None = None,
    predictor: Predictors | None = None,
) -> Run:
    """Run ``plan`` on the model in directory ``model`` and return what happened.

    ``prompt`` is text (put into the chat template where the tokenizer has one and ``chat`` is true) or token ids;
    ``replay`` decodes the tokens of a trace instead, with its activity as prediction. ``device`` is "cuda" or "cpu";
    on "cpu" the GPU is a torch CPU device and the link is emulated at the plan machine's rate. ``temperature`` 0 is
    greedy. ``on_text`` gets each new piece of text. ``predictor`` is the one that a "trained" plan names.
    Raises InputError for a plan of another model or predictor, a missing device, an empty prompt, or a context that
    the plan's KV cache cannot hold.
    """
    with Session(plan, model, device, cpu_threads, predictor) as session:
        if replay is not None:
            return session.replay(replay)
        return session.generate(
            prompt if prompt is not None else "", max_tokens=max_tokens, temperature=temperature, top_p=top_p,
            seed=seed, chat=chat, on_text=on_text,
        )  # fmt: skip


class Session:
    """A loaded model under one plan; each run starts from the plan's placement again.

    ``last_bank`` is where the last run left the neurons.
    """

    def __init__(
        self,
        plan: Plan,
        model: str | Path | Checkpoint,
        device: str = "cuda",
        cpu_threads: int | None = None,
        predictor: Predictors | None = None,
    ) -> None:
        self.device = open_device(device)
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        plan.check_model(checkpoint.spec, checkpoint.fingerprint if plan.weights else "")
        plan.check_predictor(None if predictor is None else predictor.fingerprint())
        if predictor is not None:
            predictor.check_model(checkpoint.spec, checkpoint.fingerprint if predictor.weights else "")
        self.predictor = predictor
        if plan.spec.dtype not in TORCH_DTYPES:
            raise InputError(f"dtype {plan.spec.dtype} cannot be run; plan with one of {', '.join(TORCH_DTYPES)}")
        if plan.machine.emulated and self.device.type != "cpu":
            raise InputError(f"plan's machine {plan.machine.name} is emulated; run it with --device cpu")
        self.plan, self.checkpoint = plan, checkpoint
        self.cpu_threads = cpu_threads or max(1, (os.cpu_count() or 1) // (2 if self.device.type == "cpu" else 1))
        self.dense = FAMILIES[plan.spec.family].dense(
            checkpoint, plan.context, self.device, TORCH_DTYPES[plan.spec.dtype]
        )
        self.last_bank: Bank
        self._torch_threads = torch.get_num_threads()
        self._switch_seconds = sys.getswitchinterval()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._torch_threads)
        sys.setswitchinterval(self._switch_seconds)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = True,
        stop: bool = True,
        on_text: Callable[[str], None] | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> Run:
        """Decode up to ``max_tokens`` tokens after ``prompt``, ending at the model's end token when ``stop`` is true.

        ``on_text`` gets each new piece of text, ``on_logits`` the logits [vocab] that each token was chosen from.
        """
        _check_sampling(max_tokens, temperature, top_p)
        policy = self.plan.policy
        if policy.clairvoyant or self.plan.prediction == "oracle" and policy.moves:
            raise InputError(
                f"plan predicts by {self.plan.prediction!r} with cache {policy.name!r}: that knows the future and runs "
                "only with --replay TRACE; plan with --prediction previous and another --cache"
            )
        if self.plan.activation == "predicted" and self.predictor is None:
            raise InputError(
                "activation 'predicted' needs predictions; run with --replay TRACE or plan with --activation exact or "
                "with a trained --predictor"
            )
        ids, tokenizer = self._encode(prompt, chat)
        self._check_context(len(ids) + max_tokens)
        generator = torch.Generator().manual_seed(seed)
        stops = _stop_ids(self.checkpoint, tokenizer) if stop else set()
        run = self._start(None)
        try:
            logits = timed_prefill(run, ids)
            new: list[int] = []
            run.clock.resume()
            while True:
                token = sample(logits, temperature, top_p, generator)
                if new:
                    end_token(run)
                new.append(token)
                if on_logits is not None:
                    on_logits(logits)
                if on_text is not None and tokenizer is not None:
                    on_text(_new_text(tokenizer, new))
                if len(new) == max_tokens or token in stops:
                    break
                logits = decode_token(run, token, len(ids) + len(new) - 1)
            run.clock.pause()
        finally:
            run.close()
        text = tokenizer.decode(new, skip_special_tokens=True) if tokenizer is not None else ""
        return self._finish(run, text, tuple(new))

    def replay(self, trace: Trace) -> Run:
        """Decode the trace's decode tokens, sequence by sequence, with its activity as what is predicted.

        The cache's state carries on over sequences, as in the simulator. Raises InputError when the trace is of
        another model or its sequences lack their prefill.
        """
        self.plan.check_model(trace.spec, trace.meta.get("weights", ""))
        decoded = trace.phase("decode")
        if not len(decoded):
            raise InputError("the trace has no decode token to replay; record with --tokens 1 or more")
        self._check_context(int(trace.tokens["position"].max()) + 1)
        sequence = decoded.tokens["sequence"].to_numpy()
        first = np.concatenate([[True], sequence[1:] != sequence[:-1]])
        run = self._start(decoded, first)
        try:
            ids, positions = decoded.tokens["id"].tolist(), decoded.tokens["position"].tolist()
            for row, (token, position) in enumerate(zip(ids, positions, strict=True)):
                if first[row]:
                    run.clock.pause()
                    timed_prefill(run, _prompt_ids(trace, int(sequence[row]), position))
                    run.clock.resume()
                sample(decode_token(run, token, position), 0.0, 1.0, None)
                end_token(run)
            run.clock.pause()
        finally:
            run.close()
        return self._finish(run, "", tuple(decoded.tokens["id"].tolist()))

    def _encode(self, prompt: str | Sequence[int], chat: bool) -> tuple[list[int], Any]:
        tokenizer = None
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("prompt is empty; give --prompt some text")
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.checkpoint.directory)
            if chat and tokenizer.chat_template:
                turn = [{"role": "user", "content": prompt}]
                prompt = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
            ids = tokenizer(prompt, add_special_tokens=not chat or not tokenizer.chat_template)["input_ids"]
        else:
            ids = list(prompt)
        if not ids:
            raise InputError("prompt has no token; give --prompt some text")
        return ids, tokenizer

    def _check_context(self, tokens: int) -> None:
        if tokens > self.plan.context:
            raise InputError(
                f"prompt and answer take {tokens} tokens, the plan's KV cache holds {self.plan.context}; "
                f"lower --tokens or plan with --context {tokens}"
            )

    def _start(self, replay: Trace | None, first: np.ndarray | None = None) -> Running:
        plan, spec = self.plan, self.plan.spec
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - self.cpu_threads))
        sys.setswitchinterval(SWITCH_SECONDS)
        bank = self.last_bank = fill_bank(self.checkpoint, plan.placement, spec.dtype, self.device)
        clock = Clock(self.device)
        link: Transport
        if self.device.type == "cpu":
            rate = plan.machine.emulated_link or plan.machine.h2d
            link = EmulatedLink(bank, rate, plan.issue == "copy", clock.record)
        else:
            link = CudaLink(bank, plan.issue, int(plan.placement.slots.max()), clock.record)
        shape = (spec.layers, 2, spec.kv_heads, plan.context, spec.head_dim)
        return Running(
            plan=plan,
            dense=self.dense,
            bank=bank,
            link=link,
            workers=Workers(plan, bank, self.cpu_threads, clock),
            clock=clock,
            kv=torch.zeros(shape, dtype=TORCH_DTYPES[spec.dtype], device=self.device),
            state=plan.policy.init(spec, plan.placement, plan.frequency),
            replay=replay,
            first=first,
            predictor=None if self.predictor is None else LivePredictor(self.predictor, self.device),
            replayed=self._replayed(replay),
        )

    def _replayed(self, replay: Trace | None) -> np.ndarray | None:
        """What the predictor says of a replayed trace with residuals; without them it is run live."""
        if self.predictor is None or replay is None or replay.hidden is None:
            return None
        return self.predictor.predict(replay)

    def _finish(self, run: Running, text: str, ids: tuple[int, ...]) -> Run:
        moves = sorted(run.moves, key=lambda move: move[:2])
        machine = self.plan.machine
        timeline = Timeline.from_spans(
            sorted(run.clock.spans, key=lambda span: span.start_seconds),
            tokens=run.clock.token,
            seconds=run.clock.elapsed,
            meta={
                "source": "executed",
                "machine": machine.name,
                "plan": self.plan.fingerprint(),
                "model": self.plan.spec.name,
                "device": _device_name(self.device),
                "emulated": self.device.type == "cpu",
                "prefills": run.prefills,
                "link_bytes_per_second": (machine.emulated_link or machine.h2d).bytes_per_second,
                "torch": torch.__version__,
                "cpu_threads": self.cpu_threads,
                "torch_threads": torch.get_num_threads(),
            },
        )
        return Run(
            timeline,
            work=np.stack(run.work) if run.work else np.zeros((0, self.plan.spec.layers, 4), np.int32),
            fetch=np.concatenate([move[2] for move in moves]) if moves else np.zeros(0, np.int32),
            evict=np.concatenate([move[3] for move in moves]) if moves else np.zeros(0, np.int32),
            text=text,
            ids=ids,
        )


def timed_prefill(run: Running, ids: Sequence[int]) -> torch.Tensor:
    """``prefill``, its tokens and seconds kept in ``run.prefills``."""
    start = time.perf_counter()
    logits = prefill(run, ids)
    if run.kv.device.type == "cuda":
        torch.cuda.synchronize()
    run.prefills.append([len(ids), time.perf_counter() - start])
    return logits


def prefill(run: Running, ids: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] after the prompt ``ids``; the FFNs run dense on the host, where all neurons lie."""
    spec, family = run.plan.spec, run.family
    logits = torch.empty(0)
    for start in range(0, len(ids), PREFILL_CHUNK):
        chunk = torch.tensor(ids[start : start + PREFILL_CHUNK], device=run.kv.device)
        hidden = family.embed(run.dense, chunk, start)
        for layer in range(spec.layers):
            hidden = family.attention(run.dense, layer, hidden, run.kv[layer], start)
            x = family.ffn_input(run.dense, layer, hidden).to(run.bank.host.device)
            bias = None if run.bank.up_bias is None else run.bank.up_bias[layer].to(x.dtype)
            total, _ = kernels_gpu.ffn(run.bank.host[layer], x, spec, bias, float(run.value_thresholds[layer]))
            hidden = hidden + total.to(hidden.device)
            if run.bank.down_bias is not None:
                hidden = hidden + run.bank.down_bias[layer]
        logits = family.head(run.dense, hidden[-1:])[0]
    return logits


def sample(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    """The next token id from ``logits`` [vocab]: the largest at temperature 0, else drawn from the top ``top_p``."""
    if temperature <= 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    ordered, order = probabilities.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered > top_p] = 0
    return int(order[torch.multinomial(ordered, 1, generator=generator)])


def _check_sampling(max_tokens: int, temperature: float, top_p: float) -> None:
    if max_tokens < 1:
        raise InputError(f"tokens is {max_tokens}; it must be at least 1")
    if not temperature >= 0:
        raise InputError(f"temperature is {temperature:g}; it must be at least 0 (0 is greedy)")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p:g}; it must lie above 0 and be at most 1")


def open_device(device: str) -> torch.device:
    """The torch device "cpu" or "cuda"; raises InputError for another name or where there is no GPU."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is not one of cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device cuda is missing: torch sees no NVIDIA GPU here; "
            "run with --device cpu to emulate one (the link at the plan machine's rate), or see `dinfer doctor`"
        )
    return torch.device(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated on the CPU"


def _prompt_ids(trace: Trace, sequence: int, position: int) -> list[int]:
    rows = trace.tokens[(trace.tokens["sequence"] == sequence) & (trace.tokens["position"] < position)]
    if rows["position"].tolist() != list(range(position)):
        raise InputError(f"sequence {sequence} of the trace lacks tokens before its {position}th; record its prefill")
    return rows["id"].tolist()


def _stop_ids(checkpoint: Checkpoint, tokenizer: Any) -> set[int]:
    stop = checkpoint.config.get("eos_token_id")
    stops = set(stop) if isinstance(stop, list) else {stop}
    if tokenizer is not None:
        stops.add(tokenizer.eos_token_id)
    return {stop for stop in stops if stop is not None}


def _new_text(tokenizer: Any, ids: list[int]) -> str:
    before = tokenizer.decode(ids[:-1], skip_special_tokens=True)
    return tokenizer.decode(ids, skip_special_tokens=True)[len(before) :]
