"""Lets XLA's CPU backend call kernels that numba compiles, over its own threads. Host only.

XLA calls a handler with one struct (`xla/ffi/api/c_api.h`, which jaxlib ships); what is read of it
here are addresses. A kernel is two functions of that struct's address: how many pieces of work
there are, and one that does a piece. Pieces are taken from a counter, by the thread that XLA calls
and by those of its pool that come to help; none is waited for that has not begun, so two kernels
that run at once cannot wait for each other.

Machine code holds no address of this process, so it can be kept in files: what threads share lies
behind a name, and which kernel is meant is the first operand.
"""

import ctypes
import hashlib
import logging
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels_pallas.native import INTERFACE_VERSION

INT16, INT32, INT64 = (ir.IntType(bits) for bits in (16, 32, 64))

# Offsets of the structs of c_api.h.
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT, _FRAME_ARGS, _FRAME_RESULTS = 8, 16, 24, 72, 112
_BUFFER_DATA, _BUFFER_DIMS = 24, 40
_METADATA, _METADATA_MAJOR, _METADATA_MINOR, _IS_METADATA = 24, 24, 28, 1
_API_ERROR_CREATE, _API_ERROR_DESTROY, _API_SCHEDULE, _API_NUM_THREADS = 48, 64, 136, 144
_RESOURCE_EXHAUSTED = 8

# What the threads share, in words of 8 bytes: addresses of functions and of a text; then slots, one
# a call.
_TARGET, _SHARED = "jaxmm_native", "jaxmm_native_shared"
_MAX_KERNELS, _NUM_SLOTS, _SLOT_WORDS = 8, 64, 16
_WORK, _HELPER, _FAILURE, _KERNELS, _SLOTS = 0, 8, 16, 24, 24 + 16 * _MAX_KERNELS
_TURN = 0  # the slot's use << 16, and how many helpers are at work on it
_TAKEN, _NEXT, _TOTAL, _FRAME, _PIECE, _FAILED, _CALL = 8, 16, 24, 32, 40, 48, 64

Kernel = tuple[Callable[[int], int], Callable[[int, int], int]]
"""A function of the frame's address that counts pieces; and one of that address and a piece's
number that does the piece and gives `DONE`. Pieces run in any order and at once. Both are plain
functions of a module."""

DONE = 1
"""What a piece gives; one that found no memory gives 0, whatever it says."""
_NO_MEMORY = ctypes.create_string_buffer(b"a kernel of jaxmm found no memory to work in")

_CACHE_ERRORS = OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError
"""What numba raises of a directory that is full, or holds something else."""

logger = logging.getLogger(__name__)

