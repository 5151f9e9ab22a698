"""Between asyncio and the engine: one pump for each answer. Host only."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

from jaxmm.errors import EngineStopped
from jaxmm.request import Delta, Request
from serving.errors import Aborted, ClientGone, DeadlineExceeded, ServerClosing

CLOSING = "the server is shutting down; send the request to another one, or again later"

_Result = TypeVar("_Result")


class Streams(Protocol):
    """What a pump needs of an engine."""

    def astream(self, request: Request) -> AsyncIterator[Delta]: ...


class Pump:
    """Deltas of one answer, taken from the engine as they come and given out as they are read.

    A reader that is slower than the engine gets what has gathered as one delta for each
    completion, so a slow client costs fewer messages, and no more memory than its answer.
    """

    def __init__(
        self, engine: Streams, requests: Sequence[Request], deadline_seconds: float
    ) -> None:
        """Hand the answer's requests to the engine; must be closed with `aclose`."""
        self._gathered: dict[tuple[str, int], Delta] = {}
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
            delta = self._gathered.pop(next(iter(self._gathered)))
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
        try:
            async with asyncio.timeout(deadline_seconds):
                await _together([self._take(engine, request) for request in requests])
        except TimeoutError:
            raise DeadlineExceeded(
                f"no complete answer in {deadline_seconds:g} s; ask for fewer tokens, or later"
            ) from None

    async def _take(self, engine: Streams, request: Request) -> None:
        async for delta in engine.astream(request):
            # what came last is read last: its usage is the final one
            key = delta.id, delta.index
            earlier = self._gathered.pop(key, None)
            self._gathered[key] = _joined(earlier, delta) if earlier else delta
            self._changed.set()


async def _together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do several things at once; the first error ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


def _joined(first: Delta, second: Delta) -> Delta:
    logprobs = None
    if second.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *second.logprobs)
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=(*first.token_ids, *second.token_ids),
        logprobs=logprobs,
        usage=second.usage or first.usage,
    )


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
