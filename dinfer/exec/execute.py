"""From plan, model and prompt to a real run."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dinfer.errors import InputError
from dinfer.exec.answering import answer
from dinfer.exec.bank import Bank, fill_bank
from dinfer.exec.clock import Clock
from dinfer.exec.decode import Running, decode_token, end_token, settle
from dinfer.exec.estimate import Estimate
from dinfer.exec.graphs import Graphs
from dinfer.exec.host import Host
from dinfer.exec.kernels_gpu import device_ffn
from dinfer.exec.link import CudaLink, EmulatedLink, Transport
from dinfer.exec.predictor import LivePredictor
from dinfer.exec.prefill import timed_prefill
from dinfer.exec.prompts import (
    Chooser,
    Pieces,
    Prompt,
    check_sampling,
    encode,
    listed,
    open_tokenizer,
    sample,
    stop_ids,
)
from dinfer.exec.workers import Workers
from dinfer.families import FAMILIES, TORCH_DTYPES, Checkpoint, open_checkpoint
from dinfer.families.quantise import QUANT_BYTES, row_bytes
from dinfer.machine import PREFILLS
from dinfer.plan import Plan
from dinfer.predictors import Predictors
from dinfer.timeline import Answer, Run, Timeline
from dinfer.trace import Trace

COSTS = ("running", "plan")
"""What decisions believe: the plan's costs kept up to date by what is measured, or the plan's as they are."""

SWITCH_SECONDS = 1e-4
"""How long a Python thread may keep the others from the GIL; Python's own 5 ms cost 5% of the tokens/s on 2 cores."""


