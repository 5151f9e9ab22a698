"""The kernels at the shapes they serve: what to compile, its least cost, what runs how often.

The numbers of times go with `tests.bench.schedule`: one for each large part of the program.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.kv_update import kernel as kv
from kernels_pallas.ragged_paged_attention import decode, extend, key_block
from kernels_pallas.ragged_paged_attention import kernel as mixed
from kernels_pallas.ragged_paged_attention.layout import query_lanes, row_lanes
from kernels_pallas.rotate_heads import grouped, packed, rotate_grouped, rotate_packed
from kernels_pallas.scatter_rows import kernel as scatter
from kernels_pallas.scatter_rows import layout as arena
from kernels_pallas.segment_attention import kernel as segment
from kernels_pallas.segment_attention import windows

C = 128
"""Channels of a text head."""


@dataclass(frozen=True)
class Heads:
    """Attention of a decoder: query and KV heads, and what a row of KV is."""

    queries: int
    kv: int
    key: int = C
    """Channels of a key, and of a query."""
    value: int = C
    shared: bool = False
    """The value is the first channels of the key, and nothing else is kept."""

    @property
    def lanes(self) -> int:
        """Lanes of a query."""
        return query_lanes(self.key)

    @property
    def row(self) -> int:
        """Lanes of a row of KV."""
        return self.lanes if self.shared else row_lanes(self.key)

    @property
    def row_bytes(self) -> int:
        """Of one token, all KV heads."""
        return self.kv * self.row * 2

    def __str__(self) -> str:
        wide = "" if self.key == C else f" of {self.key}"
        return f"{self.queries}/{self.kv}{wide}"


LATENT = Heads(16, 1, key=576, value=512, shared=True)
"""DeepSeek-VL2 Small: all heads read one compressed row a token."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    donate: tuple[int, ...] = ()
    donated_bytes: int = 0
    """What must come back in the memory of an argument."""
    hbm_bytes: float
    """Bytes that the call must move."""
    flops: float = 0.0
    """Operations that the matrix units must do."""
    kernel: str
    """Name of the Pallas call whose schedule is read."""
    times: tuple[float, ...] = ()
    """How often each large part runs, inside of what holds it."""
    pattern: str = ""
    """Which parts those are (`schedule.set_times`)."""
    large: int = 95
    """Bundles from which a part is large."""
    small_loop_times: float = 1.0
    """How often loops run that are not large."""
    inner_loop_times: float = 1.0
    """How often loops inside of those do."""


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def decode_case(num: int, heads: Heads, page: int, length: int = 2048) -> Case:
    """Decode of `num` sequences of equal length."""
    per_sequence = 2 * length // page
    pool = bf16(num * length // page + 1, heads.kv, page, heads.row)
    n = decode.block_pages_of(pool, per_sequence)
    blocks = math.ceil(length / (n * page))
    return Case(
        name=f"decode {num}, {heads}, page {page}",
        function=decode.decode_attention,
        args=(
            bf16(num, heads.kv, math.ceil(heads.queries / heads.kv / 8) * 8, heads.lanes),
            bf16(num, heads.kv, heads.row),
            pool,
            i32(num),
            i32(num, per_sequence),
            i32(1),
        ),
        donate=(2,),
        donated_bytes=math.prod(pool.shape) * 2,
        hbm_bytes=num * length * heads.row_bytes,
        flops=2 * num * length * heads.queries * (heads.key + heads.value),
        kernel="decode_attention",
        # the first reads, their DMAs, all blocks, the reads ahead, the new row
        times=(decode.RING - 1, 1, num * blocks, 1, 1 / blocks),
        pattern="(l)?(b)?(L)(b)?(b)",
        large=60,
        small_loop_times=math.ceil(n / key_block.UNROLL),
    )


def extend_case(tokens: int, heads: Heads, page: int, *, both_ways: bool = False) -> Case:
    """Extend of one sequence that has nothing cached; with keys that are seen by earlier tokens,
    as if there were none."""
    tile, block = mixed.query_tile(tokens), max(page, extend.BLOCK_KEYS)
    num_tiles = tokens // tile
    visits = extend.Visits(*[i32(num_tiles + 1)] * 3, i32(3))
    programs = heads.queries // extend.heads_of_program(heads.queries // heads.kv, heads.lanes)
    blocks = [math.ceil((t + 1) * tile / block) for t in range(num_tiles)]
    masked = num_tiles / sum(blocks)
    return Case(
        name=f"extend {tokens}, {heads}, page {page}{', both ways' if both_ways else ''}",
        function=functools.partial(extend.extend_attention, channels=heads.lanes, tile=tile),
        args=(
            bf16(tokens, heads.queries * heads.lanes),
            bf16(tokens // page + 1, heads.kv, page, heads.row),
            i32(2),
            i32(1),
            i32(1, tokens // page),
            visits,
            i32(),
            None,
            i32(tokens) if both_ways else None,
        ),
        hbm_bytes=2 * 2 * tokens * heads.queries * heads.lanes + tokens * heads.row_bytes,
        flops=heads.queries * (heads.key + heads.value) * tokens * (tokens + 1),
        kernel="extend_attention",
        times=(
            programs * num_tiles,
            1,
            1 / (programs * num_tiles),
            1,
            1,
            sum(blocks) / num_tiles,
            1,
            0,
            1 - masked,
            masked / 2,
            masked / 2,
            1,
        ),
        # all visits; first reads, begin; blocks of a visit; the read ahead, what is behind the last
        # key; by what is seen; end
        pattern="(L)(b)?(b)(b)(B)?(L)(b)?(b)?(B)(B)(B)(b)",
        large=80,
        small_loop_times=math.ceil(block / page / key_block.UNROLL),
    )


def kv_case(tokens: int, kv_heads: int, page: int) -> Case:
    """The rows of one run that starts inside a page."""
    rows = min(kv.BLOCK_ROWS, page)
    items = i32(tokens // rows + 2)
    pool = bf16(4096, kv_heads, page, row_lanes(C))
    return Case(
        name=f"kv_update {tokens}, {kv_heads}, page {page}",
        function=kv.kv_update,
        args=(bf16(tokens, kv_heads * row_lanes(C)), pool, kv.Updates(*[items] * 5, i32(1))),
        donate=(1,),
        donated_bytes=math.prod(pool.shape) * 2,
        hbm_bytes=2 * 2 * tokens * kv_heads * row_lanes(C),
        kernel="kv_update",
        times=(tokens // rows + 1,),
        pattern="b*(l)b*",
    )


def scatter_case(tokens: int, width: int, levels: int = 1) -> Case:
    """A step of vision tokens; with levels, deepstack's last one is added."""
    tile = scatter.token_tile(tokens)
    plan = scatter.RowPlan(
        i32(tokens // tile), i32(1), i32(tokens // tile), i32(tokens // 32), i32(tokens // 8),
        i32(tokens),
    )  # fmt: skip
    add = levels > 1
    return Case(
        name=f"{'add' if add else 'put'} {tokens} rows of {width}",
        function=functools.partial(scatter.scatter_rows, level=levels - 1, add=add),
        args=(bf16(tokens, width), bf16(16384, levels, 4, arena.row_lanes(width)), plan),
        donate=(0,),
        donated_bytes=tokens * width * 2,
        hbm_bytes=(3 if add else 2) * tokens * width * 2,
        kernel="scatter_rows",
        # all tiles; those with text among them, and those without
        times=(tokens // tile, 0, 1),
        pattern="(l)(b)?(b)?",
        large=90,
        small_loop_times=tile // scatter.RUN,
        inner_loop_times=0,  # rows that follow each other, as an image's do
    )


def segment_case(patches: int, images: int, heads: int, channels: int) -> Case:
    """A lane of images of equal size."""
    tile, block = segment.segment_sizes(patches)
    size = patches // images
    visits = patches // tile * max(1, size // block)
    steps = i32(patches // tile * (patches // block))
    plan = segment.SegmentPlan(steps, steps, steps, i32(), i32(1, patches), i32(1, patches))
    x = bf16(patches, heads * channels)
    groups = heads // segment.heads_of_group(heads, channels)
    half = float(size < block)  # then a tile has one visit, which does all at once
    share = (1 - half) * patches / tile / visits
    return Case(
        name=f"segments {images} x {size}, {heads} heads of {channels}",
        function=functools.partial(segment.segment_attention, tile=tile, block=block),
        args=(x, bf16(heads, patches, channels), x, plan),
        hbm_bytes=4 * 2 * patches * heads * channels,
        flops=4 * patches * size * heads * channels,
        kernel="segment_attention",
        times=(groups * visits, share, 1 - half, 0, 0, half, share),
        large=150,
    )


def window_case(patches: int, heads: int, channels: int) -> Case:
    """A lane of full windows of 64."""
    x = bf16(patches, heads * channels)
    tile = math.gcd(patches, windows.TILE)
    groups = heads // windows.group_of(heads, channels)
    return Case(
        name=f"windows {patches}, {heads} heads of {channels}",
        function=functools.partial(windows.window_attention, channels=channels),
        args=(x, x, x, i32(patches)),
        hbm_bytes=4 * 2 * patches * heads * channels,
        flops=4 * patches * windows.WINDOW * heads * channels,
        kernel="window_attention",
        times=(groups * patches / tile, tile / windows.SQUARE / 2),
    )


def grouped_case(tokens: int, heads: int, kv_heads: int) -> Case:
    """Positions into a decoder's fused projection."""
    lanes = (heads + 2 * kv_heads) * C
    return Case(
        name=f"rotate {tokens}, {heads}/{kv_heads}",
        function=functools.partial(rotate_grouped, num_kv_heads=kv_heads, scale=0.1),
        args=(bf16(tokens, lanes), f32(tokens, C), f32(tokens, C)),
        hbm_bytes=2 * 2 * tokens * lanes + 2 * 4 * tokens * C,
        kernel="rotate_grouped",
        times=(tokens // math.gcd(tokens, grouped.TILE) * kv_heads,),
        pattern="(l)b?",
    )


def packed_case(patches: int, heads: int, channels: int, *, keys_by_head: bool) -> Case:
    """Positions into an encoder's fused projection."""
    lanes = heads * channels
    groups = lanes // math.lcm(channels, 128)
    tile = math.gcd(patches, packed.TILE)
    return Case(
        name=f"rotate {patches}, {heads} heads of {channels}{', by head' if keys_by_head else ''}",
        function=functools.partial(rotate_packed, scale=0.1, keys_by_head=keys_by_head),
        args=(bf16(patches, 3 * lanes), f32(patches, channels), f32(patches, channels)),
        hbm_bytes=2 * 2 * 2 * patches * lanes + 2 * 4 * patches * channels,
        kernel="rotate_packed",
        times=(patches // tile * groups, tile // packed.ROWS / 2),
    )


QWEN_7B, GEMMA_4B = Heads(28, 4), Heads(8, 4, 256, 256)
MIXED_PARTS = (
    decode_case(64, QWEN_7B, 128),
    kv_case(2048, 4, 128),
    extend_case(2048, QWEN_7B, 128),
)
"""What a mixed step is made of; the plan of a step is made once for all layers."""


def mixed_step(
    q_TX: Any, new_TY: Any, pages_PKSJ: Any, start: Any, length: Any, table: Any, *plan: Any
) -> tuple[Any, Any]:
    """64 decodes and an extend of 1984 tokens, as one layer calls for them."""
    num_decode, visits, updates = plan
    return mixed.ragged_paged_attention(
        q_TX,
        new_TY,
        pages_PKSJ,
        start,
        length,
        table,
        num_decode,
        mixed.ExtendPlan(visits, updates),
        channels=C,
        max_decode=64,
    )


def mixed_args(tokens: int = 2048, heads: int = 28, kv_heads: int = 4) -> tuple[Any, ...]:
    """Arguments of `mixed_step`: sequences of up to 4096 keys in pages of 128."""
    q_TX, new_TY, pages, start, length, table, count, _ = step_args(
        tokens, heads, kv_heads, num=96, page=128
    )
    plan = jax.eval_shape(
        functools.partial(mixed.plan_extends, num_tokens=tokens, page_size=128),
        *(start, length, table, count, count),
    )
    return q_TX, new_TY, pages, start, length, table, count, *plan


def cases() -> list[Case]:
    """What `make kernels` prints and the AOT tests compile."""
    qwen = [QWEN_7B, Heads(16, 2), Heads(12, 2), Heads(16, 8), Heads(64, 8)]
    text = [*qwen, GEMMA_4B, LATENT]
    return [
        *(decode_case(64, heads, 128) for heads in text),
        *(decode_case(64, QWEN_7B, page) for page in (16, 32, 256)),
        *(decode_case(64, heads, page) for heads in qwen[1:3] for page in (16, 32, 256)),
        decode_case(64, Heads(7, 1), 128),
        *(decode_case(256, heads, 128) for heads in qwen[:3]),
        *(extend_case(2048, heads, 128) for heads in text),
        extend_case(2048, QWEN_7B, 16),
        extend_case(2048, GEMMA_4B, 128, both_ways=True),
        kv_case(2048, 4, 128),
        scatter_case(2048, 3584),
        scatter_case(2048, 1536),
        scatter_case(2048, 3584, levels=4),
        segment_case(4096, 1, 16, 80),
        segment_case(4096, 16, 16, 80),
        segment_case(4096, 1, 16, 64),
        window_case(4096, 16, 80),
        grouped_case(2048, 28, 4),
        packed_case(4096, 16, 80, keys_by_head=False),
        packed_case(4096, 16, 80, keys_by_head=True),
    ]


def step_args(
    tokens: int, heads: int, kv_heads: int, *, num: int, page: int, channels: int = C
) -> tuple[Any, ...]:
    """Arguments of a whole mixed step, as `mixed.ragged_paged_attention` takes them."""
    return (
        bf16(tokens, heads * query_lanes(channels)),
        bf16(tokens, kv_heads * row_lanes(channels)),
        bf16(num * 4096 // page // 4, kv_heads, page, row_lanes(channels)),
        i32(num + 1),
        i32(num),
        i32(num, 4096 // page),
        i32(),
        i32(),
    )
