"""Random steps for the paged attention kernels: sequences with old and new tokens over a pool."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_pallas.ragged_paged_attention import Ragged, layout


@dataclass(frozen=True)
class Step:
    """One step. `q_THC` has no padding lanes; what no sequence owns in the pool is NaN."""

    q_THC: np.ndarray
    new_TKJ: np.ndarray
    pages_PKSJ: np.ndarray
    start_B1: np.ndarray
    length_B: np.ndarray
    page_table_BQ: np.ndarray
    num_decode: int
    num_sequences: int

    @property
    def num_real_tokens(self) -> int:
        return int(self.start_B1[self.num_sequences])

    @property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What all kernels take of the sequences."""
        return self.start_B1, self.length_B, self.page_table_BQ

    @property
    def new_TY(self) -> np.ndarray:
        """KV rows as the kernels take them."""
        return self.new_TKJ.reshape(len(self.new_TKJ), -1)

    @property
    def q_TX(self) -> np.ndarray:
        """Queries as the kernels take them."""
        T, H, C = self.q_THC.shape
        lanes = layout.query_lanes(C)
        return np.pad(self.q_THC, ((0, 0), (0, 0), (0, lanes - C))).reshape(T, H * lanes)

    def outputs_THC(self, out_TX: np.ndarray) -> np.ndarray:
        """Drop the lanes around the outputs."""
        T, H, C = self.q_THC.shape
        lanes = layout.query_lanes(C)
        at = layout.value_lane(C) % lanes
        return out_TX.reshape(T, H, lanes)[:, :, at : at + C].astype(np.float32)


def random_step(
    decodes: list[int],
    extends: list[tuple[int, int]],
    *,
    num_tokens: int,
    num_sequences: int | None = None,
    pages_per_sequence: int = 4,
    page_size: int = 64,
    heads: tuple[int, int] = (4, 2),
    channels: int = 128,
    dtype: Any = np.float32,
    seed: int = 0,
) -> Step:
    """Make a step.

    Args:
        decodes: Old tokens of each decoding sequence.
        extends: Old and new tokens of each extending sequence.
        num_tokens: Tokens of the step with padding.
        num_sequences: Rows of the tables with padding.
        heads: Query and KV heads.
    """
    rng = np.random.default_rng(seed)
    runs = [(old, 1) for old in decodes] + extends
    B = num_sequences or len(runs)
    (H, K), J = heads, layout.row_lanes(channels)
    old, new = (np.array([run[i] for run in runs] + [0] * (B - len(runs))) for i in range(2))
    start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    P = B * pages_per_sequence + 1
    table = rng.permutation(P)[: B * pages_per_sequence].reshape(B, -1).astype(np.int32)
    pages = np.full((P, K, page_size, J), np.nan, np.float32)
    for b in range(len(runs)):
        slots = np.arange(old[b])
        page = table[b, slots // page_size]
        pages[page, :, slots % page_size] = _rows(rng, old[b], K, channels)
    return Step(
        q_THC=(0.4 * rng.normal(size=(num_tokens, H, channels))).astype(dtype),
        new_TKJ=_rows(rng, num_tokens, K, channels).astype(dtype),
        pages_PKSJ=pages.astype(dtype),
        start_B1=start,
        length_B=(old + new).astype(np.int32),
        page_table_BQ=table,
        num_decode=len(decodes),
        num_sequences=len(runs),
    )


def held_alone(pages_PJSC: np.ndarray, ragged: Ragged, elsewhere: float) -> np.ndarray:
    """The pages with one number wherever no sequence has a key: what others have left there."""
    out = np.full(pages_PJSC.shape, elsewhere, np.float32)
    for b in range(int(ragged.num_sequences)):
        key = np.arange(int(ragged.lengths_B[b]))
        place = np.array(ragged.tables_BQ[b])[key // out.shape[2]], slice(None), key % out.shape[2]
        out[place] = np.asarray(pages_PJSC)[place]
    return out


def _rows(rng: np.random.Generator, count: int, kv_heads: int, channels: int) -> np.ndarray:
    """Random KV rows with zeros in the padding lanes."""
    rows = np.zeros((count, kv_heads, layout.row_lanes(channels)), np.float32)
    at = layout.value_lane(channels)
    rows[..., :channels] = rng.normal(size=(count, kv_heads, channels))
    rows[..., at : at + channels] = rng.normal(size=(count, kv_heads, channels))
    return rows
