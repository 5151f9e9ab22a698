"""A conversation that keeps its pictures, videos and prefix between turns. Host only."""

import contextlib
import numbers
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from jaxmm.asking import (
    Images,
    Message,
    Videos,
    new_request_id,
    picture_sources,
    sampling_params,
    user_turn,
    video_sources,
)
from jaxmm.config import MAX_EXPIRE_SECONDS
from jaxmm.errors import RequestError
from jaxmm.gather import Gathered, stream_deltas
from jaxmm.host.kept import Keep, KeptMedium
from jaxmm.request import Delta, Request, Result, SamplingParams

if TYPE_CHECKING:
    from jaxmm.engine import Engine


class Session:
    """A conversation with one engine: `Engine.session` makes it, `send` adds a turn.

    Every turn is answered as the whole conversation sent at once would be; what earlier turns cost
    is not paid again. Until it is closed, expires, or others need the room, the engine keeps the
    processed pictures and videos and pins the conversation's pages in its prefix cache. What was
    given back is made again by the next turn: a conversation never fails for it. Its limits are
    those of one request, for all its turns together: `max_model_len` tokens and `media.max_items`
    pictures and videos; and so is how its videos are looked at.
    """

    def __init__(
        self,
        engine: "Engine",
        system: str | None,
        *,
        salt: str,
        expire_seconds: float,
        **looks: Any,
    ) -> None:
        """See `Engine.session`; `looks` are the fields of `Request` for its videos."""
        _check_seconds(expire_seconds)
        self._engine = engine
        self._salt = salt
        self._looks = looks
        self._messages: list[Message] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._keep = Keep(seconds=expire_seconds)
        self._lock = threading.Lock()
        self._answering = False
        # a conversation that is dropped without `close` gives everything back too
        self._forget = weakref.finalize(self, engine.forget, self._keep)
        self._forget.atexit = False

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far, as `generate` takes it."""
        return tuple(self._messages)

    @property
    def images(self) -> Sequence[Any]:
        """Its pictures so far, as they were sent."""
        return tuple(picture.source for picture in self._keep.pictures)

    @property
    def videos(self) -> Sequence[Any]:
        """Its videos so far, as they were sent."""
        return tuple(video.source for video in self._keep.videos)

    @overload
    def send(
        self,
        text: str,
        images: Images = ...,
        videos: Videos = ...,
        *,
        stream: Literal[False] = ...,
        **sampling: Any,
    ) -> Result: ...
    @overload
    def send(
        self,
        text: str,
        images: Images = ...,
        videos: Videos = ...,
        *,
        stream: Literal[True],
        **sampling: Any,
    ) -> Iterator[Delta]: ...
    def send(
        self,
        text: str,
        images: Images = None,
        videos: Videos = None,
        *,
        stream: bool = False,
        **sampling: Any,
    ) -> Result | Iterator[Delta]:
        """Add a turn and answer it.

        A turn that fails, or whose stream is left before its end, leaves the conversation as it
        was.

        Args:
            text: What the user says.
            images: New pictures, which stand before the text; earlier ones are still there.
            videos: New videos, which stand between pictures and text; likewise.
            stream: Give a `Delta` for each step instead of a result.
            **sampling: Fields of `SamplingParams`; `n` is 1.

        Raises:
            RequestError: As `generate`; or the session is closed, or still answering.
        """
        params = sampling_params(sampling)
        deltas = self._deltas(_Turn(text, images, videos), params)
        if stream:
            return deltas
        gathered: Gathered | None = None
        for delta in deltas:
            gathered = gathered or Gathered(delta.id, params)
            gathered.add(delta)
        assert gathered is not None, "an answer has a delta at least"
        return gathered.result()

    async def asend(
        self, text: str, images: Images = None, videos: Videos = None, **sampling: Any
    ) -> AsyncIterator[Delta]:
        """Add a turn, giving a `Delta` for each step; see `send`."""
        params, turn = sampling_params(sampling), _Turn(text, images, videos)
        with self._answered(turn, params):
            async with contextlib.aclosing(self._engine.astream(turn.request)) as deltas:
                async for delta in deltas:
                    turn.take(delta)
                    yield delta

    def close(self) -> None:
        """End the conversation and give back what it keeps; may be called again."""
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _deltas(self, turn: "_Turn", params: SamplingParams) -> Iterator[Delta]:
        with self._answered(turn, params):
            for delta in stream_deltas(self._engine, turn.request):
                turn.take(delta)
                yield delta

    @contextlib.contextmanager
    def _answered(self, turn: "_Turn", params: SamplingParams) -> Iterator[None]:
        """One turn at a time."""
        if params.n != 1:
            raise RequestError(f"n={params.n}: a conversation goes on from one answer; use n=1")
        with self._lock:
            if self._keep.closed:
                raise RequestError("the session is closed; begin another with engine.session()")
            if self._answering:
                raise RequestError("the session is answering; wait until that answer has ended")
            self._answering = True
        self._keep.pictures += turn.pictures
        self._keep.videos += turn.videos
        try:
            turn.request = self._request(turn, params)
            yield
        finally:
            self._end(turn)

    def _request(self, turn: "_Turn", params: SamplingParams) -> Request:
        return Request(
            id=new_request_id("turn"),
            messages=[*self._messages, turn.question],
            images=tuple(self._keep.pictures),
            videos=tuple(self._keep.videos),
            sampling=params,
            salt=self._salt,
            keep=self._keep,
            **self._looks,
        )

    def _end(self, turn: "_Turn") -> None:
        """Make a turn that was answered to its end a part of the conversation."""
        if turn.is_complete:
            answer = {"role": "assistant", "content": "".join(turn.answer)}
            self._messages += [turn.question, answer]
        else:
            del self._keep.pictures[len(self._keep.pictures) - len(turn.pictures) :]
            del self._keep.videos[len(self._keep.videos) - len(turn.videos) :]
        nothing_expires = not turn.is_complete and not self._engine.keeps(self._keep)
        if self._keep.closed or nothing_expires:  # closed meanwhile
            self._keep.release()
        self._answering = False


def _check_seconds(seconds: float) -> None:
    """Refuse a time that the engine's loop cannot wait for; the range is the setting's."""
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (is_number and 0 <= seconds <= MAX_EXPIRE_SECONDS):  # false for NaN
        raise RequestError(
            f"expire_seconds={seconds!r} is not a number in [0, {MAX_EXPIRE_SECONDS:g}]"
        )


class _Turn:
    """A question of a session, and its answer as it comes."""

    request: Request

    def __init__(self, text: str, images: Images, videos: Videos) -> None:
        self.pictures = [KeptMedium(source) for source in picture_sources(images)]
        self.videos = [KeptMedium(source) for source in video_sources(videos)]
        self.question = user_turn(text, len(self.pictures), len(self.videos))
        self.answer: list[str] = []
        self.is_complete = False

    def take(self, delta: Delta) -> None:
        self.answer.append(delta.text)
        self.is_complete = delta.finish_reason is not None
