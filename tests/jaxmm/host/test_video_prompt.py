"""A prompt with videos, from messages to ids and positions: transformers' for the same frames."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxmm.config import MediaConfig
from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.decode import InlineDecoder
from jaxmm.host.decodes import Decodes
from jaxmm.host.embedded import RowForm
from jaxmm.host.item import Item, Modality
from jaxmm.host.media import Limits
from jaxmm.host.media_map import MediaMap
from jaxmm.host.placeholders import fold_expanded
from jaxmm.host.prepare import PreparedClip, Preparer
from jaxmm.models import family_module, read_config
from tests.checkpoints import FAMILIES, Family, checkpoint
from tests.engines import picture, turn

LIMITS = Limits(1 << 20, 1 << 20)


class Kit:
    """The host's parts for one checkpoint, without an engine."""

    def __init__(self, family: Family) -> None:
        directory, self.model = checkpoint(family), read_config(checkpoint(family))
        self.tokenizer = ChatTokenizer.from_checkpoint(directory)
        image = family_module(family, "processor").ImageProcessor.from_checkpoint(directory)
        video = family_module(family, "video").VideoProcessor.from_checkpoint(
            directory, image, max_frames=64
        )
        decodes = Decodes(InlineDecoder(image, LIMITS, video), MediaMap(100))
        self.preparer = Preparer(
            image,
            decodes,
            MediaConfig(),
            self.model.image_token_id,
            RowForm(64, 2),
            video=video,
            video_id=self.model.video_token_id,
            encode_plain=self.tokenizer.encode_plain,
        )

    def prompt(self, messages: Any, images: Any = (), videos: Any = (), **wishes: Any) -> Any:
        ids, slots = self.tokenizer.encode_chat(messages)
        pictures = iter(self.preparer.prepare_items(images))
        clips = iter(self.preparer.prepare_clips(videos, **wishes))
        video_id = self.model.video_token_id
        media: list[Item | PreparedClip] = [
            next(clips) if ids[slot] == video_id else next(pictures) for slot in slots
        ]
        return self.preparer.prompt_of(ids, slots, media)


@functools.cache
def kit(family: Family) -> Kit:
    return Kit(family)


@functools.cache
def model_of(family: Family) -> Any:
    config = transformers.AutoConfig.from_pretrained(checkpoint(family))
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(config).model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def frames_of(family: Family, count: int, seed: int = 0) -> list[Any]:
    size = (96, 64) if family.startswith("qwen3") else (112, 84)
    return [picture(*size, seed + i) for i in range(count)]


MESSAGES = turn("<video>", "and", "<image>", "one red house", "<video>")


