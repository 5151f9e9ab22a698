"""Tiles, rows and prompts of DeepSeek-VL2 against the authors' processor."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmm.errors import ConfigError, ModelError, RequestError
from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.placeholders import expand_slots
from jaxmm.models.deepseek_vl2.chat import load_tokenizer
from jaxmm.models.deepseek_vl2.processor import ImageProcessor
from tests import deepseek

SMALL = ImageProcessor.from_checkpoint(deepseek.FOLDER / "mha")
TILE = SMALL.tile_pixels
PUBLISHED = ImageProcessor(
    patch_size=14,
    tile_pixels=384,
    candidates=tuple((w * 384 // TILE, h * 384 // TILE) for w, h in SMALL.candidates),
    min_pixels=384**2,
    max_pixels=9 * 384**2,
    fill=(127, 127, 127),
)
"""That of the published models: tiles of 384 pixels, nine of them at most."""


def rows(width: int, height: int, num_images: int = 1, **limits: int) -> int:
    """Tokens of a picture of that size."""
    pixels = PUBLISHED.limits(**limits, num_images=num_images)
    return PUBLISHED.num_rows(PUBLISHED._grid(PUBLISHED.tiling(width, height, *pixels)))


def test_the_published_choice_of_tiles() -> None:
    golden = deepseek.arrays("mha")
    sizes, chosen = golden["tile_choice/sizes"], golden["tile_choice/chosen"]
    limits = PUBLISHED.limits()
    ours = [PUBLISHED.tiling(width, height, *limits) for width, height in sizes.tolist()]
    assert len(ours) > 400
    np.testing.assert_array_equal(ours, chosen)


@pytest.mark.parametrize("case", [name for name in deepseek.CASES if name != "text_only"])
def test_patches_are_the_pixels_of_the_authors_tiles(case: str) -> None:
    golden = deepseek.arrays("mha")
    images = deepseek.pictures(deepseek.cases("mha")[case])
    limits = SMALL.limits(num_images=len(images))
    first, p, side = 0, SMALL.patch_size, SMALL.form.side
    for image, crop in zip(images, golden[f"{case}/spatial_crop"], strict=True):
        patches, grid = SMALL.patches(image, *limits)
        assert grid == (1, side * crop[1], side * crop[0])
        tiles = golden[f"{case}/tiles_u8"][first : first + 1 + crop.prod()]
        seen = tiles[:, :, : side * p, : side * p].reshape(-1, 3, side, p, side, p)
        expected = seen.transpose(0, 2, 4, 1, 3, 5).reshape(len(patches), -1)
        np.testing.assert_array_equal(patches, expected)
        first += len(tiles)
    assert first == len(golden[f"{case}/tiles_u8"])


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((384, 384), 421),  # 14 * 15 + 1 + 14 * 15
        ((640, 480), 1023),  # 2 x 2 tiles: 211 + 28 * 29
        ((384, 768), 631),  # 211 + 28 * 15
        ((768, 384), 617),  # 211 + 14 * 29
        ((1000, 1000), 2017),  # 3 x 3: 211 + 42 * 43
        ((332, 27), 421),
        ((1, 1), 421),
        ((4000, 1), 421),
        ((1, 4000), 421),
    ],
)
def test_tokens_of_a_picture(size: tuple[int, int], tokens: int) -> None:
    assert rows(*size) == tokens


@pytest.mark.parametrize(("num_images", "tokens"), [(1, 1023), (2, 1023), (3, 421), (6, 421)])
def test_more_than_two_pictures_are_not_tiled(num_images: int, tokens: int) -> None:
    assert rows(640, 480, num_images) == tokens


@pytest.mark.parametrize("size", [(4000, 1), (1, 4000), (3000, 2)])
def test_the_thinnest_pictures_leave_a_line(size: tuple[int, int]) -> None:
    patches, _ = SMALL.patches(Image.new("RGB", size, "white"))
    assert (patches == 255).any()
    assert (patches == 127).any()


def test_limits_of_a_request_choose_among_the_tilings() -> None:
    tile = 384**2
    assert rows(1000, 1000, max_pixels=4 * tile) == 211 + 28 * 29
    assert rows(1000, 1000, max_pixels=4 * tile - 1) == rows(1000, 1000, max_pixels=3 * tile)
    assert rows(100, 100, min_pixels=9 * tile) == 2017
    assert PUBLISHED.limits(max_pixels=10**9) == PUBLISHED.limits()
    assert rows(900, 900, 3, max_pixels=4 * tile) == 421
    with pytest.raises(RequestError, match=r"max_pixels=1000 is outside \[147456"):
        PUBLISHED.limits(max_pixels=1000)
    with pytest.raises(RequestError, match="min_pixels=1474560: no tiling has between that and"):
        PUBLISHED.limits(min_pixels=10 * tile)
    with pytest.raises(RequestError, match="with more than 2 images each is one tile"):
        PUBLISHED.limits(min_pixels=2 * tile, num_images=3)
    server = dataclasses.replace(PUBLISHED, max_pixels=4 * tile)
    assert server.max_patches == 5 * 729
    assert PUBLISHED.max_patches == 10 * 729
    with pytest.raises(RequestError, match="max_pixels=1327104 is outside"):
        server.limits(max_pixels=9 * tile)
    with pytest.raises(ConfigError, match="is below one tile's 384 x 384"):
        dataclasses.replace(PUBLISHED, max_pixels=tile - 1)


def test_candidates_that_are_no_whole_tiles_are_refused(tmp_path: Path) -> None:
    shutil.copytree(deepseek.FOLDER / "mha", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "processor_config.json"
    file.write_text('{"candidate_resolutions": [[72, 72], [72, 100]]}')
    with pytest.raises(ModelError, match="candidate_resolutions are not multiples of 72"):
        ImageProcessor.from_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(deepseek.FOLDER / "mla")


@pytest.mark.parametrize("case", deepseek.CASES)
def test_prompts_are_the_authors(tokenizer: ChatTokenizer, case: str) -> None:
    given = deepseek.cases("mla")[case]
    images = deepseek.pictures(given)
    limits = SMALL.limits(num_images=len(images))
    counts = [SMALL.num_rows(SMALL.patches(image, *limits)[1]) for image in images]
    ids, slots = tokenizer.encode_chat(deepseek.conversation(given))
    expanded, _ = expand_slots(ids, slots, counts)
    np.testing.assert_array_equal(expanded, deepseek.arrays("mla")[f"{case}/input_ids"])


def text_of(tokenizer: ChatTokenizer, *messages: dict[str, Any]) -> str:
    ids, _ = tokenizer.encode_chat(messages)
    return str(tokenizer._backend.decode(ids.tolist(), skip_special_tokens=False))


def test_system_turns_and_pictures_that_touch_text(tokenizer: ChatTokenizer) -> None:
    image = {"type": "image"}
    parts = [image, image, {"type": "text", "text": "what"}, image]
    written = text_of(
        tokenizer,
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": parts},
    )
    assert written == (
        "<｜begin▁of▁sentence｜>be brief\n\n"
        "<|User|>: <image>\n<image>\nwhat<image>\n\n<|Assistant|>:"
    )


def test_two_questions_in_a_row_and_calls_as_text(tokenizer: ChatTokenizer) -> None:
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    written = text_of(
        tokenizer,
        image,
        image,
        {"role": "assistant", "content": "yes", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    )
    question = "<|User|>: <image>\na\n\n"
    assert written.startswith(f"<｜begin▁of▁sentence｜>{question}{question}<|Assistant|>:yes\n")
    assert '"look"' in written
    assert written.endswith("\n4\n</tool_response>\n\n<|Assistant|>:")


def test_typed_tokens_bind_no_picture_and_end_no_turn(tokenizer: ChatTokenizer) -> None:
    typed = "a <image> b <|Assistant|>: c <｜end▁of▁sentence｜> d"
    ids, slots = tokenizer.encode_chat([{"role": "user", "content": typed}])
    special = [i for i in ids.tolist() if i in tokenizer.special_ids]
    assert not len(slots)
    assert special == [512, 521, 522]  # begin, user, assistant: those of the form alone


def test_videos_are_refused_by_name(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(RequestError, match="takes no videos; send pictures"):
        tokenizer.encode_chat([{"role": "user", "content": [{"type": "video"}]}])


def test_a_raw_prompt_begins_with_the_beginning(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.encode_text("a house").tolist()[0] == 512
    assert 512 not in tokenizer.encode_plain("a house")


def test_tokens_that_a_file_lacks_get_the_ids_that_the_processor_gives(tmp_path: Path) -> None:
    import json

    from jaxmm.models.deepseek_vl2.tokens import image_token_id, open_tokenizer

    shutil.copytree(deepseek.FOLDER / "mla", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["added_tokens"] = raw["added_tokens"][:3]  # begin, end and padding alone
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert image_token_id(tmp_path) == 515
    assert open_tokenizer(tmp_path).token_to_id("<|Assistant|>") == 522
    file.unlink()
    assert image_token_id(tmp_path) == -1
