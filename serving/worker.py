"""Between asyncio and the engine: one pump for each answer. Host only."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

from jaxmm.errors import EngineStopped
from jaxmm.request import Delta, Request, TokenLogprob, Usage
from serving.errors import Aborted, ClientGone, DeadlineExceeded, ServerClosing

CLOSING = "the server is shutting down; send the request to another one, or again later"

_Result = TypeVar("_Result")


class Streams(Protocol):
    """What a pump needs of an engine."""

    def astream(self, request: Request) -> AsyncIterator[Delta]: ...


class _Gathered:
    """Deltas of one completion; a reader may leave many thousands of them."""

    __slots__ = ("_last", "_logprobs", "_texts", "_token_ids", "_usage")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._usage: Usage | None = None
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self._usage = delta.usage or self._usage
        self._last = delta

    def joined(self) -> Delta:
        assert self._last is not None, "a delta has been added"
        return dataclasses.replace(
            self._last,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=None if self._last.logprobs is None else tuple(self._logprobs),
            usage=self._usage,
        )


class Pump:
    """Deltas of one answer, taken from the engine as they come and given out as they are read.

    A reader that is slower than the engine gets what has gathered as one delta for each
    completion, so a slow client costs fewer messages, and no more memory than its answer.
    """

    def __init__(
        self, engine: Streams, requests: Sequence[Request], deadline_seconds: float
    ) -> None:
        """Hand the answer's requests to the engine; must be closed with `aclose`."""
        self._gathered: dict[tuple[str, int], _Gathered] = {}
        self._changed = asyncio.Event()
        self._aborted = False
        self._task = asyncio.create_task(self._run(engine, requests, deadline_seconds))
        self._task.add_done_callback(lambda _: self._changed.set())

    def __aiter__(self) -> "Pump":
        return self

    async def __anext__(self) -> Delta:
        """Give the next delta.

        Raises:
            JaxmmError: The engine refused or lost the request, or it took too long.
        """
        await self._changed.wait()
        if self._gathered:
            delta = self._gathered.pop(next(iter(self._gathered))).joined()
        elif self._task.cancelled():
            if self._aborted:
                raise Aborted("the request was aborted")
            raise EngineStopped("the request was ended by the server")
        else:
            self._task.result()
            raise StopAsyncIteration
        if not self._gathered and not self._task.done():
            self._changed.clear()
        if delta.finish_reason in ("abort", "error"):
            raise EngineStopped("the engine ended the request before its answer was complete")
        return delta

    def abort(self) -> bool:
        """End the requests; the reader hears of it. False: they have ended already."""
        ends = self._task.cancel()
        self._aborted = self._aborted or ends
        return ends

    async def aclose(self) -> None:
        """Abort the request if it has not finished, and wait until the engine let go of it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(
        self, engine: Streams, requests: Sequence[Request], deadline_seconds: float
    ) -> None:
        work = [self._take(engine, request) for request in requests]
        await within(deadline_seconds, _together(work))

    async def _take(self, engine: Streams, request: Request) -> None:
        async for delta in engine.astream(request):
            # what came last is read last: its usage is the final one
            key = delta.id, delta.index
            gathered = self._gathered.pop(key, None) or _Gathered()
            gathered.add(delta)
            self._gathered[key] = gathered
            self._changed.set()


async def _together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do several things at once; the first error ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


async def within(seconds: float, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do `work`, and cancel it when it takes too long.

    Raises:
        DeadlineExceeded: It was not done in time.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(
            f"no complete answer in {seconds:g} s; ask for fewer tokens, or later"
        ) from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do `work`, and cancel it when the client goes away.

    Args:
        receive: The request's ASGI channel, its body read already.
        work: What to do.

    Raises:
        ClientGone: The client closed the connection first.
        ServerClosing: The server ends: nothing else cancels the task of a request.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    except asyncio.CancelledError:
        raise ServerClosing(CLOSING) from None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
