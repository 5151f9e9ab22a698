"""M-RoPE positions of pictures, videos and text (arXiv:2409.12191, section 2.1). Host only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxmm.errors import PlaceholderError
from jaxmm.host.item import Item


def item_positions(
    num_tokens: int, items: Sequence[Item], merge_size: int
) -> tuple[npt.NDArray[np.int32], int]:
    """Number the tokens of a prompt along time, height and width.

    A text token has one number in all three rows. The rows of a picture share one time, and count
    rows and columns of the merged grid. The steps of a video count rows and columns alike, from
    where the first one stands, and each has a time of its own. The text after goes on from the
    maximum of all three axes plus 1: the rule of the models' own code, which transformers from 5.3
    on does not follow for videos that last longer than they are wide.

    Args:
        num_tokens: T, tokens of the expanded prompt.
        items: Pictures, and steps of videos, with one span each, in the order of their spans.
        merge_size: Patches that one token spans in each direction.

    Returns:
        int32[3, T] positions, and the delta: position minus index of every token after the prompt.

    Raises:
        PlaceholderError: A span that is not as long as its grid has tokens.
    """
    positions = np.empty((3, num_tokens), np.int32)
    stop = following = first = 0
    for item in items:
        (span,) = item.offsets
        text = following + span.start - stop
        positions[:, stop : span.start] = np.arange(following, text, dtype=np.int32)
        first = first if item.continues else text
        height, width = _merged(item, merge_size)
        time = item.time or 0
        block = positions[:, span.start : span.stop].reshape(3, height, width)
        block[0] = first + time
        block[1] = np.arange(first, first + height, dtype=np.int32)[:, None]
        block[2] = np.arange(first, first + width, dtype=np.int32)
        stop, following = span.stop, max(text, first + max(time + 1, height, width))
    delta = following - stop
    positions[:, stop:] = np.arange(following, num_tokens + delta, dtype=np.int32)
    return positions, delta


def _merged(item: Item, merge_size: int) -> tuple[int, int]:
    time, height, width = (item.grid_thw[0], *(n // merge_size for n in item.grid_thw[1:]))
    tokens = len(item.offsets[0])
    if time != 1 or height * width != tokens:
        raise PlaceholderError(
            f"grid {item.grid_thw} is no picture or step of {tokens} tokens, the length of its span"
        )
    return height, width
