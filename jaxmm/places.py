"""What must fit together in a request: places and media, ids and their expansion, hashes.
Host only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxmm.errors import RequestError
from jaxmm.host.identity import parse_caller_hashes
from jaxmm.host.item import Prompt
from jaxmm.request import Request


def check_places(request: Request, is_video: npt.NDArray[np.bool_]) -> None:
    """Refuse a prompt that has not one place for each image and each video."""
    num_videos = int(is_video.sum())
    for noun, places, sent in (
        ("images", len(is_video) - num_videos, len(request.images)),
        ("videos", num_videos, len(request.videos)),
    ):
        if places != sent:
            raise RequestError(f"the prompt has places for {places} {noun} and {sent} were sent")


def check_expanded(given: npt.NDArray[np.int64], prompt: Prompt) -> None:
    """Refuse ids that were expanded by another rule than the model's, or for other media."""
    if not np.array_equal(given, prompt.ids):
        raise RequestError(
            f"token_ids are {len(given)} expanded tokens; with the images and videos that were "
            f"sent they are {prompt.num_tokens}, or others. Send one placeholder for each instead"
        )


def split_hashes(
    mm_hashes: Sequence[str] | None, is_video: npt.NDArray[np.bool_]
) -> tuple[list[str] | None, list[str] | None]:
    """Those of images and those of videos; a list of a wrong length is ignored whole."""
    if mm_hashes is None or isinstance(mm_hashes, str) or len(mm_hashes) != len(is_video):
        parse_caller_hashes(mm_hashes, len(is_video))  # says so in the log
        return None, None
    pairs = list(zip(mm_hashes, is_video.tolist(), strict=True))
    return [h for h, video in pairs if not video], [h for h, video in pairs if video]
