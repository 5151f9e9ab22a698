"""Deltas are gathered for slow readers without loss, and a closed pump leaves nothing running."""

import asyncio

import pytest

from jaxmm.errors import EngineStopped, PromptTooLong
from jaxmm.request import Delta, Request, TokenLogprob, Usage
from serving.errors import Aborted, ClientGone, DeadlineExceeded
from serving.worker import Pump, while_connected

REQUEST = Request(id="r", messages=[{"role": "user", "content": "a"}])


class Script:
    """Gives deltas at once, then waits, raises or ends."""

    def __init__(self, *deltas, then=None):
        self.deltas, self.then, self.aborted = deltas, then, False

    async def astream(self, _):
        for delta in self.deltas:
            yield delta
        try:
            if self.then == "wait":
                await asyncio.sleep(60)
            elif self.then is not None:
                raise self.then
        except asyncio.CancelledError:
            self.aborted = True
            raise


def delta(index, text, finish_reason=None, completion_tokens=None, **fields):
    usage = completion_tokens and Usage(
        prompt_tokens=1, image_tokens=0, cached_tokens=0, completion_tokens=completion_tokens
    )
    return Delta(
        id="r", index=index, text=text, token_ids=(ord(text),), finish_reason=finish_reason,
        usage=usage, **fields,
    )  # fmt: skip


def run(script, deadline_seconds=5.0, seconds_before_reading=0.01):
    """Read everything; give the deltas and the error at the end, if any."""

    async def read():
        pump, deltas = Pump(script, [REQUEST], deadline_seconds), []
        await asyncio.sleep(seconds_before_reading)
        try:
            async for one in pump:
                deltas.append(one)
        except Exception as e:  # noqa: BLE001  the error is what the test looks at
            return deltas, e
        finally:
            await pump.aclose()
        return deltas, None

    return asyncio.run(read())


def test_what_gathers_is_joined_by_completion_and_the_last_usage_comes_last():
    logprob = TokenLogprob(token_id=1, logprob=-1.0)
    script = Script(
        delta(1, "a", logprobs=(logprob,)),
        delta(0, "x", "stop", 2),
        delta(1, "b", "length", 3, logprobs=(logprob,)),
    )
    deltas, error = run(script)
    assert error is None
    assert [(d.index, d.text, d.token_ids) for d in deltas] == [
        (0, "x", (120,)),
        (1, "ab", (97, 98)),
    ]
    assert deltas[1].finish_reason == "length" and deltas[1].logprobs == (logprob, logprob)
    assert deltas[-1].usage.completion_tokens == 3


def test_deltas_before_an_error_are_given_first():
    deltas, error = run(Script(delta(0, "a"), then=PromptTooLong("long")))
    assert [d.text for d in deltas] == ["a"] and isinstance(error, PromptTooLong)


def test_the_deadline_ends_the_request_in_the_engine():
    script = Script(delta(0, "a"), then="wait")
    deltas, error = run(script, deadline_seconds=0.05)
    assert [d.text for d in deltas] == ["a"]
    assert isinstance(error, DeadlineExceeded) and script.aborted


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_broke_off_is_an_error(reason):
    assert isinstance(run(Script(delta(0, "a", reason)))[1], EngineStopped)


def test_closing_aborts_and_waits_for_the_engine():
    async def close():
        script = Script(then="wait")
        pump = Pump(script, [REQUEST], 5.0)
        await asyncio.sleep(0.01)
        await pump.aclose()
        return script.aborted

    assert asyncio.run(close())


def test_an_answer_that_is_aborted_twice_still_says_so():
    async def abort():
        pump = Pump(Script(then="wait"), [REQUEST], 5.0)
        await asyncio.sleep(0.01)
        first = pump.abort()
        await asyncio.sleep(0.01)  # has ended, and nobody has read that yet
        second = pump.abort()
        with pytest.raises(Aborted):
            await anext(pump)
        return first, second

    assert asyncio.run(abort()) == (True, False)


def test_work_is_cancelled_when_the_client_goes_away():
    async def gone():
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        asyncio.run(while_connected(gone, asyncio.sleep(60)))


def test_work_that_ends_first_gives_its_result():
    async def still_there():
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    assert asyncio.run(while_connected(still_there, asyncio.sleep(0, "done"))) == "done"