def test_ids_are_the_text_that_the_published_rule_writes(family: Family) -> None:
    ours = kit(family)
    image = picture(112, 112, 9)
    videos = [frames_of(family, 4), frames_of(family, 6, 50)]
    prompt = ours.prompt(MESSAGES, [image], videos)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint(family))
    template = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    text = template
    tokens = 6 if family.startswith("qwen3") else 12
    run = "<|video_pad|>" * tokens
    pieces = text.split("<|video_pad|>")
    text = pieces[0]
    # seconds are the means of 0 and 0.5, of 1 and 1.5, …
    for stamps, piece in zip((("0.2", "1.2"), ("0.2", "1.2", "2.2")), pieces[1:], strict=True):
        for stamp in stamps:
            step = f"<{stamp} seconds><|vision_start|>{run}<|vision_end|>"
            text += step if family.startswith("qwen3") else run
        text += piece
    [grid] = [item.grid_thw for item in prompt.items if item.modality is Modality.IMAGE]
    text = text.replace("<|image_pad|>", "<|image_pad|>" * (grid[1] * grid[2] // 4))
    written = tokenizer(text, add_special_tokens=False).input_ids
    assert prompt.ids.tolist() == written
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    folded, _ = fold_expanded(np.array(written), *tokenizer.convert_tokens_to_ids(names))
    assert folded.tolist() == tokenizer(template, add_special_tokens=False).input_ids


def test_positions_are_those_of_transformers_where_it_keeps_the_models_rule(
    family: Family,
) -> None:
    """For videos that last no longer than they are wide; see `item_positions`."""
    prompt = kit(family).prompt(MESSAGES, [picture(112, 112, 9)], [frames_of(family, 4)] * 2)
    kinds = torch.zeros((1, prompt.num_tokens), dtype=torch.int32)
    grids: dict[str, list[Any]] = {"image": [], "video": []}
    for item in prompt.items:
        kinds[0, item.offsets[0].start : item.offsets[0].stop] = (
            2 if item.modality is Modality.VIDEO else 1
        )
        if item.modality is Modality.IMAGE:
            grids["image"].append(item.grid_thw)
        elif item.step == 0:
            grids["video"].append((2, *item.grid_thw[1:]))
    rates = {"second_per_grid_ts": [1.0, 1.0]} if family == "qwen2_5_vl" else {}
    expected, delta = model_of(family).get_rope_index(
        torch.tensor(prompt.ids)[None],
        kinds,
        image_grid_thw=torch.tensor(grids["image"]),
        video_grid_thw=torch.tensor(grids["video"]),
        **rates,
    )
    np.testing.assert_array_equal(prompt.positions, expected[:, 0].numpy())
    assert prompt.delta == delta.item()


def test_steps_carry_their_features_and_places(family: Family) -> None:
    prompt = kit(family).prompt(turn("<video>", "it"), (), [frames_of(family, 6)])
    values = 2 * kit(family).model.vision.patch_values
    assert [item.step for item in prompt.items] == [0, 1, 2]
    for index, item in enumerate(prompt.items):
        assert item.features is not None
        assert item.features.shape == (4 * item.num_rows, values)
        (span,) = item.offsets
        assert len(span) == item.num_rows
        here = slice(span.start, span.stop)
        assert (prompt.ids[here] == kit(family).model.video_token_id).all()
        assert (prompt.item_index[here] == index).all()
        assert prompt.row_index[here].tolist() == list(range(item.num_rows))
    assert len({item.identity for item in prompt.items}) == 3


def test_what_decides_the_cache_is_content_and_for_absolute_time_the_rate(family: Family) -> None:
    video = frames_of(family, 6)
    slow, fast = (
        kit(family).prompt(turn("<video>", "it"), (), [video], fps=rate) for rate in (1.0, 2.0)
    )
    assert [i.identity for i in slow.items] == [i.identity for i in fast.items]
    differs = family == "qwen2_5_vl"
    assert (slow.items[1].mark != fast.items[1].mark) == differs
    assert slow.items[0].mark == fast.items[0].mark == slow.items[0].identity
    if not family.startswith("qwen3"):  # its ids differ by the timestamps
        assert (slow.cache_ids.tolist() != fast.cache_ids.tolist()) == differs


def test_a_known_video_has_no_features_and_gets_them_back(family: Family) -> None:
    preparer, video = kit(family).preparer, frames_of(family, 4, 90)
    [first] = preparer.prepare_clips([video])
    features = [np.array(item.features) for item in first.items]
    identities = [item.identity for item in first.items]
    del first
    [known] = preparer.prepare_clips([video])
    assert [item.features for item in known.items] == [None, None]
    assert [item.identity for item in known.items] == identities
    loaded = preparer.load_steps(video, known.items)
    for ours, expected in zip(loaded, features, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_callers_hash_stands_for_all_steps_and_each_apart() -> None:
    preparer, video = kit("qwen2_vl").preparer, frames_of("qwen2_vl", 4)
    other = frames_of("qwen2_vl", 4, 70)
    [named] = preparer.prepare_clips([video], mm_hashes=["ab"])
    [same] = preparer.prepare_clips([other], mm_hashes=["ab"])
    [plain] = preparer.prepare_clips([video])
    words = [item.sentinels for item in named.items]
    assert words == [item.sentinels for item in same.items]
    assert len(set(words)) == 2
    assert words != [item.sentinels for item in plain.items]
    # the rows are guarded by what they are, whatever their name
    assert [i.identity for i in named.items] == [i.identity for i in plain.items]
