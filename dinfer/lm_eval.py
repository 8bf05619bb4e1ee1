"""lm-evaluation-harness on the executor: the model ``dinfer`` of the harness, from a plan and its model.

    python -m dinfer.lm_eval run --model dinfer --model_args plan=out/plan.json,model=smollm2 --tasks rte,piqa

is the harness's own command line with this model added: it finds models only by what is registered in its process, so
that plain ``lm_eval`` does not know this one. Needs the extra ``quality``.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dinfer.errors import InputError
from dinfer.exec.execute import Session
from dinfer.exec.quality import Scorer, check_ways, ways_of
from dinfer.plan import Plan
from dinfer.predictors import Predictors

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise InputError("lm-evaluation-harness is not installed; install dinfer[quality]") from None


@register_model("dinfer")
class Harness(TemplateLM):
    """The plan's model as the harness asks it: log likelihoods of texts, and greedy continuations.

    ``way`` is one of exec.quality.WAYS, by default the last that the plan has: as it decodes; ``predictor`` is the
    directory of the trained one that the plan names. Texts longer than the plan's context lose their beginning. Log
    likelihoods are computed one text at a time, so that the harness's batch size has no effect; continuations are
    always decoded as the plan says. Raises InputError for a way that the plan does not have, or for another predictor
    than the plan's.
    """

    def __init__(
        self,
        plan: str,
        model: str,
        way: str | None = None,
        device: str = "cpu",
        predictor: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        from transformers import AutoTokenizer

        from dinfer.record.fetch import resolve_model

        super().__init__()
        read, directory = Plan.load(plan), resolve_model(model)
        trained = None if predictor is None else Predictors.load(predictor)
        self.way = way or ways_of(read)[-1]
        self.session = Session(read, directory, device, predictor=trained)
        check_ways(self.session, [self.way])
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.max_length = read.context
        self.scorer: Scorer | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, which stands before one that has no context."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the beginning's token where there is one."""
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """By which the harness keeps its cached requests apart."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of ``string``; special tokens as the tokenizer does where nothing is said."""
        settings = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer(string, verbose=False, **settings)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as the tokenizer's template writes it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log likelihood of each text in windows of the plan's context, each token predicted once."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(likelihood for likelihood, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the plan's greedy decoding writes after each context, up to the first of the request's stop texts."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        tokens = int(settings.get("max_gen_toks", 64))
        ids = self.tok_encode(context)[-(self.max_length - tokens) :]
        written = list(self.session.generate(ids, max_tokens=tokens).ids)
        if self.eot_token_id in written:  # prompts of ids end at the model's end token only
            written = written[: written.index(self.eot_token_id)]
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0] if stop else text
        return text

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log likelihood of each continuation, and whether it is what greedy decoding would write."""
        from tqdm import tqdm

        scorer = Scorer(self.session)
        try:
            quiet = disable_tqdm or len(requests) < 2
            return [self._scored(scorer, *each[1:]) for each in tqdm(requests, "scoring", disable=quiet)]
        finally:
            scorer.close()

    def _scored(self, scorer: Scorer, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = (context + continuation)[-(self.max_length + 1) :]
        prompt = max(1, len(ids) - len(continuation))
        rows = torch.log_softmax(scorer.logits(ids[:-1], self.way, prompt)[-len(continuation) :], dim=-1)
        wanted = torch.tensor(continuation, device=rows.device)
        likelihood = rows.gather(1, wanted[:, None]).sum()
        return float(likelihood), bool((rows.argmax(dim=1) == wanted).all())


def main() -> None:
    """The harness's command line, which now knows the model ``dinfer``."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
