"""Grammars that an output must match, followed token by token and told as token masks. Host only.

Grammars are llguidance's: its Lark dialect, or the JSON that `json_grammar` makes of a schema.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from jaxmm.errors import GrammarError

TokenMask = npt.NDArray[np.uint32]
"""uint32[ceil(V / 32)]: bit i % 32 of word i // 32 says whether token i may come next."""

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{1,40}", "lenient": False}
"""White space is bounded: a model that cannot decide would else write it up to `max_tokens`."""

_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_MAX_MESSAGE = 300


def mask_words(vocab_size: int) -> int:
    """Words of a token mask."""
    return -(-vocab_size // 32)


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON texts that a JSON schema (draft 2020-12) allows.

    Raises:
        GrammarError: Not a schema. What llguidance does not implement is refused by `compile`.
    """
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("a JSON schema must be an object, or true for any JSON")
    grammar: str = LLMatcher.grammar_from_json_schema(json_text(schema))
    return grammar


def json_text(schema: Mapping[str, Any] | bool) -> str:
    """A schema as it stands in a grammar, with our options in place of the caller's."""
    schema = {} if schema is True else schema
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as e:
        raise GrammarError(f"the schema cannot be written as JSON: {e}") from None


class Grammars:
    """Compiles grammars for one tokenizer; thread-safe."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """Take the tokenizer's parts.

        Args:
            token_bytes: UTF-8 bytes of each id.
            special_ids: Ids that no grammar's text can be made of.
            eos_ids: Ids that end an output where the grammar allows its end.
            encode: Text to ids.
        """
        self._tokenizer = None
        if eos_ids:  # 0.7 s for 150,000 tokens; threads may share it
            source = TokenizerWrapper(_Source(token_bytes, special_ids, eos_ids, encode))
            self._tokenizer = LLTokenizer(source, eos_token=list(eos_ids))

    def compile(self, grammar: str) -> "Matcher":
        """Compile a grammar to a matcher at its beginning.

        Raises:
            GrammarError: Not a grammar, unsatisfiable, too large, or beyond what is implemented.
        """
        if self._tokenizer is None:
            raise GrammarError("this model names no token that ends an output; grammars need one")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(f"the grammar is refused: {_short(matcher.get_error())}")
        return Matcher(matcher, mask_words(self._tokenizer.vocab_size))


class _Source:
    """A tokenizer in the form that llguidance's wrapper takes."""

    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.eos_token_id = eos_ids[0]
        self.tokens = token_bytes
        self.special_token_ids = sorted(special_ids)
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


class Matcher:
    """How far one output has followed its grammar, and what may come next."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self.mask: TokenMask = np.zeros(num_words, np.uint32)
        """Tokens that may come next; none when the output is complete."""
        self.is_complete = False
        """The output matches, and nothing but its end can follow."""

    def start(self, banned: Iterable[int] = ()) -> "Matcher":
        """A new matcher at the place of this one, its mask written.

        Args:
            banned: Ids that must not come next, whatever the grammar says.

        Raises:
            GrammarError: Nothing can come next: no text, or none that this tokenizer can spell.
        """
        started = Matcher(self._matcher.deep_copy(), len(self.mask))
        started._look_ahead(banned)
        if started.is_complete:
            raise GrammarError("the grammar allows no output but the empty one")
        return started

    def take(self, token_id: int, banned: Iterable[int] = ()) -> None:
        """Go on by one token, which the mask allowed.

        Args:
            token_id: The token.
            banned: Ids that must not come after it. An output that only they could follow is
                complete if the grammar lets it end.

        Raises:
            GrammarError: Nothing can come next, or the grammar went beyond its limits.
        """
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"the output left its grammar: {_short(self._matcher.get_error())}")
        self._look_ahead(banned)

    def _look_ahead(self, banned: Iterable[int]) -> None:
        matcher, mask = self._matcher, self.mask
        mask[:] = 0
        self.is_complete = matcher.is_stopped() and not matcher.is_error()
        if self.is_complete:
            return
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(f"the grammar went too far: {_short(matcher.get_error())}")
        for token in banned:
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if mask.any():
            return
        if not matcher.is_accepting():
            raise GrammarError("no token of this model can go on with the grammar")
        self.is_complete = True


def _short(message: str) -> str:
    """One line of a message that may hold a whole grammar."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}…"
