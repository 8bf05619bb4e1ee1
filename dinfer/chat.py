"""A conversation in the terminal: read a line, stream the answer, until /quit."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dinfer.errors import InputError

if TYPE_CHECKING:
    from dinfer.exec.conversation import Conversation

HELP = "type and press enter; /quit, or end of input, ends the conversation"


def converse(conversation: "Conversation", tokens: int, ask: Callable[[], str] | None = None) -> None:
    """Answer what ``ask`` returns (default: a prompt on the terminal), turn by turn, streaming to stdout.

    A turn that the KV cache cannot hold is refused with a line, and the conversation goes on.
    """
    ask = ask or _ask
    print(HELP, file=sys.stderr)
    while True:
        try:
            text = ask().strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if text == "/quit":
            return
        if not text:
            continue
        try:
            conversation.say(text, tokens, lambda piece: print(piece, end="", flush=True))
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        print()


def _ask() -> str:
    from rich.console import Console

    return Console(stderr=True).input("[bold]> [/bold]")
