r"""Conversations of DeepSeek-VL2: the published files hold no template. Host only.

    <bos>system\n\n<|User|>: question\n\n<|Assistant|>:answer<eos><|User|>: …

Pictures stand where their parts do. Each text between two of these marks is encoded on its own,
as in the models' own processor, so an answer is not joined to the colon before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxmm.errors import ModelError, RequestError
from jaxmm.host.chat import ChatTokenizer, Piece
from jaxmm.host.item import Modality
from jaxmm.host.messages import Turn
from jaxmm.models.config import integer
from jaxmm.models.deepseek_vl2.tokens import ASSISTANT, IMAGE, USER, open_tokenizer
from jaxmm.models.json_files import read_json


def load_tokenizer(directory: Path) -> ChatTokenizer:
    """Load the tokenizer, with the conversation's form.

    Raises:
        ModelError: No tokenizer there, or one that cannot be used.
    """
    from tokenizers.processors import TemplateProcessing

    language = read_json(directory / "config.json").get("language_config") or {}
    bos = integer(language, "bos_token_id", 100000, least=0)
    eos = integer(language, "eos_token_id", 100001, least=0)
    backend = open_tokenizer(directory)
    begin, user, assistant = backend.id_to_token(bos), *map(backend.token_to_id, (USER, ASSISTANT))
    if begin is None or user is None or assistant is None:
        raise ModelError(f"config.json: bos_token_id={bos} is no token of tokenizer.json")
    backend.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, bos)])
    form = ChatForm(bos, eos, user, assistant)
    return ChatTokenizer(
        _Backed(backend),
        template=form,
        placeholders={Modality.IMAGE: IMAGE},
    )


class _Backed(NamedTuple):
    """As much of transformers' tokenizer as a conversation without a template needs."""

    backend_tokenizer: Any


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What stands around the turns of a conversation; ids of special tokens."""

    bos: int
    eos: int
    user: int
    assistant: int

    def __call__(self, turns: Sequence[Turn]) -> Iterator[Piece]:
        """Give the pieces of a conversation, opened for the assistant's answer.

        Raises:
            RequestError: A video among them.
        """
        yield self.bos
        for turn in turns:
            match turn.role:
                case "user":
                    yield self.user
                    yield from _pieces(turn, ": ", "\n\n")
                case "assistant":
                    yield self.assistant
                    yield ":"
                    yield from _pieces(turn)
                    yield self.eos
                case _:
                    yield from _pieces(turn, after="\n\n")
        yield self.assistant
        yield ":"


def _pieces(turn: Turn, before: str = "", after: str = "") -> Iterator[Piece]:
    """A turn's content without white space around it, between two texts.

    Where a picture touches what follows it, a line break comes between, as in the prompts that the
    models were trained with.
    """
    kinds = iter(turn.modalities)
    text, touches = before, False
    for part in _stripped(turn.parts):
        if touches and (part is None or not part[:1].isspace()):
            text += "\n"
        touches = part is None
        if part is not None:
            text += part
            continue
        if next(kinds) is not Modality.IMAGE:
            raise RequestError("this model takes no videos; send pictures")
        yield text
        yield Modality.IMAGE
        text = ""
    yield text + after


def _stripped(parts: Sequence[str | None]) -> list[str | None]:
    """Parts without white space before the first and behind the last of them that is not empty."""
    joined: list[str | None] = []
    for part in parts:
        if part is None or not joined or joined[-1] is None:
            joined.append(part)
        else:
            joined[-1] = f"{joined[-1]}{part}"
    if joined and joined[0] is not None:
        joined[0] = joined[0].lstrip()
    if joined and joined[-1] is not None:
        joined[-1] = joined[-1].rstrip()
    return [part for part in joined if part != ""]
