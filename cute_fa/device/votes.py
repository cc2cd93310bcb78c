"""Decisions that many threads take as one."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


def any_thread(condition, barrier_id, num_threads: int) -> cutlass.Boolean:
    """Whether the condition holds in any of the threads that come to the barrier."""
    votes = cute.arch.inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r0}, 0;\nbar.red.popc.u32 {$w0}, {$r1}, {$r2}, p;\n}",
        write_only_types=[cutlass.Int32],
        read_only_args=[cutlass.Int32(condition), cutlass.Int32(barrier_id), cutlass.Int32(num_threads)],
    )
    return votes != 0
