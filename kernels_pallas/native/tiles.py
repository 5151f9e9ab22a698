"""What the kernels do with a tile of numbers, in vectors of sixteen float32. Host only.

Each function here makes an intrinsic of numba from LLVM's own operations: the compiler is told
which sums stay in registers. Arguments are addresses, and strides counted in elements.
"""

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels_pallas.native import VECTOR
from kernels_pallas.native.ffi import INT32, INT64

IS_WIDE = "+avx512f" in (
    numba.config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
)
"""Whether a register holds a whole `VECTOR`, and there are 32 of them; else 16 of half of one."""

_FLOAT, _INT16 = ir.FloatType(), ir.IntType(16)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, VECTOR), ir.VectorType(INT32, VECTOR)
_EXP2 = np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[-0.5, 0.5])
_EXP2_TERMS = _EXP2.convert(kind=np.polynomial.Polynomial).coef
"""Of 2^x on [-1/2, 1/2], the constant first: to 1e-8 of the value, so float32 rounds more."""
_LOWEST = -126.0
"""Of exponents of two: below, a float32 is no normal number."""


def multiply_tile(num_rows: int, num_vectors: int) -> Any:
    """init + a @ b, for `num_rows` rows of `VECTOR * num_vectors` columns; the sums in registers.

    The intrinsic takes: a, its strides of rows and of depth; b, whose rows have no gaps within, and
    its stride of depth; init and its stride of rows (0: one row for all); out and its stride of
    rows; the depth, at least 1.
    """

    def code(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        a, a_row, a_depth, other, other_depth, init, init_row, out, out_row, depth = args
        a, other, init, out = (
            b.inttoptr(address, _FLOAT.as_pointer()) for address in (a, other, init, out)
        )
        fma = function(b, f"fma.v{VECTOR}f32", _FLOATS, [_FLOATS] * 3)
        rows = [b.gep(a, [b.mul(word(i), a_row)]) for i in range(num_rows)]
        before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
        first = [
            _load(b, init, b.add(b.mul(word(i), init_row), word(VECTOR * v)))
            for i in range(num_rows)
            for v in range(num_vectors)
        ]
        b.branch(loop)
        b.position_at_end(loop)
        k, of_a, of_other = (b.phi(INT64) for _ in range(3))
        sums = [b.phi(_FLOATS) for _ in first]
        columns = [_load(b, other, b.add(of_other, word(VECTOR * v))) for v in range(num_vectors)]
        new = []
        for i, row in enumerate(rows):
            x = _splat(b, b.load(b.gep(row, [of_a]), align=4))
            for v, y in enumerate(columns):
                new.append(b.call(fma, [x, y, sums[i * num_vectors + v]]))
        next_k = b.add(k, word(1))
        for phi, step in ((k, next_k), (of_a, b.add(of_a, a_depth))):
            phi.add_incoming(word(0), before)
            phi.add_incoming(step, loop)
        of_other.add_incoming(word(0), before)
        of_other.add_incoming(b.add(of_other, other_depth), loop)
        for total, start, value in zip(sums, first, new, strict=True):
            total.add_incoming(start, before)
            total.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", next_k, depth), loop, after)
        b.position_at_end(after)
        for place, value in enumerate(new):
            i, v = divmod(place, num_vectors)
            _store(b, value, out, b.add(b.mul(word(i), out_row), word(VECTOR * v)))
        return context.get_dummy_value()

    signature = types.void(*[types.intp] * 10)

    @intrinsic
    def multiply(
        _: Any, a: Any, a_row: Any, a_depth: Any, other: Any, other_depth: Any,
        init: Any, init_row: Any, out: Any, out_row: Any, depth: Any,
    ) -> Any:  # fmt: skip
        return signature, code

    return multiply


def transpose_tile(*, widen: bool) -> Any:
    """Turn `VECTOR` rows of as many numbers into columns.

    The intrinsic takes: the tile and its stride of rows; float32 out and its stride of rows.

    Args:
        widen: The tile is bfloat16, else float32.
    """
    item = _INT16 if widen else _FLOAT

    def code(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        tile, out = b.inttoptr(args[0], item.as_pointer()), b.inttoptr(args[2], _FLOAT.as_pointer())
        rows = []
        for i in range(VECTOR):
            where = b.gep(tile, [b.mul(word(i), args[1])])
            row = b.load(b.bitcast(where, ir.VectorType(item, VECTOR).as_pointer()), align=2)
            rows.append(widened(b, row) if widen else row)
        for bit in (1, 2, 4, 8):  # swap that bit of a number's row with that of its column
            low = [n if not n & bit else VECTOR + (n ^ bit) for n in range(VECTOR)]
            high = [n | bit if not n & bit else VECTOR + n for n in range(VECTOR)]
            for i in (i for i in range(VECTOR) if not i & bit):
                pair = rows[i], rows[i | bit]
                rows[i], rows[i | bit] = (
                    b.shuffle_vector(*pair, ir.Constant(_WORDS, lanes)) for lanes in (low, high)
                )
        for i, row in enumerate(rows):
            _store(b, row, out, b.mul(word(i), args[3]))
        return context.get_dummy_value()

    @intrinsic
    def transpose(_: Any, tile: Any, row: Any, out: Any, out_row: Any) -> Any:
        return types.void(*[types.intp] * 4), code

    return transpose


def weigh_tile(num_vectors: int) -> Any:
    """Scores to weights, 2^(score - top) by column, in place; adds them up by column.

    The intrinsic takes: scores [num_rows, columns] without gaps; top [columns], none below the
    scores; the sums [columns], to be added to; num_rows, at least 1.
    """

    def code(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        scores, top, total = (b.inttoptr(address, _FLOAT.as_pointer()) for address in args[:3])
        places = [word(VECTOR * v) for v in range(num_vectors)]
        tops = [_load(b, top, place) for place in places]
        starts = [_load(b, total, place) for place in places]
        before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(loop)
        b.position_at_end(loop)
        row = b.phi(INT64)
        row.add_incoming(word(0), before)
        sums = [b.phi(_FLOATS) for _ in places]
        new = []
        for v, place in enumerate(places):
            where = b.add(b.mul(row, word(VECTOR * num_vectors)), place)
            weight = _exp2(b, b.fsub(_load(b, scores, where), tops[v]))
            _store(b, weight, scores, where)
            new.append(b.fadd(sums[v], weight))
        next_row = b.add(row, word(1))
        row.add_incoming(next_row, loop)
        for phi, start, value in zip(sums, starts, new, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", next_row, args[3]), loop, after)
        b.position_at_end(after)
        for place, value in zip(places, new, strict=True):
            _store(b, value, total, place)
        return context.get_dummy_value()

    @intrinsic
    def weigh(_: Any, scores: Any, top: Any, sums: Any, num_rows: Any) -> Any:
        return types.void(*[types.intp] * 4), code

    return weigh


@intrinsic
def gate_tile(_: Any, gates: Any, ups: Any, count: Any) -> Any:
    """silu(gate) * up over the gates, so many numbers, a multiple of `VECTOR`."""
    return types.void(*[types.intp] * 3), _gate


def _gate(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
    gates, ups = (b.inttoptr(address, _FLOAT.as_pointer()) for address in args[:2])
    before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(INT64)
    i.add_incoming(word(0), before)
    gate = _load(b, gates, i)
    one = ir.Constant(_FLOATS, [1.0] * VECTOR)
    exponent = b.fmul(gate, ir.Constant(_FLOATS, [-float(np.log2(np.e))] * VECTOR))
    silu = b.fdiv(gate, b.fadd(one, _exp2(b, exponent)))
    _store(b, b.fmul(silu, _load(b, ups, i)), gates, i)
    next_i = b.add(i, word(VECTOR))
    i.add_incoming(next_i, loop)
    b.cbranch(b.icmp_signed("<", next_i, args[2]), loop, after)
    b.position_at_end(after)
    return context.get_dummy_value()


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """2^x; of what is below `_LOWEST` or above its opposite, that of these; NaN of NaN."""
    fma = function(b, f"fma.v{VECTOR}f32", _FLOATS, [_FLOATS] * 3)
    nearest = function(b, f"rint.v{VECTOR}f32", _FLOATS, [_FLOATS])
    for limit, sign in ((_LOWEST, ">"), (-_LOWEST, "<")):  # one instruction each, and NaN stays
        bound = ir.Constant(_FLOATS, [limit] * VECTOR)
        x = b.select(b.fcmp_ordered(sign, bound, x), bound, x)
    whole = b.call(nearest, [x])
    rest = b.fsub(x, whole)
    *lower, value = (ir.Constant(_FLOATS, [float(np.float32(c))] * VECTOR) for c in _EXP2_TERMS)
    for term in reversed(lower):
        value = b.call(fma, [value, rest, term])
    biased = b.add(b.fptosi(whole, _WORDS), ir.Constant(_WORDS, [127] * VECTOR))
    power = b.bitcast(b.shl(biased, ir.Constant(_WORDS, [23] * VECTOR)), _FLOATS)
    return b.fmul(value, power)


def function(b: ir.IRBuilder, name: str, returned: ir.Type, taken: Sequence[ir.Type]) -> Any:
    """One of LLVM's own."""
    return cgutils.get_or_insert_function(
        b.module, ir.FunctionType(returned, taken), f"llvm.{name}"
    )


def word(number: int) -> Any:
    """A number as LLVM takes it."""
    return ir.Constant(INT64, number)


def _load(b: ir.IRBuilder, array: Any, place: Any) -> Any:
    return b.load(b.bitcast(b.gep(array, [place]), _FLOATS.as_pointer()), align=4)


def _store(b: ir.IRBuilder, value: Any, array: Any, place: Any) -> None:
    b.store(value, b.bitcast(b.gep(array, [place]), _FLOATS.as_pointer()), align=4)


def _splat(b: ir.IRBuilder, number: Any) -> Any:
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    first = b.insert_element(nothing, number, ir.Constant(INT32, 0))
    return b.shuffle_vector(first, nothing, ir.Constant(_WORDS, [0] * VECTOR))


def widened(b: ir.IRBuilder, halves: Any) -> Any:
    """Bits of bfloat16 as float32, whose high halves they are."""
    wide = b.shl(b.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * VECTOR))
    return b.bitcast(wide, _FLOATS)
