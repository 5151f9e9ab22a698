"""What is wrong with one request is told to that request alone, and the next one is served."""

import asyncio
import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmm.api import generate
from jaxmm.basis import settle_basis
from jaxmm.config import EngineConfig, load_config
from jaxmm.device.ledger import CompileLedger
from jaxmm.engine import Engine
from jaxmm.errors import (
    EngineStopped,
    MediaError,
    MediaTooLarge,
    ModelError,
    NotFinite,
    Overloaded,
    PromptTooLong,
    RequestError,
    SamplingError,
)
from jaxmm.request import Request, SamplingParams
from jaxmm.start import load_runners
from tests.checkpoints import checkpoint
from tests.engines import (
    MEDIA,
    SMALL,
    ask,
    assert_same,
    cache_dir,
    engine,
    make_engine,
    on_loop,
    picture,
    png,
    request,
    scheduling,
    solo,
    turn,
)

ASK = turn("<image>", "what is it")
PICTURE = png(picture(112, 112, 41))
POISON = 93
"""A token of no other prompt here."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which one token is NaN, wherever it stands in a prompt."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(checkpoint("qwen2_5_vl"), folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("embed_tokens.weight"):
                tensors[name][POISON] = np.nan
        save_file(tensors, file, {"format": "pt"})
    return folder


def test_a_request_whose_hidden_state_is_not_finite_ends_alone(poisoned: Path) -> None:
    """Nor does what it leaves in pages, here in nearly all, reach those who get them next."""
    with contextlib.closing(make_engine("qwen2_5_vl", model=str(poisoned))) as on:
        texts = [turn("a" * n + "small houses stand near the river") for n in range(4)]
        before = [solo(on, text, salt="b") for text in texts]
        ids = (5,) * 120 + (POISON,) * 880

        def ask_wrongly(n: int) -> None:
            wrong = Request(id=f"wrong{n}", token_ids=ids, sampling=SamplingParams(), salt=f"a{n}")
            with pytest.raises(NotFinite, match="no finite numbers"):
                ask(on, wrong)

        with ThreadPoolExecutor(7) as threads:
            wrong = [threads.submit(ask_wrongly, n) for n in range(7)]
            [beside] = ask(on, request(texts[0], salt="b"))
            for asked in wrong:
                asked.result(120)
        assert_same(beside, before[0])
        for text, expected in zip(texts, before, strict=True):
            assert_same(solo(on, text, salt="b"), expected)


@pytest.fixture
def on() -> Iterator[Engine]:
    """The shared engine; after the test it gives the answer that it gave before."""
    shared = engine("qwen2_vl")
    expected = solo(shared, ASK, [PICTURE])
    yield shared
    assert shared.healthy
    assert_same(ask(shared, request(ASK, [PICTURE]))[0], expected)


# Pictures


@pytest.mark.parametrize("name", ["cut.png", "cut.jpg", "empty.png", "page.png", "zip.png"])
def test_picture_that_cannot_be_read(on: Engine, name: str) -> None:
    data = (MEDIA / name).read_bytes()
    with pytest.raises(MediaError, match="image 2 of 2: "):
        ask(on, request(turn("<image>", "<image>"), [PICTURE, data]))


def test_picture_too_thin_for_the_model(on: Engine) -> None:
    with pytest.raises(RequestError, match="200"):
        ask(on, request(ASK, [(MEDIA / "thin_4000x1.png").read_bytes()]))


def test_path_without_a_file(on: Engine, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="cannot be read"):
        ask(on, request(ASK, [tmp_path / "none.png"]))


@pytest.mark.parametrize("source", ["a.png", 7, np.zeros((3, 3), np.uint8), None])
def test_picture_of_a_wrong_type(on: Engine, source: Any) -> None:
    with pytest.raises(MediaError):
        ask(on, request(ASK, [source]))


def test_file_that_changes_while_its_request_waits(on: Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PICTURE)
    ask(on, request(turn("first", "<image>"), [path]))
    on_loop(on, on._parts.prefix_cache.clear)
    on_loop(on, on._parts.arena.clear)
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with held_up(on):  # prepared, and known without decoding
        on.submit(request(turn("second", "<image>"), [path]), heard.put)
        while on._loop._inbox.empty():
            time.sleep(0.001)
        path.write_bytes(png(picture(112, 112, 42)))
    error = heard.get(timeout=60)
    assert isinstance(error, MediaError)
    assert "has changed" in str(error)


@contextlib.contextmanager
def held_up(on: Engine) -> Iterator[None]:
    """Let an idle engine's thread do nothing meanwhile."""
    gate, reached = threading.Event(), threading.Event()
    on._loop.post(reached.set)
    on._loop.post(gate.wait)
    reached.wait(60)
    while not on._loop._inbox.empty():
        time.sleep(0.001)
    try:
        yield
    finally:
        gate.set()


