"""Lets XLA's CPU backend call kernels that numba compiles, over its own threads. Host only.

XLA calls a handler with one struct (`xla/ffi/api/c_api.h`, which jaxlib ships); what is read of it
here are addresses. A kernel is two functions of that struct's address: how many pieces of work
there are, and one that does a piece. Pieces are taken from a counter, by the thread that XLA calls
and by those of its pool that come to help; none is waited for that has not begun, so two kernels
that run at once cannot wait for each other.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from kernels_pallas.native import INTERFACE_VERSION

INT32, INT64 = ir.IntType(32), ir.IntType(64)

# Offsets of the structs of c_api.h.
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT, _FRAME_ARGS, _FRAME_RESULTS = 8, 16, 24, 72, 112
_BUFFER_DATA, _BUFFER_DIMS = 24, 40
_METADATA, _METADATA_MAJOR, _METADATA_MINOR, _IS_METADATA = 24, 24, 28, 1
_API_SCHEDULE, _API_NUM_THREADS = 136, 144

# A slot is what the threads share of one call. Words of 8 bytes.
_NUM_SLOTS, _SLOT_WORDS = 64, 16
_TURN = 0  # the slot's use << 16, and how many helpers are at work on it
_TAKEN, _NEXT, _TOTAL, _FRAME, _CALL = 8, 16, 24, 32, 64

_kept: list[Any] = []
"""Machine code and slots that XLA has the addresses of."""


def _unary(build: Callable[[ir.IRBuilder, Any], Any]) -> Any:
    """An intrinsic of one address to a number."""

    @intrinsic
    def function(_: Any, __: Any) -> Any:
        def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
            return build(builder, args[0])

        return types.intp(types.intp), code

    return function


def _word_at(builder: ir.IRBuilder, address: Any) -> Any:
    return builder.inttoptr(address, INT64.as_pointer())


load = _unary(lambda b, a: b.load_atomic(_word_at(b, a), "seq_cst", 8))
load_int32 = _unary(lambda b, a: b.sext(b.load(b.inttoptr(a, INT32.as_pointer())), INT64))


@intrinsic
def store(_: Any, __: Any, ___: Any) -> Any:
    """Write a word."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word_at(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), code


@intrinsic
def store_int32(_: Any, __: Any, ___: Any) -> Any:
    """Write half a word."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], INT32.as_pointer())
        builder.store(builder.trunc(args[1], INT32), where)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), code


@intrinsic
def fetch_add(_: Any, __: Any, ___: Any) -> Any:
    """Add to a word at once; gives what it was."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word_at(builder, args[0]), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), code


@intrinsic
def exchange_if(_: Any, __: Any, ___: Any, ____: Any) -> Any:
    """Replace a word if it is what is expected; gives whether it was."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        where = _word_at(builder, args[0])
        pair = builder.cmpxchg(where, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.intp, types.intp, types.intp), code


@intrinsic
def call(_: Any, __: Any, ___: Any) -> Any:
    """Call a C function of one address, by its own."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        signature = ir.FunctionType(INT64, [INT64])
        return builder.call(builder.inttoptr(args[0], signature.as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), code


@njit
def argument(frame: int, index: int) -> int:
    """Address of an argument's buffer struct."""
    return load(load(frame + _FRAME_ARGS) + 8 * index)


@njit
def result(frame: int, index: int) -> int:
    """Address of a result's buffer struct."""
    return load(load(frame + _FRAME_RESULTS) + 8 * index)


@njit
def data(buffer: int) -> int:
    """Address of a buffer's first element."""
    return load(buffer + _BUFFER_DATA)


@njit
def dim(buffer: int, axis: int) -> int:
    """Length of a buffer's axis."""
    return load(load(buffer + _BUFFER_DIMS) + 8 * axis)


def register(name: str, count_pieces: Any, do_piece: Any) -> None:
    """Compile a kernel, and make it known to XLA under a name; for `jax.ffi.ffi_call`.

    Args:
        count_pieces: `njit` function of the frame's address.
        do_piece: `njit` function of the frame's address and a piece's number. Pieces run in any
            order and at once.
    """
    slots = np.zeros((_NUM_SLOTS, _SLOT_WORDS), np.int64)
    first_slot, slot_bytes = slots.ctypes.data, slots.strides[0]

    @cfunc(types.intp(types.intp))
    def take_pieces(slot: int) -> int:
        frame, total = load(slot + _FRAME), load(slot + _TOTAL)
        piece = fetch_add(slot + _NEXT, 1)
        while piece < total:
            do_piece(frame, piece)
            piece = fetch_add(slot + _NEXT, 1)
        return 0

    work = take_pieces.address  # not inlined: it is compiled once

    @cfunc(types.void(types.intp))
    def help_with(ticket: int) -> None:
        slot, turn = first_slot + (ticket % _NUM_SLOTS) * slot_bytes, ticket // _NUM_SLOTS
        state = load(slot + _TURN)
        while not (state >> 16 == turn and exchange_if(slot + _TURN, state, state + 1)):
            if state >> 16 != turn:
                return  # it was done without this thread
            state = load(slot + _TURN)
        call(work, slot)
        fetch_add(slot + _TURN, -1)

    helper = help_with.address

    @njit
    def ask_for_help(frame: int, slot: int, ticket: int, total: int) -> None:
        api, args = load(frame + _FRAME_API), slot + _CALL
        store(args, 24 + 8)
        store(args + 8, 0)
        store(args + 16, load(frame + _FRAME_CONTEXT))
        store(args + 24, slot + _CALL + 48)
        if call(load(api + _API_NUM_THREADS), args) != 0:
            return
        num_threads = load(slot + _CALL + 48)
        store(args, 24 + 16)
        store(args + 24, helper)
        store(args + 32, ticket)
        for _ in range(min(num_threads, total) - 1):
            if call(load(api + _API_SCHEDULE), args) != 0:
                return

    @njit
    def run(frame: int) -> None:
        total, index = count_pieces(frame), 0
        while not exchange_if(first_slot + index * slot_bytes + _TAKEN, 0, 1):
            index = (index + 1) % _NUM_SLOTS
        slot = first_slot + index * slot_bytes
        turn = load(slot + _TURN) >> 16
        store(slot + _FRAME, frame)
        store(slot + _TOTAL, total)
        store(slot + _NEXT, 0)
        ask_for_help(frame, slot, turn * _NUM_SLOTS + index, total)
        call(work, slot)
        while not exchange_if(slot + _TURN, turn << 16, (turn + 1) << 16):
            pass  # a helper is at its last piece
        store(slot + _TAKEN, 0)

    @cfunc(types.intp(types.intp))
    def handler(frame: int) -> int:
        extension = load(frame + _FRAME_EXTENSION)
        if extension != 0 and load_int32(extension + 8) == _IS_METADATA:
            metadata = load(extension + _METADATA)
            store_int32(metadata + _METADATA_MAJOR, INTERFACE_VERSION[0])
            store_int32(metadata + _METADATA_MINOR, INTERFACE_VERSION[1])
            return 0
        run(frame)
        return 0

    _kept.extend((slots, take_pieces, help_with, handler))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new_capsule(handler.address, None, None), platform="cpu")
