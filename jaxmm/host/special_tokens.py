"""The tokens that a chat template may write and a caller's text may not. Host only."""

import re
from collections.abc import Iterable, Iterator, Mapping

from jaxmm.errors import RequestError

_PRIVATE_USE = range(0xE000, 0xF900)


class SpecialTokens:
    """Special tokens of one tokenizer, found in renderings and kept out of callers' texts.

    A text is shielded before it is rendered: a mark, one character that occurs nowhere in the
    request, is put inside every special token that the text spells. A special token found in the
    rendering was therefore written by the template itself.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        """Take the spelling of each token, two characters or more, and its id."""
        self.ids = dict(ids)
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(t[:k] for t in self.ids for k in range(1, len(t)))
        self._reach = max(map(len, self.ids), default=1) - 1

    def shield(self, text: str, mark: str) -> str:
        """Break every special token that `text` spells, or begins to spell at its end.

        An unfinished token at the end counts, with white space behind it or not: the template
        may strip the text, and the next text part could bring the rest.
        """
        text = self._pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text)
        end = len(text.rstrip())
        for start in range(max(0, end - self._reach), end):
            if text[start:end] in self._beginnings:
                return text[: start + 1] + mark + text[start + 1 :]
        return text

    def cut(self, rendered: str) -> Iterator[tuple[str, int | None]]:
        """Give each stretch of plain text and the id of the special token after it."""
        start = 0
        for match in self._pattern.finditer(rendered):
            yield rendered[start : match.start()], self.ids[match[0]]
            start = match.end()
        yield rendered[start:], None


def unused_character(texts: Iterable[str]) -> str:
    """Find a private-use character that occurs in none of the texts.

    Raises:
        RequestError: The texts use all 6400 of them.
    """
    used = set().union(*texts)
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise RequestError("the messages use every private-use character; remove some")
