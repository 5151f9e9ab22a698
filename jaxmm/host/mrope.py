"""M-RoPE positions of a prompt with still pictures (arXiv:2409.12191, section 2.1). Host only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxmm.errors import PlaceholderError
from jaxmm.host.item import Item


def image_positions(
    num_tokens: int, items: Sequence[Item], merge_size: int
) -> tuple[npt.NDArray[np.int32], int]:
    """Number the tokens of a prompt along time, height and width.

    A text token has one number in all three rows. The rows of a picture share one time, count
    rows and columns of the merged grid, and the text after it goes on from the maximum of all
    three axes plus 1.

    Args:
        num_tokens: T, tokens of the expanded prompt.
        items: Still pictures with one span each, in the order of their spans.
        merge_size: Patches that one token spans in each direction.

    Returns:
        int32[3, T] positions, and the delta: position minus index of every token after the prompt.

    Raises:
        PlaceholderError: A span that is not as long as its grid has tokens.
    """
    positions = np.empty((3, num_tokens), np.int32)
    stop = following = 0
    for item in items:
        (span,) = item.offsets
        text = following + span.start - stop
        positions[:, stop : span.start] = np.arange(following, text, dtype=np.int32)
        height, width = _merged(item, merge_size)
        block = positions[:, span.start : span.stop].reshape(3, height, width)
        block[0] = text
        block[1] = np.arange(text, text + height, dtype=np.int32)[:, None]
        block[2] = np.arange(text, text + width, dtype=np.int32)
        stop, following = span.stop, text + max(height, width)
    delta = following - stop
    positions[:, stop:] = np.arange(following, num_tokens + delta, dtype=np.int32)
    return positions, delta


def _merged(item: Item, merge_size: int) -> tuple[int, int]:
    time, height, width = (item.grid_thw[0], *(n // merge_size for n in item.grid_thw[1:]))
    tokens = len(item.offsets[0])
    if time != 1 or height * width != tokens:
        raise PlaceholderError(
            f"grid {item.grid_thw} is no still picture of {tokens} tokens, the length of its span"
        )
    return height, width
