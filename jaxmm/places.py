"""What must fit together in a request: places and media, ids and their expansion, hashes.
Host only."""

import numbers
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxmm.errors import RequestError
from jaxmm.host.identity import parse_caller_hashes
from jaxmm.host.item import Prompt
from jaxmm.request import Request

_HOW_EXPANDED = (
    ". token_ids are expanded: one pair of vision markers has to stand around each image, and one "
    "around all steps of a video. Send one placeholder for each instead"
)


def check_places(
    request: Request, is_video: npt.NDArray[np.bool_], *, is_expanded: bool = False
) -> None:
    """Refuse a prompt that has not one place for each image and each video.

    Args:
        request: Which they were sent with.
        is_video: Of each place.
        is_expanded: The places are those of an expansion that was undone.
    """
    num_videos = int(is_video.sum())
    for noun, places, sent in (
        ("images", len(is_video) - num_videos, len(request.images)),
        ("videos", num_videos, len(request.videos)),
    ):
        if places != sent:
            raise RequestError(
                f"the prompt has places for {places} {noun} and {sent} were sent"
                + (_HOW_EXPANDED if is_expanded else "")
            )


def check_expanded(given: npt.NDArray[np.int64], prompt: Prompt) -> None:
    """Refuse ids that were expanded by another rule than the model's, or for other media."""
    if not np.array_equal(given, prompt.ids):
        raise RequestError(
            f"token_ids are {len(given)} expanded tokens; with the images and videos that were "
            f"sent they are {prompt.num_tokens}, or others. Send one placeholder for each instead"
        )


def check_pixel_limits(request: Request) -> None:
    """Refuse limits that are no whole numbers, before a family compares them with its own."""
    limits = {"min_pixels": request.min_pixels, "max_pixels": request.max_pixels}
    for name, value in limits.items():
        if value is not None and (
            not isinstance(value, numbers.Integral) or isinstance(value, bool)
        ):
            raise RequestError(f"{name}={value!r} is not a whole number", name)


def split_hashes(
    mm_hashes: Sequence[str] | None, is_video: npt.NDArray[np.bool_]
) -> tuple[list[str] | None, list[str] | None]:
    """Those of images and those of videos; a list of a wrong length is ignored whole."""
    if mm_hashes is None or isinstance(mm_hashes, str) or len(mm_hashes) != len(is_video):
        parse_caller_hashes(mm_hashes, len(is_video))  # says so in the log
        return None, None
    pairs = list(zip(mm_hashes, is_video.tolist(), strict=True))
    return [h for h, video in pairs if not video], [h for h, video in pairs if video]
