"""Token ids to text as they come: whole characters, cut at stop strings. Host only."""

import codecs
from collections.abc import Iterable, Sequence, Set


class Detokenizer:
    """Text of one completion, given out piece by piece.

    What has been given out is final: an unfinished character, and text that may be the beginning
    of a stop string, is held back. All pieces together are the decoding of all ids, invalid UTF-8
    replaced by U+FFFD, up to the first stop string.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        hidden_ids: Set[int] = frozenset(),
        stop: Sequence[str] = (),
    ) -> None:
        """Start an empty completion.

        Args:
            token_bytes: UTF-8 bytes of each id; shared, not copied.
            hidden_ids: Special tokens, which are not shown.
            stop: Strings that end the text and are no part of it, none of them empty.
        """
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_StopString(s) for s in stop]
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Iterable[int]) -> tuple[str, bool]:
        """Take more ids; give the text that they settle, and whether a stop string was met.

        After a stop string, further ids are ignored. An id outside the vocabulary shows nothing.
        """
        table, hidden = self._token_bytes, self._hidden_ids
        raw = b"".join(table[i] for i in token_ids if i not in hidden and 0 <= i < len(table))
        return self._settle(self._utf8.decode(raw)), self.stopped

    def finish(self) -> str:
        """Give what was held back; an unfinished character becomes U+FFFD."""
        text = self._settle(self._utf8.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _settle(self, text: str) -> str:
        """Pass text on up to a stop string: the first to be complete, of several the longest."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        known = len(self._held)
        text = self._held + text
        for end in range(known, len(text)):
            complete = [s.size for s in self._stops if s.advance(text[end])]
            if complete:
                self.stopped, self._held = True, ""
                return text[: end + 1 - max(complete)]
        settled = len(text) - max(s.matched for s in self._stops)
        self._held = text[settled:]
        return text[:settled]


class _StopString:
    """Matcher of one string, a constant number of comparisons a character (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.size = len(text)
        self.matched = 0
        """Characters of the string that the text so far ends with."""
        self._borders = [0] * (self.size + 1)
        for end in range(1, self.size):
            self._borders[end + 1] = self._extend(self._borders[end], text[end])

    def advance(self, char: str) -> bool:
        """Take one character; say whether the string is complete."""
        self.matched = self._extend(self.matched, char)
        return self.matched == self.size

    def _extend(self, matched: int, char: str) -> int:
        while matched and self._text[matched] != char:
            matched = self._borders[matched]
        return matched + (self._text[matched] == char)