def execute(
    plan: Plan,
    model: str | Path,
    prompt: Prompt | Sequence[Prompt] | None = None,
    *,
    replay: Trace | None = None,
    device: str = "cuda",
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = True,
    on_text: Callable[..., None] | None = None,
    cpu_threads: int | None = None,
    predictor: Predictors | None = None,
    costs: str | None = None,
    prefill: str | None = None,
) -> Run:
    """Run ``plan`` on the model in directory ``model`` and return what happened.

    ``prompt`` is text (put into the chat template where the tokenizer has one and ``chat`` is true), token ids, or a
    list of such prompts that are decoded together; see ``Session.generate`` for these and ``on_text``.
    ``replay`` decodes the tokens of a trace instead, with its activity as prediction. ``device`` is "cuda", "cpu"
    (the GPU is a torch CPU device and the link is emulated at the plan machine's rate) or "none" (no GPU: for plans
    that place no neuron there, everything is computed on the CPU). ``temperature`` 0 is
    greedy. ``predictor`` is the one that a "trained" plan names. Raises InputError for a plan of another model or
    predictor, a missing device, an empty prompt, or a context that the plan's KV cache cannot hold. ``costs``, one of
    COSTS, says what decisions believe; by default "plan" for a replay, which then decides as the simulator, else
    "running". ``prefill``, one of PREFILLS, says who computes the prompt's FFNs; by default who is faster by the costs.
    """
    with Session(plan, model, device, cpu_threads, predictor, costs, prefill) as session:
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
        costs: str | None = None,
        prefill: str | None = None,
    ) -> None:
        self.device, self.has_gpu = open_device(device), device != "none"
        if not self.has_gpu:
            check_without_gpu(plan, prefill)
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        plan.check_model(checkpoint.spec, checkpoint.fingerprint if plan.weights else "")
        plan.check_predictor(None if predictor is None else predictor.fingerprint())
        if predictor is not None:
            predictor.check_model(checkpoint.spec, checkpoint.fingerprint if predictor.weights else "")
        self.predictor = predictor
        if costs not in (None, *COSTS):
            raise InputError(f"costs {costs!r} is not one of {', '.join(COSTS)}")
        if prefill not in (None, *PREFILLS):
            raise InputError(f"prefill {prefill!r} is not one of {', '.join(PREFILLS)}")
        self.costs, self.prefill = costs, prefill
        if plan.spec.dtype in QUANT_BYTES:
            row_bytes(plan.spec.hidden, plan.spec.dtype)  # refuses a width that groups do not fit
            if plan.spec.attention_dtype != plan.spec.compute_dtype:
                raise InputError(
                    f"plan counts attention as {plan.spec.attention_dtype or plan.spec.dtype}, a run keeps it in "
                    f"{plan.spec.compute_dtype}; plan with --dtype {plan.spec.dtype}, or with spec.as_run"
                )
        if plan.machine.emulated and self.device.type != "cpu":
            raise InputError(f"plan's machine {plan.machine.name} is emulated; run it with --device cpu")
        self.plan, self.checkpoint = plan, checkpoint
        shared = self.has_gpu and self.device.type == "cpu"
        self.cpu_threads = cpu_threads or max(1, (os.cpu_count() or 1) // (2 if shared else 1))
        self.dense = FAMILIES[plan.spec.family].dense(
            checkpoint, plan.context, self.device, TORCH_DTYPES[plan.spec.compute_dtype]
        )
        self.stacked = None if self.has_gpu else FAMILIES[plan.spec.family].stacked(self.dense)
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
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = True,
        stop: bool = True,
        on_text: Callable[..., None] | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> Run:
        """Decode up to ``max_tokens`` tokens after ``prompt``, ending at the model's end token when ``stop`` is true.

        A list of prompts, at most the plan's ``batch``, is decoded together; a sequence that ends leaves the others.
        Prompt i draws from ``seed + i``. ``on_text`` gets each new piece of text (of a list also which prompt's),
        ``on_logits`` the logits [vocab] that each token was chosen from (of a list [sequences still going, vocab]).
        """
        check_sampling(max_tokens, temperature, top_p)
        self.check_predictions()
        prompts = listed(prompt)
        several = prompts != [prompt]
        tokenizer = open_tokenizer(self.checkpoint) if any(isinstance(p, str) for p in prompts) else None
        encoded = [encode(one, tokenizer, chat) for one in prompts]
        self._check_batch(len(encoded))
        self.check_context(max(map(len, encoded)) + max_tokens)
        stops = stop_ids(self.checkpoint, tokenizer) if stop else set()
        choosers = [Chooser(temperature, top_p, seed + index) for index in range(len(encoded))]
        pieces = [Pieces(tokenizer) for _ in encoded]

        def on_token(index: int, token: int) -> None:
            if on_text is not None and tokenizer is not None:
                piece = pieces[index].add(token)
                on_text(piece, index) if several else on_text(piece)

        def show(rows: torch.Tensor) -> None:
            if on_logits is not None:
                on_logits(rows if several else rows[0])

        run = self.start()
        try:
            logits = torch.stack([timed_prefill(run, i, ids, way=self.prefill) for i, ids in enumerate(encoded)])
            starts = [len(ids) for ids in encoded]
            written = answer(run, logits, starts, choosers, max_tokens, stops, on_token, show)
        finally:
            run.close()
        return self.finish(run, [Answer(_text(tokenizer, ids), tuple(ids)) for ids in written])

    def replay(self, trace: Trace) -> Run:
        """Decode the trace's decode tokens, sequence by sequence, with its activity as what is predicted.

        The plan's ``batch`` of sequences is decoded together, as far as the shortest goes. The cache's state carries
        on over sequences, as in the simulator. Raises InputError when the trace is of another model or its sequences
        lack their prefill.
        """
        self.plan.check_model(trace.spec, trace.meta.get("weights", ""))
        decoded = trace.phase("decode")
        if not len(decoded):
            raise InputError("the trace has no decode token to replay; record with --tokens 1 or more")
        if "batch" in trace.meta:
            raise InputError("the trace is batched already; give it as it was recorded, the plan says --batch")
        self.check_context(int(trace.tokens["position"].max()) + 1)
        batch = self.plan.batch
        groups = decoded.together(batch)
        known = decoded if batch == 1 else decoded.batched(batch)
        sequence = known.tokens["sequence"].to_numpy()
        run = self.start(known, np.concatenate([[True], sequence[1:] != sequence[:-1]]))
        run.going = range(batch)
        try:
            for parts in groups:
                run.clock.pause()
                for index, part in enumerate(parts):
                    timed_prefill(run, index, _prompt_ids(trace, part), way=self.prefill)
                run.clock.resume()
                ids = np.stack([part.tokens["id"] for part in parts], axis=1).tolist()
                positions = np.stack([part.tokens["position"] for part in parts], axis=1).tolist()
                for these, there in zip(ids, positions, strict=True):
                    for logits in decode_token(run, these, there):
                        sample(logits, 0.0, 1.0, None)
                    end_token(run)
            run.clock.pause()
        finally:
            run.close()
        return self.finish(run, [Answer("", tuple(part.tokens["id"].tolist())) for parts in groups for part in parts])

    def check_predictions(self) -> None:
        """Raise InputError when the plan's predictions need a trace."""
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

    def _check_batch(self, prompts: int) -> None:
        if prompts > self.plan.batch:
            raise InputError(
                f"{prompts} prompts are more than the plan's batch of {self.plan.batch}, whose KV is in its budget; "
                f"plan with --batch {prompts}"
            )

    def check_context(self, tokens: int) -> None:
        """Raise InputError when the KV cache cannot hold ``tokens`` tokens."""
        if tokens > self.plan.context:
            raise InputError(
                f"prompt and answer take {tokens} tokens, the plan's KV cache holds {self.plan.context}; "
                f"lower --tokens or plan with --context {tokens}"
            )

    def start(self, replay: Trace | None = None, first: np.ndarray | None = None) -> Running:
        """The loaded model at the plan's placement, its threads started; ``close`` ends them."""
        plan, spec = self.plan, self.plan.spec
        running = (self.costs or ("running" if replay is None else "plan")) == "running"
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - self.cpu_threads))
        sys.setswitchinterval(SWITCH_SECONDS)
        vars(self).pop("last_bank", None)  # two may not fit
        bank = self.last_bank = fill_bank(
            self.checkpoint, plan.placement, spec.dtype, self.device, spec.compute_dtype
        )
        if self.device.type == "cuda" and not bank.host.is_pinned():
            plan = replace(plan, issue="block")  # staged in a pinned block, and timed anew for that
        clock = Clock(self.device)
        link: Transport
        if self.device.type == "cpu":
            rate = plan.machine.emulated_link or plan.machine.h2d
            link = EmulatedLink(bank, rate, plan.group if plan.issue == "copy" else 0, clock.record)
        else:
            link = CudaLink(bank, plan.issue, plan.group, int(plan.placement.slots.max()), clock.measure)
        kv, kernel = empty_kv(plan, self.device), device_ffn(self.device)
        graphs = None
        if graphed(plan, self.device):
            graphs = Graphs(plan, FAMILIES[spec.family], self.dense, [caches[0] for caches in kv], bank, kernel)
        host = None
        if self.stacked is not None:
            shape = (spec.layers, 2, spec.kv_heads, plan.context, spec.head_dim)
            whole = torch.zeros(shape, dtype=TORCH_DTYPES[spec.compute_dtype])  # one block: no layer's is a ring
            kv = [[layer] for layer in whole]
            biases = bank.up_bias, bank.down_bias
            host = Host(plan, self.stacked, bank.host, *biases, whole, self.cpu_threads, clock)
        return Running(
            plan=plan,
            dense=self.dense,
            bank=bank,
            link=link,
            workers=Workers(plan, bank, self.cpu_threads, clock),
            clock=clock,
            device=self.device,
            kv=kv,
            kernel=kernel,
            graphs=graphs,
            state=plan.policy.init(spec, plan.placement, plan.frequency),
            replay=replay,
            first=first,
            predictor=None if self.predictor is None else LivePredictor(self.predictor, self.device),
            replayed=self._replayed(replay),
            estimate=Estimate(plan.costs) if running and host is None else None,
            host=host,
        )

    def _replayed(self, replay: Trace | None) -> np.ndarray | None:
        """What the predictor says of a replayed trace with residuals; without them it is run live."""
        if self.predictor is None or replay is None or replay.hidden is None:
            return None
        return self.predictor.predict(replay)

    def finish(self, run: Running, answers: Sequence[Answer]) -> Run:
        """What ``run``, whose threads have ended, did."""
        for layer in range(self.plan.spec.layers):
            settle(run, layer)
        moves = sorted(run.moves, key=lambda move: move[:2])
        machine = self.plan.machine
        timeline = Timeline.from_spans(
            sorted(run.clock.spans, key=lambda span: span.start_seconds),
            tokens=run.decoded,
            seconds=run.clock.elapsed,
            meta={
                "source": "executed",
                "machine": machine.name,
                "plan": self.plan.fingerprint(),
                "model": self.plan.spec.name,
                "device": _device_name(self.device) if self.has_gpu else "none: the CPU",
                "emulated": self.device.type == "cpu" and self.has_gpu,
                "prefills": run.prefills,
                "prefill": run.ways,
                "issue": run.plan.issue,
                **({} if run.estimate is None else {"believed": run.estimate.believed}),
                "link_bytes_per_second": (machine.emulated_link or machine.h2d).bytes_per_second,
                "torch": torch.__version__,
                "kernels": run.kernel.__module__.rsplit("_", 1)[-1],
                "cpu_threads": self.cpu_threads,
                "torch_threads": torch.get_num_threads(),
                **({"quantisation_errors": run.bank.errors} if run.bank.errors else {}),
            },
        )
        return Run(
            timeline,
            work=np.stack(run.work) if run.work else np.zeros((0, self.plan.spec.layers, 4), np.int32),
            fetch=np.concatenate([move[2] for move in moves]) if moves else np.zeros(0, np.int32),
            evict=np.concatenate([move[3] for move in moves]) if moves else np.zeros(0, np.int32),
            answers=tuple(answers),
        )


