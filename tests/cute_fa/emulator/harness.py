"""Small kernels written in PTX for the emulator's tests."""

from __future__ import annotations

import numpy as np

from cute_fa.emulator import EmulationReport, TensorArg, emulate

REGISTERS = """
    .reg .pred %p<40>;
    .reg .b16 %rs<40>;
    .reg .b32 %r<60>;
    .reg .b64 %rd<60>;
"""


def module(body: str, num_params: int, shared_bytes: int = 0) -> str:
    """A module whose entry has pointers p0, p1, … in %rd0, %rd1, … and %tid.x in %r0."""
    params = ",\n".join(f"    .param .u64 p{i}" for i in range(num_params))
    loads = "\n".join(f"    ld.param.u64 %rd{i}, [p{i}];" for i in range(num_params))
    shared = f"    .shared .align 16 .b8 smem[{shared_bytes}];\n" if shared_bytes else ""
    return (
        ".version 8.8\n.target sm_80\n.address_size 64\n\n"
        f".visible .entry k(\n{params}\n)\n{{{REGISTERS}{shared}{loads}\n"
        f"    mov.u32 %r0, %tid.x;\n{body}\n    ret;\n}}\n"
    )


def run(body: str, *arrays: np.ndarray, threads: int = 64, ctas: int = 1, shared_bytes: int = 0) -> EmulationReport:
    """Runs ``body`` with a pointer to each array."""
    args = [TensorArg(f"p{i}", array) for i, array in enumerate(arrays)]
    return emulate(module(body, len(arrays), shared_bytes), (ctas, 1, 1), (threads, 1, 1), args, 0)


_REGISTER = {2: "%rs", 4: "%r", 8: "%rd"}


def elementwise(instruction: str, *inputs: np.ndarray, out=np.uint32) -> np.ndarray:
    """One instruction on every element: ``{d}`` is its destination, ``{0}``, ``{1}``, … its sources.

    Inputs are arrays of one length, a multiple of 32; a boolean array arrives as a predicate.
    """
    count = len(inputs[0])
    result = np.zeros(count, out)
    lines, names = [], []
    for i, array in enumerate([*inputs, result]):
        width = array.dtype.itemsize
        lines.append(f"mul.wide.u32 %rd{20 + i}, %r0, {width};")
        lines.append(f"add.s64 %rd{20 + i}, %rd{20 + i}, %rd{i};")
        if i == len(inputs):
            break
        if array.dtype == np.bool_:
            lines.append(f"ld.global.u8 %rs{20 + i}, [%rd{20 + i}];")
            lines.append(f"setp.ne.u16 %p{20 + i}, %rs{20 + i}, 0;")
            names.append(f"%p{20 + i}")
        else:
            register = f"{_REGISTER[width]}{30 + i}"
            lines.append(f"ld.global.b{8 * width} {register}, [%rd{20 + i}];")
            names.append(register)
    if result.dtype == np.bool_:
        lines.append(instruction.format(*names, d="%p1"))
        lines += ["selp.u16 %rs1, 1, 0, %p1;", f"st.global.u8 [%rd{20 + len(inputs)}], %rs1;"]
    else:
        width = result.dtype.itemsize
        lines.append(instruction.format(*names, d=f"{_REGISTER[width]}1"))
        lines.append(f"st.global.b{8 * width} [%rd{20 + len(inputs)}], {_REGISTER[width]}1;")
    report = run("\n".join(lines), *inputs, result, threads=count)
    report.raise_for_faults()
    return result
