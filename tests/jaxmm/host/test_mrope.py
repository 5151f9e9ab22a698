"""Positions worked out by hand, and those of the Hugging Face model where it can be followed."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmm.errors import PlaceholderError
from jaxmm.host.item import Item, Modality, Span
from jaxmm.host.mrope import item_positions

IMAGE_ID = 7


def layout(*parts: int | tuple[int, int]) -> tuple[int, list[Item]]:
    """Tokens and items of a prompt: an int is text, a pair the (height, width) of a grid."""
    stop, items = 0, []
    for part in parts:
        start = stop
        stop += part if isinstance(part, int) else part[0] * part[1] // 4
        if isinstance(part, tuple):
            items.append(picture((1, *part), Span(start, stop)))
    return stop, items


def picture(grid: tuple[int, int, int], span: Span) -> Item:
    return Item(
        modality=Modality.IMAGE,
        features=np.zeros((grid[1] * grid[2], 1), np.uint8),
        embeddings=None,
        grid_thw=grid,
        num_rows=grid[1] * grid[2] // 4,
        identity=bytes(32),
        sentinels=(1_000_000,) * 4,
        offsets=(span,),
    )


@pytest.mark.parametrize(
    ("parts", "rows", "delta"),
    [
        (
            (3, (4, 6), 2),
            ["0 1 2 3 3 3 3 3 3 6 7", "0 1 2 3 3 3 4 4 4 6 7", "0 1 2 3 4 5 3 4 5 6 7"],
            -3,
        ),
        (
            (2, (4, 4), 1, (2, 8), 2),
            [
                "0 1 2 2 2 2 4 5 5 5 5 9 10",
                "0 1 2 2 3 3 4 5 5 5 5 9 10",
                "0 1 2 3 2 3 4 5 6 7 8 9 10",
            ],
            -2,
        ),
        (((6, 4), 3), ["0 0 0 0 0 0 3 4 5", "0 0 1 1 2 2 3 4 5", "0 1 0 1 0 1 3 4 5"], -3),
        ((2, (6, 4)), ["0 1 2 2 2 2 2 2", "0 1 2 2 3 3 4 4", "0 1 2 3 2 3 2 3"], -3),
        ((4,), ["0 1 2 3"] * 3, 0),
        ((1, (2, 8)), ["0 1 1 1 1", "0 1 1 1 1", "0 1 2 3 4"], 0),
    ],
)
def test_positions_worked_out_by_hand(parts: tuple, rows: list[str], delta: int) -> None:
    positions, found = item_positions(*layout(*parts), merge_size=2)
    assert positions.dtype == np.int32
    assert positions.tolist() == [[int(n) for n in row.split()] for row in rows]
    assert found == delta


@functools.cache
def reference_model() -> object:
    from transformers import Qwen2VLConfig, Qwen2VLModel

    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "vocab_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 2},
    )
    return Qwen2VLModel(config)


parts = st.lists(
    st.integers(1, 9) | st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8
)


@settings(deadline=None)  # the first example makes the model
@given(parts=parts)
def test_positions_equal_hugging_face_for_still_pictures(parts: list) -> None:
    import torch

    spaced: list = []  # the reference cannot tell two adjacent pictures apart
    for part in parts:
        spaced += [part] if isinstance(part, int) else [1, (part[0] * 2, part[1] * 2)]
    num_tokens, items = layout(*spaced)
    kinds = torch.zeros((1, num_tokens), dtype=torch.int32)
    for item in items:
        kinds[0, item.offsets[0].start : item.offsets[0].stop] = 1
    grids = torch.tensor([item.grid_thw for item in items]) if items else None
    expected, deltas = reference_model().get_rope_index(  # type: ignore[attr-defined]
        torch.zeros((1, num_tokens), dtype=torch.int64), kinds, image_grid_thw=grids
    )
    positions, delta = item_positions(num_tokens, items, merge_size=2)
    assert positions.tolist() == expected[:, 0].tolist()
    assert delta == deltas.item()


@given(parts=parts)
def test_text_goes_on_after_the_maximum_of_all_axes(parts: list) -> None:
    doubled = [p if isinstance(p, int) else (p[0] * 2, p[1] * 2) for p in parts]
    num_tokens, items = layout(*doubled)
    positions, delta = item_positions(num_tokens, items, merge_size=2)
    assert positions.max() + 1 == num_tokens + delta
    for item in items:
        (span,) = item.offsets
        before = positions[:, : span.start].max() if span.start else -1
        assert positions[:, span.start].tolist() == [before + 1] * 3


def clip_layout(
    times: list[int] | list[None], height: int, width: int, before: int, between: int, after: int
) -> tuple[int, list[Item]]:
    """A prompt with one video, `between` tokens of text from step to step."""
    start, items = before, []
    for step, time in enumerate(times):
        stop = start + height * width
        item = picture((1, 2 * height, 2 * width), Span(start, stop))
        items.append(dataclasses.replace(item, modality=Modality.VIDEO, step=step, time=time))
        start = stop + between
    return start - between + after, items


@pytest.mark.parametrize(
    ("times", "time_rows", "text", "delta"),
    [
        # Qwen2-VL counts steps; Qwen2.5-VL two positions a second. The text after a video goes on
        # behind its time, which reaches beyond its height and width here.
        ([0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [7, 8, 9], -15),
        ([0, 2, 4, 6, 8], [2, 4, 6, 8, 10], [11, 12, 13], -11),
        ([0, 0, 1, 1, 1], [2, 2, 3, 3, 3], [4, 5, 6], -18),
    ],
)
def test_positions_of_a_video_worked_out_by_hand(
    times: list[int], time_rows: list[int], text: list[int], delta: int
) -> None:
    positions, found = item_positions(*clip_layout(times, 2, 2, 2, 0, 3), merge_size=2)
    assert found == delta
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[0, 2:22].tolist() == np.repeat(time_rows, 4).tolist()
    assert positions[1, 2:22].tolist() == [2, 2, 3, 3] * 5
    assert positions[2, 2:22].tolist() == [2, 3, 2, 3] * 5
    assert positions[:, 22:].tolist() == [text] * 3


def test_steps_without_a_time_are_numbered_as_pictures() -> None:
    num_tokens, items = clip_layout([None] * 3, 2, 4, 1, 3, 2)
    pictures = [picture(item.grid_thw, item.offsets[0]) for item in items]
    expected, delta = item_positions(num_tokens, pictures, merge_size=2)
    positions, found = item_positions(num_tokens, items, merge_size=2)
    assert found == delta
    np.testing.assert_array_equal(positions, expected)


@pytest.mark.parametrize("grid", [(1, 4, 4), (2, 4, 4), (1, 4, 8)])
def test_grid_that_does_not_fill_its_span_is_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(PlaceholderError, match="its span"):
        item_positions(9, [picture(grid, Span(1, 6))], merge_size=2)