_kept: list[Any] = []
"""Machine code and memory that XLA has the addresses of."""


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
load_uint16 = _unary(lambda b, a: b.zext(b.load(b.inttoptr(a, INT16.as_pointer())), INT64))
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
def prefetch(_: Any, __: Any) -> Any:
    """Ask for the line at an address to be in the second-level cache; any address will do."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [where.type, *[INT32] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [where, *(ir.Constant(INT32, n) for n in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(types.intp), code


@intrinsic
def call(_: Any, __: Any, ___: Any) -> Any:
    """Call a C function of one address, by its own."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        signature = ir.FunctionType(INT64, [INT64])
        return builder.call(builder.inttoptr(args[0], signature.as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), code


@intrinsic
def _call_with_two(_: Any, __: Any, ___: Any, ____: Any) -> Any:
    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        signature = ir.FunctionType(INT64, [INT64, INT64])
        return builder.call(builder.inttoptr(args[0], signature.as_pointer()), args[1:])

    return types.intp(types.intp, types.intp, types.intp), code


@intrinsic
def _shared(_: Any) -> Any:
    """Address of what the threads share."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, ___: Any) -> Any:
        module = builder.module
        known = module.globals.get(_SHARED)
        return builder.ptrtoint(known or ir.GlobalVariable(module, INT64, _SHARED), INT64)

    return types.intp(), code


def _pointer_to(item: Any, kind: ir.Type) -> Any:
    """An intrinsic of an address to a pointer."""

    @intrinsic
    def function(_: Any, __: Any) -> Any:
        def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], kind.as_pointer())

        return types.CPointer(item)(types.intp), code

    return function


_float_pointer = _pointer_to(types.float32, ir.FloatType())
_int32_pointer = _pointer_to(types.int32, INT32)


@njit
def floats(address: int, shape: Any) -> Any:
    """A numpy array of float32 at an address."""
    return carray(_float_pointer(address), shape)


@njit
def int32s(address: int, length: int) -> Any:
    """A numpy array of int32 at an address."""
    return carray(_int32_pointer(address), length)


@njit
def argument(frame: int, index: int) -> int:
    """Address of an operand's buffer struct."""
    return load(load(frame + _FRAME_ARGS) + 8 * (index + 1))  # the first names the kernel


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


@njit
def number(frame: int, index: int) -> int:
    """An operand that is one int32."""
    return load_int32(data(argument(frame, index)))


def run_kernel(
    kernel: int, shape: tuple[int, ...], *operands: Any, filled: jax.Array | None = None
) -> jax.Array:
    """A kernel's result, float32 of a shape (traced).

    Args:
        kernel: Its number, one of those that were registered.
        operands: What it reads.
        filled: What the result is before it runs; None: anything.
    """
    aliases = {}
    if filled is not None:
        aliases, operands = {len(operands) + 1: 0}, (*operands, filled)
    run = jax.ffi.ffi_call(
        _TARGET, jax.ShapeDtypeStruct(shape, jnp.float32), input_output_aliases=aliases
    )
    out: jax.Array = run(jnp.int32(kernel), *operands)
    return out


def _take_pieces(slot: int) -> int:
    frame, total, do_piece = load(slot + _FRAME), load(slot + _TOTAL), load(slot + _PIECE)
    piece = fetch_add(slot + _NEXT, 1)
    while piece < total:
        if _call_with_two(do_piece, frame, piece) != DONE:
            store(slot + _FAILED, 1)
        piece = fetch_add(slot + _NEXT, 1)
    return 0


def _help_with(ticket: int) -> int:
    slot, turn = _slot(ticket % _NUM_SLOTS), ticket // _NUM_SLOTS
    state = load(slot + _TURN)
    while not (state >> 16 == turn and exchange_if(slot + _TURN, state, state + 1)):
        if state >> 16 != turn:
            return 0  # it was done without this thread
        state = load(slot + _TURN)
    call(load(_shared() + _WORK), slot)
    fetch_add(slot + _TURN, -1)
    return 0


@njit
def _slot(index: int) -> int:
    return _shared() + _SLOTS + 8 * _SLOT_WORDS * index


@njit
def _ask_for_help(frame: int, slot: int, ticket: int, total: int) -> None:
    api, args = load(frame + _FRAME_API), slot + _CALL
    store(args, 24 + 8)
    store(args + 8, 0)
    store(args + 16, load(frame + _FRAME_CONTEXT))
    store(args + 24, slot + _CALL + 48)
    error = call(load(api + _API_NUM_THREADS), args)
    if error != 0:
        _drop_error(api, args, error)
        return
    num_threads = load(slot + _CALL + 48)
    store(args, 24 + 16)
    store(args + 24, load(_shared() + _HELPER))
    store(args + 32, ticket)
    for _ in range(min(num_threads, total) - 1):
        error = call(load(api + _API_SCHEDULE), args)
        if error != 0:
            _drop_error(api, args, error)
            return


@njit
def _drop_error(api: int, args: int, error: int) -> None:
    """Give an error of XLA's back; the work is done without the help it was about."""
    store(args, 24)
    store(args + 8, 0)
    store(args + 16, error)
    call(load(api + _API_ERROR_DESTROY), args)


@njit
def _run(frame: int) -> int:
    """Do a call's pieces; gives the address of XLA's error, or 0."""
    kernel = _shared() + _KERNELS + 16 * number(frame, -1)
    total, index = call(load(kernel), frame), 0
    while not exchange_if(_slot(index) + _TAKEN, 0, 1):
        index = (index + 1) % _NUM_SLOTS
    slot = _slot(index)
    turn = load(slot + _TURN) >> 16
    store(slot + _FRAME, frame)
    store(slot + _PIECE, load(kernel + 8))
    store(slot + _TOTAL, total)
    store(slot + _NEXT, 0)
    store(slot + _FAILED, 0)
    _ask_for_help(frame, slot, turn * _NUM_SLOTS + index, total)
    call(load(_shared() + _WORK), slot)
    while not exchange_if(slot + _TURN, turn << 16, (turn + 1) << 16):
        pass  # a helper is at its last piece
    error = 0
    if load(slot + _FAILED) != 0:
        args = slot + _CALL
        store(args, 28)
        store(args + 8, 0)
        store(args + 16, load(_shared() + _FAILURE))
        store(args + 24, _RESOURCE_EXHAUSTED)
        error = call(load(load(frame + _FRAME_API) + _API_ERROR_CREATE), args)
    store(slot + _TAKEN, 0)
    return error


def _handle(frame: int) -> int:
    extension = load(frame + _FRAME_EXTENSION)
    if extension != 0 and load_int32(extension + 8) == _IS_METADATA:
        metadata = load(extension + _METADATA)
        store_int32(metadata + _METADATA_MAJOR, INTERFACE_VERSION[0])
        store_int32(metadata + _METADATA_MINOR, INTERFACE_VERSION[1])
        return 0
    return _run(frame)


def register(kernels: Mapping[int, Kernel], cache_dir: str = "") -> None:
    """Compile kernels, or read what was compiled, and make them known to XLA.

    Args:
        kernels: By number.
        cache_dir: Where machine code is kept; empty: nowhere.
    """
    words = np.zeros(_SLOTS // 8 + _NUM_SLOTS * _SLOT_WORDS, np.int64)
    llvmlite.binding.add_symbol(_SHARED, words.ctypes.data)
    directory = _own_directory(cache_dir) if cache_dir else None
    try:
        made = _compile(kernels, directory)
    except _CACHE_ERRORS as e:
        if directory is None:
            raise
        logger.warning("native cache not used path=%s error=%s", directory, e)
        made = _compile(kernels, None)
    handler, work, helper, *pieces = made
    words[_WORK // 8], words[_HELPER // 8] = work.address, helper.address
    words[_FAILURE // 8] = ctypes.addressof(_NO_MEMORY)
    for place, index in enumerate(kernels):
        pair = pieces[2 * place :][:2]
        words[_KERNELS // 8 + 2 * index :][:2] = [function.address for function in pair]
    _kept.extend((words, made))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(_TARGET, new_capsule(handler.address, None, None), platform="cpu")


def _compile(kernels: Mapping[int, Kernel], directory: Path | None) -> list[Any]:
    """Handler, work and helper, and each kernel's two functions, kept in a directory if there is
    one."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory or before)
    try:
        of_one = cfunc(types.intp(types.intp), cache=directory is not None)
        of_two = cfunc(types.intp(types.intp, types.intp), cache=directory is not None)
        made = [of_one(function) for function in (_handle, _take_pieces, _help_with)]
        for count_pieces, do_piece in kernels.values():
            made += [of_one(count_pieces), of_two(do_piece)]
        return made
    finally:
        numba.config.CACHE_DIR = before


def _own_directory(cache_dir: str) -> Path | None:
    """A directory for this processor and this version of the kernels; None: it cannot be written.

    numba knows a function by its own file alone, whatever that takes from others; and where its
    directory fails it takes another, which is not ours to trust.
    """
    features = llvmlite.binding.get_host_cpu_features().flatten()
    machine = f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()} {features}"
    machine += f" {numba.config.CPU_NAME} {numba.config.CPU_FEATURES}"
    digest = hashlib.sha256(machine.encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    parent = Path(cache_dir).expanduser().absolute()
    directory = parent / f"native-{digest.hexdigest()[:16]}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as e:
        logger.warning("native cache not used path=%s error=%s", directory, e)
        return None