def empty_kv(plan: Plan, device: torch.device) -> list[list[torch.Tensor]]:
    """[layer][sequence] caches [2, kv_heads, tokens, head_dim]; a layer with a window keeps no more than it."""
    spec = plan.spec
    kind = TORCH_DTYPES[spec.compute_dtype]
    lengths = [min(plan.context, window or plan.context) for window in spec.windows or (0,) * spec.layers]
    shapes = [(plan.batch, 2, spec.kv_heads, length, spec.head_dim) for length in lengths]
    return [list(torch.zeros(shape, dtype=kind, device=device)) for shape in shapes]


def check_without_gpu(plan: Plan, prefill: str | None) -> None:
    """Raise InputError for what a plan has that a run wholly on the CPU has not."""
    slots = int(plan.placement.slots.sum())
    for found, what, remedy in (
        (slots > 0, f"plan holds {slots} neurons on the GPU", "plan with --vram 0%"),
        (plan.batch > 1, f"plan decodes {plan.batch} sequences together", "plan with --batch 1"),
        (plan.prediction == "trained", "plan has a trained predictor", "plan with --activation exact and without it"),
        (prefill == "stream", "prefill 'stream' goes through the GPU", "leave it out"),
    ):
        if found:
            raise InputError(f"{what}, which --device none cannot do; {remedy} or run with --device cpu")


