"""The inner loop of the kernels, in vectors of sixteen float32. Host only."""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels_pallas.native import VECTOR
from kernels_pallas.native.ffi import INT32, INT64

_FLOAT, _INT16 = ir.FloatType(), ir.IntType(16)
_VECTOR, _WIDE = ir.VectorType(_FLOAT, VECTOR), ir.VectorType(INT32, VECTOR)


def _dot(num_rows: int, *, widen: bool) -> Any:
    """An intrinsic: dot products of some rows with one column, the sums in registers.

    One column at a time is a plain stream, which is what memory is quickest at. Arguments are as in
    `dot_rows`.
    """
    item = _INT16 if widen else _FLOAT

    def code(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        rows, out = (b.inttoptr(address, _FLOAT.as_pointer()) for address in (args[0], args[2]))
        column, depth, stride = b.inttoptr(args[1], item.as_pointer()), args[3], args[4]

        def intrinsic_of(name: str, returned: ir.Type, *taken: ir.Type) -> Any:
            return cgutils.get_or_insert_function(
                b.module, ir.FunctionType(returned, taken), f"llvm.{name}"
            )

        fma = intrinsic_of(f"fma.v{VECTOR}f32", _VECTOR, *[_VECTOR] * 3)
        sum_lanes = intrinsic_of(f"vector.reduce.fadd.v{VECTOR}f32", _FLOAT, _FLOAT, _VECTOR)
        before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(INT64)
        k.add_incoming(ir.Constant(INT64, 0), before)
        sums = [b.phi(_VECTOR) for _ in range(num_rows)]
        where = b.gep(column, [k])
        y = b.load(b.bitcast(where, ir.VectorType(item, VECTOR).as_pointer()), align=2)
        if widen:  # a bfloat16 is the high half of a float32
            y = b.bitcast(b.shl(b.zext(y, _WIDE), ir.Constant(_WIDE, [16] * VECTOR)), _VECTOR)
        ahead = b.bitcast(b.gep(where, [depth]), ir.IntType(8).as_pointer())
        prefetch = intrinsic_of("prefetch.p0", ir.VoidType(), ahead.type, *[INT32] * 3)
        b.call(prefetch, [ahead, *(ir.Constant(INT32, n) for n in (0, 3, 1))])
        new = []
        for i, total in enumerate(sums):
            row = b.gep(rows, [b.add(k, b.mul(ir.Constant(INT64, i), depth))])
            x = b.load(b.bitcast(row, _VECTOR.as_pointer()), align=4)
            new.append(b.call(fma, [x, y, total]))
        next_k = b.add(k, ir.Constant(INT64, VECTOR))
        k.add_incoming(next_k, loop)
        for total, value in zip(sums, new, strict=True):
            total.add_incoming(ir.Constant(_VECTOR, [0.0] * VECTOR), before)
            total.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", next_k, depth), loop, after)
        b.position_at_end(after)
        for i, value in enumerate(new):
            total = b.call(sum_lanes, [ir.Constant(_FLOAT, 0.0), value], fastmath=("reassoc",))
            b.store(total, b.gep(out, [b.mul(ir.Constant(INT64, i), stride)]))
        return context.get_dummy_value()

    @intrinsic
    def dot(_: Any, rows: Any, column: Any, out: Any, depth: Any, stride: Any) -> Any:
        return types.void(*[types.intp] * 5), code

    return dot


def dot_rows(*, widen: bool) -> Any:
    """A function: dot products of rows with one column.

    It takes addresses of float32[num_rows, depth], of the column [depth], and of the first result,
    a float32; then depth, a multiple of `VECTOR`; how many float32 lie between two results; and
    num_rows.

    Args:
        widen: The column is bfloat16, else float32.
    """
    eight, four, two, one = (_dot(n, widen=widen) for n in (8, 4, 2, 1))

    @njit
    def run(rows: int, column: int, out: int, depth: int, stride: int, num_rows: int) -> None:
        left, row_bytes = num_rows, 4 * depth
        while left >= 8:
            eight(rows, column, out, depth, stride)
            left, rows, out = left - 8, rows + 8 * row_bytes, out + 32 * stride
        if left >= 4:
            four(rows, column, out, depth, stride)
            left, rows, out = left - 4, rows + 4 * row_bytes, out + 16 * stride
        if left >= 2:
            two(rows, column, out, depth, stride)
            left, rows, out = left - 2, rows + 2 * row_bytes, out + 8 * stride
        if left == 1:
            one(rows, column, out, depth, stride)

    return run
