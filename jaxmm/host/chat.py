"""Chat messages to token ids, through the checkpoint's own template. Host only."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.errors import ModelError, PlaceholderError, RequestError
from jaxmm.host.item import Modality
from jaxmm.host.messages import Turn, read_messages, read_text
from jaxmm.host.special_tokens import SpecialTokens, unused_character
from jaxmm.host.token_bytes import bytes_of_tokens
from jaxmm.host.tool_turns import calls_as_text, tools_as_text
from jaxmm.host.tools import Tool, read_tools, tools_text

_PLACEHOLDERS = {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"}
"""Spelling of the tokens that mark an item's place, where config.json does not name them."""
_PROBE = "probe"

Piece = str | int | Modality
"""A text, encoded on its own; the id of a special token; or the place of an item."""
ChatForm = Callable[[Sequence[Turn]], Iterable[Piece]]
"""A conversation's pieces, for a family whose files hold no template."""


class EncodedChat(NamedTuple):
    """A rendered conversation, its images not yet expanded."""

    ids: npt.NDArray[np.int64]
    """int64[T0]: one placeholder id for each image or video."""
    slots: npt.NDArray[np.int64]
    """int64[I]: index into `ids` of each item's placeholder, in the order of the parts."""


class ChatTokenizer:
    """Tokenizer and chat template of one checkpoint.

    Special tokens come from the template alone. What a caller's text spells, in any turn, is
    encoded as plain text: it binds no image, ends no turn and opens none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | ChatForm | None,
        placeholders: Mapping[Modality, str] = _PLACEHOLDERS,
    ) -> None:
        """Take over a transformers tokenizer; its backend is changed and must not be shared.

        Args:
            tokenizer: One with a `tokenizers` backend.
            template: Jinja source, or a family's own form; None for a checkpoint without either.
            placeholders: Spelling of the token that marks an item's place, by what the item is.

        Raises:
            ModelError: The tokenizer cannot be used for chat; the message says why.
        """
        self._tokenizer = tokenizer
        self._template = template if isinstance(template, str) else None
        self._form = None if isinstance(template, str) else template
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._specials = SpecialTokens(_protect(self._backend, placeholders.values()))
        self._check_segmentation()
        self.placeholder_id: int | None = self._specials.ids.get(placeholders[Modality.IMAGE])
        self._kinds: dict[int, Modality] = {
            self._specials.ids[token]: kind
            for kind, token in placeholders.items()
            if token in self._specials.ids
        }
        self.special_ids: frozenset[int] = frozenset(self._specials.ids.values())
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id. Embeddings may have more rows: never sample those."""
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        self._takes_strings = self._shows(_PROBE)
        self._takes_tools = self._shows_tools()
        self._takes_calls = self._shows_calls()

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path,
        *,
        image_token: str = "",
        rewrite: Callable[[str], str] = lambda template: template,
    ) -> "ChatTokenizer":
        """Load a Hugging Face directory; needs no torch and no network.

        Args:
            directory: With the tokenizer, its template, and config.json.
            image_token: Spelling of the token that marks an image's place; empty: the one that
                config.json names.
            rewrite: What a family makes of the template.

        Raises:
            ModelError: No tokenizer there, or one that cannot be used.
        """
        # transformers would advise every user to install torch, which jaxmm has no need of
        logging.getLogger("transformers").addFilter(_is_not_about_torch)
        from transformers import AutoTokenizer  # over a second of imports, wanted only here

        directory = Path(directory)
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as e:
            raise ModelError(f"no tokenizer can be loaded from {str(directory)!r}: {e}") from e
        config = _read_json(directory / "config.json")
        placeholders = dict(_PLACEHOLDERS)
        for kind in placeholders:
            token_id = config.get(f"{kind.value}_token_id")
            token = None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)
            placeholders[kind] = token or placeholders[kind]
        placeholders[Modality.IMAGE] = image_token or placeholders[Modality.IMAGE]
        template = _find_template(directory, tokenizer)
        return cls(
            tokenizer,
            template=None if template is None else rewrite(template),
            placeholders=placeholders,
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedChat:
        """Render a conversation, opened for the assistant's answer, and encode it.

        Args:
            messages: Turns as `jaxmm.request.Request.messages` describes them.
            tools: What the model is told that it may call; see `jaxmm.host.tools`. A template
                that says nothing of tools or of calls is given them as text.

        Raises:
            PlaceholderError: The template does not place each image and video once, in order.
            RequestError: No template, or messages that it cannot take.
        """
        if self._template is None and self._form is None:
            raise RequestError(
                "this model has no chat template; send a raw prompt, or add chat_template.jinja "
                "to its directory"
            )
        turns, listed = read_messages(messages), read_tools(tools)
        if not self._takes_calls:
            turns = calls_as_text(turns)
        if listed and not self._takes_tools:
            turns, listed = tools_as_text(turns, listed), ()
        if self._form is not None:
            ids, slots = self._encode_pieces(self._form(turns))
        else:
            ids, slots = self._encode_template(turns, listed)
        wanted = [kind for turn in turns for kind in turn.modalities]
        placed = [self._kinds[ids[slot]] for slot in slots]
        for kind in _PLACEHOLDERS:
            if placed.count(kind) != wanted.count(kind):
                raise PlaceholderError(
                    f"the messages have {wanted.count(kind)} {kind.value}s and the chat template "
                    f"placed {placed.count(kind)}"
                )
        if placed != wanted:
            raise PlaceholderError("the chat template changes the order of images and videos")
        return EncodedChat(np.array(ids, np.int64), np.array(slots, np.int64))

    def encode_text(self, text: str) -> npt.NDArray[np.int64]:
        """Encode a raw prompt, int64[T]; a special token that it spells is plain text here too.

        Raises:
            RequestError: The text cannot be encoded.
        """
        self.encode_plain(read_text("the prompt", text))
        # again, with what the tokenizer itself puts around a text (a beginning-of-text id)
        return np.array(self._ids(text, add_special_tokens=True), np.int64)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in the middle of a prompt.

        Raises:
            RequestError: It cannot be encoded without a special token.
        """
        ids = self._ids(text)
        if not self.special_ids.isdisjoint(ids):
            raise RequestError("a text spells a special token that cannot be encoded as plain text")
        return ids

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """UTF-8 bytes that each id stands for, [vocab_size]; a character may span several ids.

        Raises:
            ModelError: The tokenizer is not byte-level.
        """
        return bytes_of_tokens(self._backend, self.vocab_size)

    def _encode_template(
        self, turns: Sequence[Turn], tools: Sequence[Tool]
    ) -> tuple[list[int], list[int]]:
        """Ids of a conversation by the Jinja template, and where its placeholders are."""
        assert self._template is not None, "there is a template"
        texts = [text for turn in turns for text in turn.texts]
        mark = unused_character([self._template, tools_text(tools), *texts])
        rendered = self._render(
            [self._message(turn, mark) for turn in turns],
            [self._shielded(tool.definition, mark) for tool in tools],
        )
        return self._encode(rendered, mark)

    def _encode_pieces(self, pieces: Iterable[Piece]) -> tuple[list[int], list[int]]:
        """The same of a family's own form."""
        places = {kind: token for token, kind in self._kinds.items()}
        ids: list[int] = []
        slots: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += self.encode_plain(piece)
            elif isinstance(piece, Modality):
                slots.append(len(ids))
                ids.append(places[piece])
            else:
                ids.append(piece)
        return ids, slots

    def _message(self, turn: Turn, mark: str) -> dict[str, Any]:
        message = {"role": turn.role, "content": self._content(turn, mark)}
        if turn.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": self._shielded(call.arguments, mark),
                    },
                }
                for call in turn.calls
            ]
        return message

    def _shielded(self, value: Any, mark: str) -> Any:
        """JSON with every string in it shielded."""
        if isinstance(value, str):
            return self._specials.shield(value, mark)
        if isinstance(value, Mapping):
            return {self._shielded(k, mark): self._shielded(v, mark) for k, v in value.items()}
        if isinstance(value, Sequence):
            return [self._shielded(v, mark) for v in value]
        return value

    def _content(self, turn: Turn, mark: str) -> Any:
        """Give the turn's content in a form that the template takes, the caller's if it does."""
        shielded = [None if p is None else self._specials.shield(p, mark) for p in turn.parts]
        if self._takes_parts and not (turn.is_string and self._takes_strings):
            kinds = iter(turn.modalities)
            return [
                {"type": next(kinds).value} if text is None else {"type": "text", "text": text}
                for text in shielded
            ]
        if None in shielded:
            raise RequestError(
                "this model's chat template takes text alone; remove the images and videos"
            )
        return "".join(text for text in shielded if text is not None)

    def _render(self, turns: list[dict[str, Any]], tools: Sequence[Any] = ()) -> str:
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(
                turns,
                tools=list(tools) or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError) as e:
            raise RequestError(f"the chat template refuses these messages: {e}") from e
        return str(rendered)

    def _shows(self, content: object) -> bool:
        """Say whether the template takes this form of content for its text."""
        if self._template is None:
            return False
        try:
            rendered = self._render([{"role": "user", "content": content}])
        except RequestError:
            return False
        return _PROBE in rendered and "'text'" not in rendered

    def _shows_tools(self) -> bool:
        """Say whether the template lists tools."""
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
        return self._shows_in(
            [{"role": "user", "content": self._probe_content()}],
            [{"type": "function", "function": function}],
        )

    def _shows_calls(self) -> bool:
        """Say whether the template writes the calls of an assistant's turn."""
        function = {"name": _PROBE, "arguments": {}}
        call = {"type": "function", "function": function}
        empty = self._probe_content()
        return self._shows_in(
            [
                {"role": "user", "content": empty},
                {"role": "assistant", "content": empty, "tool_calls": [call]},
                {"role": "tool", "content": empty},
            ]
        )

    def _shows_in(self, turns: list[dict[str, Any]], tools: Sequence[Any] = ()) -> bool:
        if self._template is None:
            return False
        try:
            return _PROBE in self._render(turns, tools)
        except RequestError:
            return False

    def _probe_content(self) -> object:
        """A short content in a form that the template takes."""
        return "a" if self._takes_strings else [{"type": "text", "text": "a"}]

    def _encode(self, rendered: str, mark: str) -> tuple[list[int], list[int]]:
        """Encode a rendering: its ids, and where among them the placeholders are."""
        ids: list[int] = []
        slots: list[int] = []
        for stretch, special in self._specials.cut(rendered):
            ids += self.encode_plain(stretch.replace(mark, ""))
            if special is not None:
                if special in self._kinds:
                    slots.append(len(ids))
                ids.append(special)
        return ids, slots

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode, by the one method of the tokenizer that lets other threads run meanwhile: a text
        of a megabyte takes a second."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _check_segmentation(self) -> None:
        """Text between special tokens must encode alone as it does within the whole."""
        text = "a " + " b ".join(self._specials.ids) + " b"
        self._backend.encode_special_tokens = False
        whole = self._ids(text)
        self._backend.encode_special_tokens = True
        pieces: list[int] = []
        for stretch, special in self._specials.cut(text):
            pieces += self._ids(stretch)
            pieces += [] if special is None else [special]
        if pieces != whole:
            raise ModelError("the tokenizer joins text with special tokens; jaxmm needs them apart")


def _protect(backend: Any, placeholders: Iterable[str]) -> dict[str, int]:
    """Make placeholders special tokens, and list all that have two characters or more."""
    from tokenizers import AddedToken

    for token in placeholders:
        if backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    added = backend.get_added_tokens_decoder()
    return {t.content: i for i, t in added.items() if t.special and len(t.content) > 1}


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _find_template(directory: Path, tokenizer: Any) -> str | None:
    """The processor's template if there is one, or the tokenizer's, as transformers prefers."""
    legacy = _read_json(directory / "chat_template.json").get("chat_template")
    if legacy is not None and not (directory / "chat_template.jinja").exists():
        return str(legacy)
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as e:
        raise ModelError(f"{path.name} is not valid JSON: {e}") from e
