"""Gemma 3: pictures attended both ways and never cut; against transformers, served in every way."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxmm.device.backend import model_obstacles
from jaxmm.engine import Engine
from jaxmm.errors import ConfigError, ModelError, PromptTooLong, RequestError
from jaxmm.models import family_module, read_config
from jaxmm.rehearsal import Rehearsal
from jaxmm.request import Result
from serving.ask import Served
from serving.protocol import parse_chat_request
from serving.translate import media_urls, to_request
from tests.checkpoints import checkpoint, write_json
from tests.engines import (
    ask,
    assert_same,
    engine,
    logprobs,
    on_loop,
    pages_left,
    picture,
    png,
    request,
    rows_left,
    scheduling,
    solo,
    turn,
)
from tests.gemma import TOKENS_PER_PICTURE, gemma_greedy, write_gemma
from tests.guards import guarded
from tests.held import now_or_soon, quiet

RELATIVE = 1e-3
"""Of log-probabilities: both sides sum float32 in orders of their own."""
WIDE, TALL = picture(200, 130, 1), picture(90, 210, 2)
MESSAGES = turn("describe", "<image>", "and the house", "<image>", "in one sentence")
PICTURES = [png(WIDE), png(TALL)]

CASES: dict[str, tuple[Any, list[Any]]] = {
    "text only": (turn("what is in the picture"), []),
    "text longer than the window": (turn("one red house " * 30), []),
    "one image": (turn("<image>", "describe the picture"), [WIDE]),
    "two images side by side": (turn("<image>", "<image>", "and the house"), [WIDE, TALL]),
    "the same image twice": (turn("<image>", "and", "<image>", "one"), [TALL, TALL]),
    "image last, behind long text": (turn("two dogs and one house " * 9, "<image>"), [WIDE]),
    "of its own size": (turn("<image>", "what"), [picture(112, 112, 5)]),
    "two turns": (
        [
            *turn("<image>", "what is it"),
            {"role": "assistant", "content": "two dogs"},
            *turn("and", "<image>"),
        ],
        [TALL, WIDE],
    ),
}


@pytest.fixture
def on() -> Engine:
    shared = engine("gemma3")
    shared.flush_caches()
    return shared


@pytest.fixture(scope="module")
def cold() -> Result:
    return solo(engine("gemma3"), MESSAGES, PICTURES)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(on: Engine, case: str) -> None:
    messages, images = CASES[case]
    expected, scores = gemma_greedy(checkpoint("gemma3"), messages, images, 16)
    [result] = ask(on, request(messages, images))
    assert list(result.token_ids) == expected
    chosen = scores[np.arange(16), expected]
    np.testing.assert_allclose(logprobs(result), chosen, rtol=RELATIVE, atol=RELATIVE)
    assert result.usage.image_tokens == TOKENS_PER_PICTURE * len(images)


@pytest.mark.parametrize("num_tokens", [31, 32, 40, 64])
def test_cut_into_chunks_that_end_before_a_picture(
    on: Engine, cold: Result, num_tokens: int
) -> None:
    """31 is the least: a picture's 16 tokens, and one for each of 15 others that may decode."""
    with scheduling(on, max_step_tokens=num_tokens):
        assert_same(solo(on, MESSAGES, PICTURES), cold)