# Numbers of pictures and places


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_other_number_of_pictures_than_places(on: Engine, num_images: int) -> None:
    with pytest.raises(RequestError, match=f"2 images and {num_images} were sent"):
        ask(on, request(turn("<image>", "<image>"), [PICTURE] * num_images))


def test_more_pictures_than_the_limit(on: Engine) -> None:
    with pytest.raises(RequestError, match="33 images; the limit is 32"):
        ask(on, request(turn(*["<image>"] * 33), [PICTURE] * 33))


def test_pixel_limits_that_contradict(on: Engine) -> None:
    with pytest.raises(RequestError, match="pixels"):
        ask(on, request(ASK, [PICTURE], min_pixels=50000, max_pixels=3136))


def test_placeholder_ids_that_have_no_picture(on: Engine) -> None:
    pad = on._parts.model.image_token_id
    with pytest.raises(RequestError, match="1 images and 0 were sent"):
        ask(on, request(None, token_ids=[1, pad, 2]))


# Length


def test_prompt_beyond_the_models_length(on: Engine) -> None:
    with pytest.raises(PromptTooLong, match="the limit is 1023"):
        ask(on, request(turn("one " * 1100)))


def test_prompt_that_fills_the_length_gets_one_token(on: Engine) -> None:
    [longest] = ask(on, request(None, token_ids=[5] * 1023))
    assert (len(longest.token_ids), longest.finish_reason) == (1, "length")
    with pytest.raises(PromptTooLong, match="1024 tokens, 0 of them from images"):
        ask(on, request(None, token_ids=[5] * 1024))


def test_pictures_beyond_the_models_length(on: Engine) -> None:
    big = [png(picture(280, 280, 50 + i)) for i in range(11)]  # a hundred rows each
    with pytest.raises(PromptTooLong, match="1100 of them from images"):
        ask(on, request(turn(*["<image>"] * 11), big))


def test_picture_above_the_largest_lane(on: Engine) -> None:
    with (
        scheduling(on, max_lane_patches=32, max_patches_per_step=32),
        pytest.raises(MediaTooLarge, match="the limit is 32"),
    ):
        ask(on, request(turn("wide", "<image>"), [png(picture(224, 224, 43))]))


def test_empty_prompt(on: Engine) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        ask(on, request(None, token_ids=[]))


def test_ids_outside_the_vocabulary(on: Engine) -> None:
    with pytest.raises(RequestError, match="token id 512 is outside"):
        ask(on, request(None, token_ids=[1, 512]))


# Parameters

NAN = float("nan")


@pytest.mark.parametrize(
    "fields",
    [
        {name: NAN}
        for name in (
            *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs"),
        )
    ]
    + [
        {"logit_bias": {3: NAN}},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"min_tokens": 9, "max_tokens": 8},
        {"logprobs": 2.5},
        {"logprobs": 21},
        {"n": 0},
        {"seed": 1 << 63},
        {"stop": "word"},
        {"stop": ("",)},
        {"stop": (b"bytes",)},
        {"stop_token_ids": (1.5,)},
        {"stop_token_ids": None},
        {"logit_bias": [1, 2]},
        {"stop_token_ids": tuple(range(17))},
    ],
    ids=str,
)
def test_parameter_out_of_its_range(fields: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(fields))):
        SamplingParams(**fields)


