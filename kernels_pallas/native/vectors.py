"""The inner loop of the kernels, in vectors of sixteen float32. Host only."""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels_pallas.native import VECTOR
from kernels_pallas.native.ffi import INT32, INT64
from kernels_pallas.native.tiles import IS_WIDE, function, widened, word

_FLOAT, _INT16 = ir.FloatType(), ir.IntType(16)
_VECTOR = ir.VectorType(_FLOAT, VECTOR)

_AHEAD = 8
"""Columns from the one that is read to the one that is asked for meanwhile."""


def _dot(num_rows: int, num_columns: int, *, widen: bool) -> Any:
    """An intrinsic: dot products of some rows with some columns, the sums in registers.

    One column is a plain stream, which is what memory is quickest at; four rows and more are bound
    by arithmetic, and two columns share what is loaded of them. Arguments are as in `dot_rows`.
    """
    item = _INT16 if widen else _FLOAT

    def code(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        rows, out = (b.inttoptr(address, _FLOAT.as_pointer()) for address in (args[0], args[2]))
        first, depth, stride = b.inttoptr(args[1], item.as_pointer()), args[3], args[4]
        fma = function(b, f"fma.v{VECTOR}f32", _VECTOR, [_VECTOR] * 3)
        byte = ir.IntType(8).as_pointer()
        prefetch = function(b, "prefetch.p0", ir.VoidType(), [byte, *[INT32] * 3])
        columns = [b.gep(first, [b.mul(word(i), depth)]) for i in range(num_columns)]
        before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(INT64)
        k.add_incoming(word(0), before)
        sums = [b.phi(_VECTOR) for _ in range(num_rows * num_columns)]
        weights = []
        for column in columns:
            where = b.gep(column, [k])
            y = b.load(b.bitcast(where, ir.VectorType(item, VECTOR).as_pointer()), align=2)
            weights.append(widened(b, y) if widen else y)
            ahead = b.bitcast(b.gep(where, [b.mul(word(_AHEAD), depth)]), byte)
            b.call(prefetch, [ahead, *(ir.Constant(INT32, n) for n in (0, 2, 1))])
        new = []
        for i in range(num_rows):
            row = b.gep(rows, [b.add(k, b.mul(word(i), depth))])
            x = b.load(b.bitcast(row, _VECTOR.as_pointer()), align=4)
            new += [b.call(fma, [x, y, sums[i * num_columns + j]]) for j, y in enumerate(weights)]
        next_k = b.add(k, word(VECTOR))
        k.add_incoming(next_k, loop)
        for total, value in zip(sums, new, strict=True):
            total.add_incoming(ir.Constant(_VECTOR, [0.0] * VECTOR), before)
            total.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", next_k, depth), loop, after)
        b.position_at_end(after)
        totals = _lane_sums(b, new)
        for place in range(len(new)):
            i, j = divmod(place, num_columns)
            lane = ir.Constant(INT32, place * (VECTOR // len(new)))
            target = b.gep(out, [b.add(b.mul(word(i), stride), word(j))])
            b.store(b.extract_element(totals, lane), target)
        return context.get_dummy_value()

    @intrinsic
    def dot(_: Any, rows: Any, column: Any, out: Any, depth: Any, stride: Any) -> Any:
        return types.void(*[types.intp] * 5), code

    return dot


def _lane_sums(b: ir.IRBuilder, vectors: list[Any]) -> Any:
    """The sum of each vector's lanes, all in one: that of vector i from lane i * 16 / n on.

    A power of two of them, at most 16. A step adds halves of two vectors at once, until one is
    left, and then halves of that one.
    """
    half = VECTOR // 2
    while half:
        low = [n for n in range(VECTOR) if not n & half]
        count = len(vectors)
        if count > 1:
            vectors = [
                _halves_added(b, vectors[i], vectors[i + count // 2], low, half)
                for i in range(count // 2)
            ]
        else:
            vectors = [_halves_added(b, vectors[0], vectors[0], low, half)]
        half //= 2
    return vectors[0]


def _halves_added(b: ir.IRBuilder, x: Any, y: Any, low: list[int], half: int) -> Any:
    """In lanes without the bit `half` the sums of x's pairs of lanes, in the others y's."""
    lows, highs = [0] * VECTOR, [0] * VECTOR
    for n in low:
        lows[n], highs[n] = n, n + half
        lows[n + half], highs[n + half] = VECTOR + n, VECTOR + n + half
    lanes = (ir.Constant(ir.VectorType(INT32, VECTOR), picked) for picked in (lows, highs))
    return b.fadd(*(b.shuffle_vector(x, y, picked) for picked in lanes))


def dot_rows(*, widen: bool) -> Any:
    """A function: dot products of rows with one column.

    It takes addresses of float32[num_rows, depth], of the column [depth], and of the first result,
    a float32; then depth, a multiple of `VECTOR`; how many float32 lie between two results; and
    num_rows.

    Args:
        widen: The column is bfloat16, else float32.
    """
    eight, four, two, one = (_dot(n, 1, widen=widen) for n in (8, 4, 2, 1))

    @njit
    def run(rows: int, column: int, out: int, depth: int, stride: int, num_rows: int) -> None:
        left, row_bytes = num_rows, 4 * depth
        while IS_WIDE and left >= 8:
            eight(rows, column, out, depth, stride)
            left, rows, out = left - 8, rows + 8 * row_bytes, out + 32 * stride
        while left >= 4:
            four(rows, column, out, depth, stride)
            left, rows, out = left - 4, rows + 4 * row_bytes, out + 16 * stride
        if left >= 2:
            two(rows, column, out, depth, stride)
            left, rows, out = left - 2, rows + 2 * row_bytes, out + 8 * stride
        if left == 1:
            one(rows, column, out, depth, stride)

    return run


def dot_pairs(*, widen: bool) -> Any:
    """The same for two columns that lie one behind the other, at once where registers allow."""
    eight, four = (_dot(n, 2, widen=widen) for n in (8, 4))
    rest = dot_rows(widen=widen)
    item_bytes = 2 if widen else 4

    @njit
    def run(rows: int, columns: int, out: int, depth: int, stride: int, num_rows: int) -> None:
        left, row_bytes = num_rows, 4 * depth
        while IS_WIDE and left >= 8:
            eight(rows, columns, out, depth, stride)
            left, rows, out = left - 8, rows + 8 * row_bytes, out + 32 * stride
        while IS_WIDE and left >= 4:
            four(rows, columns, out, depth, stride)
            left, rows, out = left - 4, rows + 4 * row_bytes, out + 16 * stride
        if left > 0:
            rest(rows, columns, out, depth, stride, left)
            rest(rows, columns + item_bytes * depth, out + 4, depth, stride, left)

    return run