def open_device(device: str) -> torch.device:
    """The torch device of "cuda", "cpu" or "none"; raises InputError for another name or where there is no GPU."""
    if device not in ("cpu", "cuda", "none"):
        raise InputError(f"device {device!r} is not one of cuda, cpu, none")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device cuda is missing: torch sees no NVIDIA GPU here; "
            "run with --device cpu to emulate one (the link at the plan machine's rate), or see `dinfer doctor`"
        )
    return torch.device("cpu" if device == "none" else device)


def graphed(plan: Plan, device: torch.device) -> bool:
    """Whether a token's dense part runs as CUDA graphs: on a GPU, one sequence at a time."""
    return device.type == "cuda" and plan.batch == 1


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated on the CPU"


def _prompt_ids(trace: Trace, part: Trace) -> list[int]:
    """Ids of what stands before the decode tokens ``part`` of one of the trace's sequences."""
    sequence, position = (int(part.tokens[name].iloc[0]) for name in ("sequence", "position"))
    rows = trace.tokens[(trace.tokens["sequence"] == sequence) & (trace.tokens["position"] < position)]
    if rows["position"].tolist() != list(range(position)):
        raise InputError(f"sequence {sequence} of the trace lacks tokens before its {position}th; record its prefill")
    return rows["id"].tolist()


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
