"""Conversations: a turn continues what stands in the KV cache, and answers as if all were given at once."""

import numpy as np
import pytest
from test_execute import make_plan

from dinfer.chat import converse
from dinfer.errors import InputError
from dinfer.exec import Conversation, Session
from dinfer.exec.prompts import Pieces, encode_chat

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="module")
def model(tiny_models, tmp_path_factory):
    """The tiny ReLU model with a tokenizer of 256 words and a chat template."""
    import shutil

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("talk") / "model"
    shutil.copytree(tiny_models["llama-relu"], directory)
    words = ["<unk>", "user", "assistant", "end", *(f"w{number}" for number in range(4, 256))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return directory


def test_a_turn_answers_as_if_all_were_given_at_once(model):
    plan = make_plan(model, 60, cache={"name": "lru"})
    with Session(plan, model, "cpu") as session:
        talk, pieces = Conversation(session), []
        for text in ("w20 w30 w40", "w50", "w60 w70"):
            said = talk.say(text, 8, pieces.append)
            ids = encode_chat(talk.messages[:-1], talk.tokenizer)
            fresh = session.generate(ids, max_tokens=8)
            assert said.ids == fresh.ids
        run = talk.finish()
    assert "".join(pieces) == "".join(answer.text for answer in run.answers)
    assert run.timeline.tokens == sum(len(answer.ids) - 1 for answer in run.answers)
    # of the second and third turn only what is new is prefilled: the last token said, what closes it, and the text
    assert [tokens for tokens, _ in run.timeline.meta["prefills"]] == [6, 6, 7]


def test_a_turn_that_does_not_fit_is_refused_and_the_talk_goes_on(model, capsys):
    plan = make_plan(model, 60, context=40)
    with Session(plan, model, "cpu") as session:
        talk = Conversation(session)
        asked = iter(["w20", "", "w4 " * 50, "w30", "/quit", "w40"])
        converse(talk, 5, lambda: next(asked))
        assert [message["content"] for message in talk.messages[::2]] == ["w20", "w30"]
        run = talk.finish()
    shown = capsys.readouterr()
    assert shown.out == "".join(answer.text + "\n" for answer in run.answers)
    assert "the plan's KV cache holds 40" in shown.err
    assert next(asked) == "w40"
    with Session(plan, model, "cpu") as session:
        talk = Conversation(session)
        converse(talk, 5, end_of_input)
        with pytest.raises(InputError, match="^prompt is empty; say something$"):
            talk.say(" ")
        talk.finish()


def end_of_input():
    raise EOFError


def test_a_character_of_several_tokens_comes_when_it_is_complete():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    for text in ("plain", "né — 火車 🚂", "🚂🚃"):
        pieces = Pieces(Bytes())
        parts = [pieces.add(token) for token in text.encode()]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)
        assert np.count_nonzero(np.array(parts) == "") == len(text.encode()) - len(text)
