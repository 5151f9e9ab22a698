"""Reads the calls out of an answer's text while it is still being written. Host only."""

from typing import NamedTuple

from jaxmm.host.tools import CALL_ARGUMENTS, CALL_END, CALL_NAME, CALL_START


class CallPiece(NamedTuple):
    """What a piece of text adds to one call."""

    call_index: int
    """Which of the answer's calls, from 0."""
    name: str | None
    """Set on the first piece of a call."""
    arguments: str


class ToolCallReader:
    """Splits text that follows `tool_grammar` into content and calls.

    What has been given out is final; what may be the beginning of a mark is held back. An answer
    that was cut before a call had its whole name keeps that piece as content.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._buffer = ""
        self._in_head = False
        self._in_arguments = False

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Take more text; give the content and the pieces of calls that it settles."""
        self._buffer += text
        content: list[str] = []
        pieces: list[CallPiece] = []
        while self._step(content, pieces):
            pass
        return "".join(content), pieces

    def finish(self) -> tuple[str, list[CallPiece]]:
        """Give what was held back: the answer is over."""
        rest, self._buffer = self._buffer, ""
        if self._in_arguments:
            return "", [CallPiece(self.num_calls - 1, None, rest)] if rest else []
        if self._in_head:
            return CALL_START + rest, []
        return ("" if self.num_calls else rest), []

    def _step(self, content: list[str], pieces: list[CallPiece]) -> bool:
        """Settle what can be; True when a mark was passed and more may be settled."""
        if self._in_arguments:
            arguments, found = self._until(CALL_END)
            if arguments:
                pieces.append(CallPiece(self.num_calls - 1, None, arguments))
            self._in_arguments = not found
            return found
        if self._in_head:
            head, mark, rest = self._buffer.partition(CALL_ARGUMENTS)
            if not mark:
                return False
            pieces.append(CallPiece(self.num_calls, head.removeprefix(CALL_NAME), ""))
            self._buffer, self._in_head, self._in_arguments = rest, False, True
            self.num_calls += 1
            return True
        text, found = self._until(CALL_START)
        if not self.num_calls:  # after a call there is nothing but the line break before the next
            content.append(text)
        self._in_head = found
        return found

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take from the buffer up to and with a mark, or as far as no mark can have begun."""
        before, found, rest = self._buffer.partition(mark)
        if found:
            self._buffer = rest
            return before, True
        begun = next(k for k in range(len(mark) - 1, -1, -1) if self._buffer.endswith(mark[:k]))
        settled = len(self._buffer) - begun
        text, self._buffer = self._buffer[:settled], self._buffer[settled:]
        return text, False