@pytest.mark.parametrize("fields", [{"logit_bias": {500: 1.0}}, {"stop_token_ids": (-1, 511)}])
def test_ids_that_the_tokenizer_does_not_have(on: Engine, fields: dict[str, Any]) -> None:
    with pytest.raises(SamplingError):
        ask(on, request(ASK, [PICTURE], **fields))


def test_whole_numbers_of_numpy_are_whole_numbers(on: Engine) -> None:
    [result] = ask(on, request(ASK, [PICTURE], max_tokens=np.int64(3), logprobs=np.int32(2)))
    assert len(result.token_ids) == 3


# Requests as a whole


@pytest.mark.parametrize("given", [{}, {"text": "a", "token_ids": [1]}])
def test_not_exactly_one_prompt(on: Engine, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="exactly one"):
        ask(on, request(None, **given))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "robot", "content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "audio"}]}],
        [{"role": "user", "content": 5}],
        "a question",
        [7],
    ],
    ids=str,
)
def test_messages_in_another_form(on: Engine, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        ask(on, request(messages))


def test_unknown_argument_names_the_known_ones(on: Engine) -> None:
    with pytest.raises(RequestError, match=r"'max_token'; known are .*max_tokens"):
        generate("a", engine=on, max_token=3)


@pytest.mark.parametrize("salt", [None, 3, "\ud800"])
def test_tenant_that_is_no_text(on: Engine, salt: Any) -> None:
    with pytest.raises(RequestError, match="salt"):
        ask(on, request(turn("a"), salt=salt))


@pytest.mark.parametrize("ids", [[1.5, 2], "12", [True], [[1, 2]], [2**70]])
def test_ids_that_are_no_list_of_whole_numbers(on: Engine, ids: Any) -> None:
    with pytest.raises(RequestError, match="whole numbers"):
        ask(on, request(None, token_ids=ids))


def test_more_completions_than_the_queue_takes(on: Engine) -> None:
    with scheduling(on, max_waiting=3), pytest.raises(RequestError, match="raise max_waiting"):
        ask(on, request(turn("a"), n=4))


def test_lists_in_place_of_tuples_are_the_same_parameters(on: Engine) -> None:
    fields = {"min_tokens": 4, "ignore_eos": False}
    expected = solo(on, turn("a"), stop_token_ids=tuple(range(16)), stop=("e",), **fields)
    result = solo(on, turn("a"), stop_token_ids=list(range(16)), stop=["e"], **fields)
    assert_same(result, expected)


def test_listener_that_fails_ends_its_own_request_alone(on: Engine) -> None:
    aborted = on.scheduler.counters.aborted

    def fail(event: Any) -> None:
        raise ZeroDivisionError

    for asked in (request(turn("a"), max_tokens=500), request(turn("a"), salt=3)):
        on.submit(asked, fail)
    result = ask(on, request(ASK, [PICTURE]))[0]
    assert_same(result, solo(on, ASK, [PICTURE]))
    assert on.scheduler.counters.aborted == aborted + 1


def test_id_is_free_again_when_its_answer_is_complete(on: Engine) -> None:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def hear(event: Any) -> None:
        heard.put(event)
        if heard.qsize() == 1:
            on.submit(Request(id=event.id, text="a", sampling=one), hear)

    one = SamplingParams(max_tokens=1)
    on.submit(Request(id="again", text="a", sampling=one), hear)
    assert [heard.get(timeout=30).finish_reason for _ in range(2)] == ["length", "length"]


def test_pictures_of_requests_aborted_in_the_queue_are_not_decoded(on: Engine) -> None:
    go, media_map = threading.Event(), on._parts.media_map
    busy = [on._intake._threads.submit(go.wait) for _ in range(4)]
    before = media_map.num_misses
    for i in range(10):
        asked = request(ASK, [png(picture(60 + i, 60, i))])
        on.submit(asked, lambda event: None)
        on.abort(asked.id)
    go.set()
    assert all(b.result() for b in busy)
    ask(on, request(turn("a")))  # after all of them
    assert media_map.num_misses == before


def test_decode_that_runs_for_an_aborted_request_holds_nothing_up() -> None:
    with make_engine("qwen2_vl") as mine:
        decoder = mine._parts.decoder
        worker = decoder._idle.get(timeout=10)
        decoder._idle.put(worker)
        os.kill(worker._process.pid, signal.SIGSTOP)  # as good as a picture that takes for ever
        stuck = [request(ASK, [png(picture(60 + i, 60, i))]) for i in range(5)]
        for one in stuck:  # one more than there are preparing threads
            mine.submit(one, lambda event: None)
        while mine._parts.decodes.num_running < 4:
            time.sleep(0.001)
        for one in stuck:
            mine.abort(one.id)
        assert mine._parts.decodes.num_running == 0
        [text] = ask(mine, request(turn("a")))  # a preparing thread is free at once
        assert text.finish_reason == "length"
        [seen] = ask(mine, request(ASK, [PICTURE]))  # and a worker after a second
        assert seen.usage.image_tokens > 0
        assert worker._process.poll() is not None


def test_id_in_use(on: Engine) -> None:
    first = request(turn("one"), max_tokens=256)
    second = Request(id=first.id, text="two")
    on.submit(first, lambda event: None)
    with pytest.raises(RequestError, match="is in use"):
        on.submit(second, lambda event: None)
    on.abort(first.id)


def test_full_queue(on: Engine) -> None:
    many = [request(None, token_ids=[1 + i % 100], max_tokens=1) for i in range(1025)]
    with held_up(on), pytest.raises(Overloaded, match="1024 requests are waiting"):
        for one in many:
            on.submit(one, lambda event: None)
    for one in many:
        on.abort(one.id)


def test_queue_full_of_estimates(on: Engine) -> None:
    many = [request(None, token_ids=[1 + i % 100], max_tokens=1) for i in range(1025)]
    estimates = []
    with held_up(on), pytest.raises(Overloaded, match="1024 requests are waiting"):
        for one in many:
            estimates.append(on._intake.estimate(one))
    assert len([future.result(60) for future in estimates]) == 1024
    [result] = ask(on, request(turn("a")))  # there is room again
    assert result.finish_reason == "length"


def test_bad_requests_in_a_batch_cost_the_good_ones_nothing(on: Engine) -> None:
    good = [request(ASK, [png(picture(112, 84, i))]) for i in range(4)]
    alone = [solo(on, one.messages, one.images) for one in good]
    bad = [
        request(ASK, [PICTURE[:50]]),
        request(turn("one " * 1100)),
        request(ASK, []),
        request(turn("a"), logit_bias={500: 1.0}),
    ]
    heard: dict[str, queue.SimpleQueue[Any]] = {}
    for one in itertools.chain(*zip(good, bad, strict=True)):
        heard[one.id] = queue.SimpleQueue()
        on.submit(one, heard[one.id].put)
    for one in bad:
        assert isinstance(heard[one.id].get(timeout=60), RequestError)
    for one, expected in zip(good, alone, strict=True):
        deltas = [heard[one.id].get(timeout=60) for _ in expected.token_ids]
        assert tuple(t for delta in deltas for t in delta.token_ids) == expected.token_ids


def test_event_loop_that_is_closed_before_its_answer_is_complete(on: Engine) -> None:
    aborted = on.scheduler.counters.aborted
    loop = asyncio.new_event_loop()
    deltas = on.astream(request(turn("one red house"), max_tokens=900))
    loop.run_until_complete(anext(deltas))
    loop.close()
    while on.scheduler.has_work:
        on_loop(on, lambda: None)
    assert on.scheduler.counters.aborted == aborted + 1


# The end of an engine


def test_closed_engine_refuses_and_everybody_waiting_is_told() -> None:
    mine = make_engine("qwen2_vl")
    heard: dict[str, queue.SimpleQueue[Any]] = {}
    for i in range(60):
        one = request(turn(f"{i}", "<image>"), [png(picture(100 + i, 100, i))], max_tokens=300)
        heard[one.id] = queue.SimpleQueue()
        mine.submit(one, heard[one.id].put)
    next(iter(heard.values())).get(timeout=60)  # steps are on their way
    mine.close()
    assert sum(replica.num_flying for replica in mine._loop._replicas) == 0
    for events in heard.values():
        last = None
        while not events.empty():
            last = events.get()
        assert isinstance(last, EngineStopped)
    with pytest.raises(EngineStopped, match="it was closed"):
        ask(mine, request(ASK, [PICTURE]))
    with pytest.raises(EngineStopped):
        mine.flush_caches()
    mine.close()


def test_loop_that_fails_tells_everybody_and_refuses_what_comes_later() -> None:
    with make_engine("qwen2_vl") as mine:
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        many = [request(turn(f"{i} one"), max_tokens=500) for i in range(8)]
        for one in many:
            mine.submit(one, heard.put)
        started = threading.Event()
        mine._loop.post(started.set)
        started.wait(30)

        def fault() -> None:
            raise MemoryError("out of memory")

        mine._loop.post(fault)
        told = 0
        while told < len(many):
            told += isinstance(heard.get(timeout=30), EngineStopped)
        mine._thread.join(30)
        with pytest.raises(EngineStopped, match="out of memory"):
            ask(mine, request(ASK, [PICTURE]))


# Checkpoints and settings


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkpoint whose files may be changed."""
    shutil.copytree(checkpoint("qwen2_vl"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def start(directory: Path, **settings: Any) -> None:
    values = {**SMALL, "model": str(directory), "compile_cache_dir": "", **settings}
    Engine(load_config(EngineConfig, None, values)).close()


def test_model_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        start(tmp_path / "none")


def test_model_type_that_is_not_known(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "qwen9_vl"}))
    with pytest.raises(ModelError, match="qwen9_vl"):
        start(copied)


@pytest.mark.parametrize("change", ["missing", "extra", "misshapen"])
def test_weights_that_do_not_fit_the_config(copied: Path, change: str) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    if change == "missing":
        del weights["model.norm.weight"]
    elif change == "extra":
        weights["model.layers.7.weight"] = np.zeros(3, np.float32)
    else:
        weights["model.norm.weight"] = np.zeros(63, np.float32)
    save_file(weights, copied / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.7|model\.norm"):
        start(copied)


@pytest.mark.parametrize(
    "names", [["config.json"], ["tokenizer.json", "vocab.json"], ["model.safetensors"]], ids=str
)
def test_files_that_are_missing(copied: Path, names: list[str]) -> None:
    for name in names:
        (copied / name).unlink()
    with pytest.raises(ModelError):
        start(copied)


def test_weights_that_cannot_be_read_leave_no_thread_behind(copied: Path) -> None:
    def reading() -> int:
        return sum("jaxmm-restore" in thread.name for thread in threading.enumerate())

    engine("qwen2_vl")  # whose executables are in the cache now
    values = {**SMALL, "model": str(copied), "compile_cache_dir": cache_dir()}
    config = load_config(EngineConfig, None, values)
    (copied / "jaxmm.json").write_text("{}")  # as after `jaxmm convert`, but of no known form
    basis, ledger, before = settle_basis(config), CompileLedger("log"), reading()
    with pytest.raises(ModelError) as kept:  # with all that it refers to, as in a notebook
        load_runners(config, basis, ledger)
    ledger.close()
    assert reading() == before and kept.tb is not None
