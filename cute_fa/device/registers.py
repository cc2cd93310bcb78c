"""Keeping values out of registers."""

from __future__ import annotations

import cutlass
from cutlass._mlir.dialects import llvm


def recompute_from(value):
    """An Int32 that the compiler can't know to be ``value``.

    What is computed from it stays where it is written: a loop's address arithmetic is done anew in each
    iteration, a few integer instructions, in place of holding every product in a register through the loop.
    """
    i32 = cutlass.Int32.mlir_type
    operand = cutlass.Int32(value).ir_value()
    return cutlass.Int32(llvm.inline_asm(i32, [operand], "mov.b32 $0, $1;", "=r,r", has_side_effects=True))


def reread_thread():
    """The thread's index, read once more: nothing need be kept that can be worked out from it."""
    i32 = cutlass.Int32.mlir_type
    return cutlass.Int32(llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True))
