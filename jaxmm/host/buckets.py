"""The ladders of static sizes: step tokens and lane patches. Host only.

Everything the device runs has a size from these ladders, so everything can be compiled at start.
Small sizes double from rung to rung; large ones are closer, since there padding is real work.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmm.errors import ConfigError, MediaTooLarge

_DENSE_FROM = 128  # tokens from which rungs no longer double, on machines where padding is dear
_FINE_STEP, _TOKEN_STEP = 32, 64  # their distance below _COARSE_FROM, and from there on
_COARSE_FROM = 512
_MIDDLE = 96  # a rung between 64 and 128
_PATCH_ALIGN = 64  # a window of 8 x 8 patches
_LARGE_LANE = 1024  # patches from which an eighth of padding would be felt


def round_up(value: int, multiple: int) -> int:
    """Next multiple of `multiple` at or above `value`."""
    return -(-value // multiple) * multiple


def token_rungs(low: int, high: int, *, dense: bool) -> tuple[int, ...]:
    """Rungs of step tokens.

    Args:
        low: Lowest rung.
        high: Highest rung at least; rounded up to a rung.
        dense: Rungs 32 apart from 128 up, 64 apart from 512 up (for devices without idle
            compute); else powers of two.
    """
    rungs, rung = [], 1
    while rung < low:
        rung *= 2
    while rung < high and not (dense and rung >= _DENSE_FROM):
        rungs.append(rung)
        rung *= 2
    if dense and low <= _MIDDLE and high > _DENSE_FROM // 2:
        rungs.append(_MIDDLE)
    if not (dense and rung >= _DENSE_FROM):
        rungs.append(rung)
    elif high > _MIDDLE:
        rungs.append(rung)
        while rungs[-1] < high:
            rungs.append(rungs[-1] + (_FINE_STEP if rungs[-1] < _COARSE_FROM else _TOKEN_STEP))
    return tuple(sorted(set(rungs)))


def patch_rungs(low: int, high: int, *, dense: bool, align: int = _PATCH_ALIGN) -> tuple[int, ...]:
    """Rungs of lane patches, multiples of `align`: closer together when dense.

    Args:
        low: Lowest rung, rounded up to a multiple.
        high: Highest rung at least.
        dense: Four rungs an octave, eight from 1024 up, for devices without idle compute; else two.
        align: What every rung is a multiple of; 64, or a multiple.
    """
    steps = 4 if dense else 2
    rungs = [round_up(low, align)]
    base = rungs[0]
    while rungs[-1] < high:
        parts = steps * 2 if base >= _LARGE_LANE and dense else steps
        for i in range(1, parts + 1):
            rung = round_up(base + base * i // parts, align)
            if rungs[-1] < high and rung > rungs[-1]:
                rungs.append(min(rung, max(round_up(high, align), rungs[-1] + align)))
        base *= 2
    return tuple(rungs)


def tile_rungs(
    tile: int, low: int, high: int, *, dense: bool, align: int, least: int = 2
) -> tuple[int, ...]:
    """Rungs of lane patches for pictures of equal tiles: `patch_rungs` of tiles.

    Args:
        tile: Patches of a tile.
        low: Patches of the lowest rung at least.
        high: Patches of the highest rung at least.
        dense: As for `patch_rungs`.
        align: What every rung is a multiple of.
        least: Tiles of the smallest picture.
    """
    fewest = max(least, -(-low // tile))
    tiles = patch_rungs(fewest, max(fewest, -(-high // tile)), dense=dense, align=1)
    return tuple(round_up(n * tile, align) for n in tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The two ladders of one engine."""

    tokens: tuple[int, ...]
    patches: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "patches"):
            rungs: Sequence[int] = getattr(self, name)
            if not rungs or list(rungs) != sorted(set(rungs)):
                raise ConfigError(f"buckets: {name} rungs {list(rungs)} do not ascend")

    def step_tokens(self, num_tokens: int) -> int:
        """Rung for a step of `num_tokens`; the scheduler keeps within the top rung."""
        return self.tokens[bisect_left(self.tokens, num_tokens)]

    def lane_patches(self, num_patches: int) -> int:
        """Rung for a lane of `num_patches`.

        Raises:
            MediaTooLarge: Above the top rung.
        """
        if num_patches > self.patches[-1]:
            raise MediaTooLarge(
                f"an image takes {num_patches} patches in the encoder; the limit is "
                f"{self.patches[-1]}. Send a smaller image, lower max_pixels, or raise "
                "buckets.max_patches_per_step."
            )
        return self.patches[bisect_left(self.patches, num_patches)]

    @property
    def num_executables(self) -> int:
        """Executables that warm-up makes: each rung of both ladders, prime, upload
        and score step."""
        return len(self.tokens) + len(self.patches) + 3