def test_a_prefix_that_ends_inside_a_picture_is_read_up_to_the_picture(
    on: Engine, cold: Result
) -> None:
    ask(on, request(MESSAGES, PICTURES))
    [whole] = ask(on, request(MESSAGES, PICTURES))
    assert whole.usage.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16
    assert_same(whole, cold)
    spans = [span for span, _ in on_loop(on, lambda: _spans(on))]
    cache, found = on._parts.prefix_cache, set()
    for keep in range(cold.usage.prompt_tokens // 16, 0, -1):
        on_loop(on, lambda pages=keep: cache.evict(cache.num_pages - pages))
        [result] = ask(on, request(MESSAGES, PICTURES))
        cached = result.usage.cached_tokens
        assert cached <= keep * 16
        assert not any(start < cached < stop for start, stop in spans)
        found.add(cached < keep * 16)
        assert_same(result, cold)
    assert found == {True, False}  # some ends were inside a picture


def _spans(on: Engine) -> Any:
    """Spans of the pictures, as the preparing threads lay them out."""
    parts = on._parts
    ids, slots = parts.tokenizer.encode_chat(MESSAGES)
    items = parts.preparer.prepare_items(PICTURES)
    prompt = parts.preparer.prompt_of(ids, slots, items)
    return [(span, i) for i, item in enumerate(prompt.items) for span in item.offsets]


def test_batched_with_others_and_for_another_tenant(on: Engine, cold: Result) -> None:
    others = [
        request(turn("what is in the picture")),
        request(turn("<image>", "what is it"), [picture(50, 60, 7)]),
        request(turn("the answer " * 40), temperature=1.0, seed=5),
        request(MESSAGES, PICTURES, salt="b"),
        request(MESSAGES, PICTURES, n=2),
    ]
    results = ask(on, request(MESSAGES, PICTURES), *others)
    assert_same(results[0], cold)
    assert_same(results[4], cold)
    assert [c.token_ids for c in results[5].completions] == [cold.token_ids] * 2


@pytest.mark.parametrize("num_tokens", [128, 33])
def test_forced_retract(on: Engine, num_tokens: int) -> None:
    """The rival alone fills the pages, and together the two outgrow them whenever the pictures
    join, for which they have the time of some 100 steps."""
    words = turn("one red house " * 12)
    prompt = solo(on, words, max_tokens=1).usage.prompt_tokens
    expected = solo(on, MESSAGES, PICTURES, max_tokens=150)
    before = on.scheduler.counters.retracts
    tight = {"max_step_tokens": num_tokens, "reserve_tokens": 0}
    with pages_left(on, -(-(prompt + 200) // 16)), scheduling(on, **tight):
        asked = [request(words, max_tokens=200), request(MESSAGES, PICTURES, max_tokens=150)]
        assert_same(ask(on, *asked)[1], expected)
    assert on.scheduler.counters.retracts > before


def test_everything_at_once(on: Engine) -> None:
    rng = np.random.default_rng(17)
    pool = [*PICTURES, *(png(picture(28 * n, 84, n)) for n in (2, 3, 4))]
    questions = []
    for _ in range(24):
        images = [pool[i] for i in rng.integers(0, len(pool), rng.integers(0, 4))]
        parts = ["<image>"] * len(images) + ["describe", "the left part", "and the house"]
        questions.append((turn(*(parts[i] for i in rng.permutation(len(parts)))), images))
    expected = [solo(on, *question) for question in questions]
    before = on.scheduler.counters.retracts
    tight = {"max_step_tokens": 31, "reserve_tokens": 0}
    with pages_left(on, 18), rows_left(on, 64), scheduling(on, **tight):
        results = ask(on, *(request(*q, salt=str(i % 2)) for i, q in enumerate(questions)))
    assert on.scheduler.counters.retracts > before
    for result, alone in zip(results, expected, strict=True):
        assert_same(result, alone)


def test_encoded_once_and_nothing_compiles_and_nothing_is_left(on: Engine) -> None:
    before, rng = quiet(on), np.random.default_rng(7)
    encoded = on.scheduler.counters.encoded_items
    files = [png(picture(*(int(n) for n in rng.integers(20, 300, 2)), i)) for i in range(12)]
    with guarded(on):
        for start in range(3):
            texts = ["what is it " * int(rng.integers(1, 9)) for _ in files]
            asked = [
                request(turn(f"{start}", "<image>", text), [file], max_tokens=2)
                for file, text in zip(files, texts, strict=True)
            ]
            assert all(result.token_ids for result in ask(on, *asked))
    assert on.ledger.num_recompiles == 0
    assert on.scheduler.counters.encoded_items == encoded + len(files)
    buckets = on.sizes.buckets
    assert buckets.patches == (256,)  # every picture has as many
    assert buckets.num_executables == on._parts.runner.num_executables
    assert now_or_soon(lambda: quiet(on), before) == before


def test_two_pictures_with_one_hash_are_not_confused(on: Engine) -> None:
    what = turn("<image>", "what is it")
    expected = [solo(on, what, [data]) for data in PICTURES]
    on.flush_caches()
    for data, alone in zip(PICTURES, expected, strict=True):
        assert_same(ask(on, request(what, [data], mm_hashes=("ab",)))[0], alone)


def test_a_picture_that_no_step_has_room_for_is_refused_with_the_figures(on: Engine) -> None:
    good = request(turn("what is it"), max_tokens=1)
    with scheduling(on, max_step_tokens=30):
        with pytest.raises(PromptTooLong, match=r"16 tokens, .* in one step; the limit is 15"):
            ask(on, request(MESSAGES, PICTURES))
        assert ask(on, good)[0].token_ids


@pytest.mark.parametrize("fields", [{"max_pixels": 50 * 50}, {"min_pixels": 200 * 200}])
def test_limits_that_would_change_the_size_of_pictures_are_refused(
    on: Engine, fields: dict[str, int]
) -> None:
    with pytest.raises(RequestError, match="every picture of this model has 12544 pixels"):
        ask(on, request(MESSAGES, PICTURES, **fields))


def test_low_detail_is_no_other_size(on: Engine) -> None:
    assert on.pictures_are_alike
    content = [{"type": "image_url", "image_url": {"url": "http://host/a", "detail": "low"}}]
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    served = Served(model="m", tokenizer=on.tokenizer, default_max_tokens=1, low_detail_pixels=None)
    chat = parse_chat_request(body, "model")
    pictures = dict.fromkeys(media_urls(chat), PICTURES[0])
    assert to_request(chat, pictures, request_id="r", served=served).max_pixels is None


def test_settings_that_would_change_it_are_refused_too() -> None:
    load = family_module("gemma3", "processor").ImageProcessor.from_checkpoint
    with pytest.raises(ConfigError, match="leave both at 0"):
        load(checkpoint("gemma3"), max_pixels=50 * 50)


@pytest.mark.parametrize("whole", [False, True])
def test_pan_and_scan_is_refused_by_name(tmp_path: Path, whole: bool) -> None:
    shutil.copy(checkpoint("gemma3") / "config.json", tmp_path)
    table = json.loads((checkpoint("gemma3") / "preprocessor_config.json").read_text())
    table |= {"do_pan_and_scan": True}
    if whole:  # as transformers 5 saves it
        write_json(tmp_path / "processor_config.json", {"image_processor": table})
    else:
        write_json(tmp_path / "preprocessor_config.json", table)
    with pytest.raises(ModelError, match="sets do_pan_and_scan: crops beside the picture"):
        family_module("gemma3", "processor").ImageProcessor.from_checkpoint(tmp_path)


def test_a_rehearsed_step_reads_as_many_keys_as_one_of_pictures_does(on: Engine) -> None:
    parts = on._parts
    rehearsal = Rehearsal(parts.runner, parts.sizes, parts.model, parts.pool)
    rung = on.sizes.buckets.tokens[0]
    batch = rehearsal._batch(parts.runner, rung, page=0)
    assert (batch["seen_T"] == batch["lengths_B"][1] - 1).all()
    assert batch["lengths_B"][1] > rung


def test_text_that_spells_its_tokens_binds_no_picture(on: Engine) -> None:
    text = "define <image_soft_token> and <start_of_image> and <end_of_turn>"
    [result] = ask(on, request(turn(text), max_tokens=1))
    assert result.usage.image_tokens == 0


def test_modules_have_the_parameters_of_the_table_under_both_names(tmp_path: Path) -> None:
    write_gemma(tmp_path, module_names=True)
    config = read_config(tmp_path)
    assert config == read_config(checkpoint("gemma3"))
    assert (config.text.tied, config.text.sliding.whole_layers) == (True, (1,))
    table = family_module("gemma3", "params").parameters(config)
    for part, module in (
        ("vision", family_module("gemma3", "vision").VisionEncoder),
        ("text", family_module("gemma3", "text").TextDecoder),
    ):
        own = getattr(config, part)
        make = (
            (lambda m=module, c=own: m(c))
            if part == "vision"
            else (lambda m=module, c=own: m(c, np.float32))
        )
        state = nnx.state(nnx.eval_shape(make))
        shapes = {(part, *path): leaf.shape for path, leaf in nnx.to_flat_state(state)}
        assert shapes == {p.path: p.shape for p in table if p.path[0] == part}
    rename = family_module("gemma3", "params").published_name
    head = "vision_tower.vision_model.head.probe"
    assert [rename(name) for name in (head, f"model.{head}")] == [None, None]


@pytest.mark.parametrize("tied", [True, False])
def test_without_weight_files_the_flag_says_whether_the_head_is_the_embedding(
    tmp_path: Path, tied: bool
) -> None:
    """As of a converted checkpoint."""
    raw = json.loads((checkpoint("gemma3") / "config.json").read_text())
    assert "tie_word_embeddings" not in raw
    write_json(tmp_path / "config.json", raw)
    assert read_config(tmp_path).text.tied
    write_json(tmp_path / "config.json", raw | {"tie_word_embeddings": tied})
    assert read_config(tmp_path).text.tied == tied


def test_the_tpu_kernels_take_the_model_but_for_the_width_of_this_checkpoint() -> None:
    [reason] = model_obstacles(read_config(checkpoint("gemma3")), np.float32)
    assert "no multiple of 128" in reason


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("text_config", "attn_logit_softcapping", 50.0, "attn_logit_softcapping=50.0"),
        ("text_config", "use_bidirectional_attention", True, "use_bidirectional_attention=True"),
        ("text_config", "layer_types", ["full_attention"], "for each of the 3 layers"),
        ("text_config", "rope_scaling", {"rope_type": "yarn"}, "rope_type='yarn'"),
        ("", "mm_tokens_per_image", 25, "divides pictures of 16 x 16"),
    ],
)
def test_arithmetic_that_jaxmm_does_not_have_is_refused(
    tmp_path: Path, section: str, key: str, value: Any, message: str
) -> None:
    raw = json.loads((checkpoint("gemma3") / "config.json").read_text())
    (raw[section] if section else raw)[key] = value
    write_json(tmp_path / "config.json", raw)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)
