"""Kernels that make one kind of access to shared memory and no other, to hold the bank model to.

A kernel reads the byte address of each lane from a table and runs one PTX instruction at it, so nothing
but the table decides which banks meet, and the compiler, which doesn't know the addresses, can neither
merge nor drop an access. Run as a program, this module launches every probe of ``perf.bank_table`` once,
in order, for ncu to count.
"""

from __future__ import annotations

import re

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_fa.arch import arch_of_capability
from layouts.access import WARP_LANES, Path
from perf.bank_table import PROBES, Probe, kernel_name

SMEM_BYTES = 40 * 1024  # a 128x128 tile of 16-bit elements with padding
INACTIVE = -1  # address of a lane that sits an instruction out


def probe_asm(instruction: str) -> tuple[str, str]:
    """Inline PTX for an instruction, and its kind: "load", "store" or "async".

    Operands: a load has result $0 (the exclusive or of all it loads) and address $1; a store has address
    $0 and value $1; cp.async has shared address $0 and global address $1.

    Raises:
        ValueError: an instruction that no probe makes.
    """
    if instruction.startswith("cp.async"):
        return f"{instruction} [$0], [$1], 16;", "async"
    pattern = r"(ldmatrix|ld|st)\.(?:sync\.aligned\.m8n8\.x(\d)|shared(?:\.v(\d))?).*\.b(16|32)"
    match = re.fullmatch(pattern, instruction)
    if not match:
        raise ValueError(f"instruction must be cp.async, ldmatrix, ld.shared or st.shared, got {instruction!r}")
    operation, matrices, vector, bits = match.groups()
    registers = [f"r{i}" for i in range(int(matrices or vector or 1))]
    listed = f"{{{', '.join(registers)}}}" if matrices or vector else "r0"
    narrow = bits == "16" and operation != "ldmatrix"  # ldmatrix packs its 16-bit elements in pairs
    lines = [f".reg .b{16 if narrow else 32} {', '.join(registers)};"]
    if operation == "st":
        lines += [f"{'cvt.u16.u32' if narrow else 'mov.b32'} {register}, $1;" for register in registers]
        lines.append(f"{instruction} [$0], {listed};")
        return f"{{ {' '.join(lines)} }}", "store"
    lines.append(f"{instruction} {listed}, [$1];")
    lines += [f"xor.b32 r0, r0, {register};" for register in registers[1:]]
    lines.append(f"{'cvt.u32.u16' if narrow else 'mov.b32'} $0, r0;")
    return f"{{ {' '.join(lines)} }}", "load"


class BankProbe:
    """A kernel of one CTA that runs one instruction at each row of a table of addresses."""

    def __init__(self, instruction: str, masked: bool):
        """``masked``: some lanes may be ``INACTIVE``; ldmatrix has no such lanes."""
        self.asm, self.kind = probe_asm(instruction)
        self.masked = masked

    @cute.jit
    def __call__(self, addresses: cute.Tensor, source: cute.Tensor, out: cute.Tensor, stream):
        """Launches the kernel.

        Args:
            addresses: int32 (instructions, threads), bytes from the start of shared memory.
            source: int32 (4 * threads), what cp.async copies.
            out: int32 (threads), the exclusive or of all that a thread loaded.
        """
        self.kernel(addresses, source, out).launch(grid=(1, 1, 1), block=(addresses.shape[1], 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, addresses: cute.Tensor, source: cute.Tensor, out: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        tile = smem.allocate_tensor(cutlass.Int8, cute.make_layout(SMEM_BYTES), byte_alignment=1024)
        base = tile.iterator.toint()
        gmem = (source.iterator + 4 * tidx).toint()
        result = cutlass.Int32(0)
        for i in cutlass.range(addresses.shape[0], unroll=1):
            address = addresses[i, tidx]
            if cutlass.const_expr(self.masked):
                if address != INACTIVE:
                    result = result ^ self._access(base + address, gmem, address)
            else:
                result = result ^ self._access(base + address, gmem, address)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        out[tidx] = result

    def _access(self, address, gmem, value):
        """Traces the instruction; returns what it loaded, 0 for one that loads nothing."""
        address = cutlass.Int32(address).ir_value()
        if cutlass.const_expr(self.kind == "load"):
            i32 = cutlass.Int32.mlir_type
            return cutlass.Int32(llvm.inline_asm(i32, [address], self.asm, "=r,r", has_side_effects=True))
        if cutlass.const_expr(self.kind == "store"):
            operands, constraints = [address, cutlass.Int32(value).ir_value()], "r,r"
        else:
            operands, constraints = [address, cutlass.Int64(gmem).ir_value()], "r,l"
        llvm.inline_asm(None, operands, self.asm, constraints, has_side_effects=True)
        return cutlass.Int32(0)


def compile_probe(instruction: str, masked: bool, num_threads: int, options: str):
    """The compiled kernel of an instruction, for a table of any length; ``options`` as for cute.compile."""
    table_shape, table_stride = (cute.sym_int32(), num_threads), (num_threads, 1)
    table = make_fake_tensor(cutlass.Int32, table_shape, table_stride, assumed_align=4)
    source = make_fake_tensor(cutlass.Int32, (4 * num_threads,), (1,), assumed_align=16)
    out = make_fake_tensor(cutlass.Int32, (num_threads,), (1,), assumed_align=4)
    name = kernel_name(instruction)
    BankProbe.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    return cute.compile(BankProbe(instruction, masked), table, source, out, stream, options=options)


def address_table(probe: Probe) -> np.ndarray:
    """The addresses of a probe as its kernel reads them: int32 (instructions, threads)."""
    path: Path = probe.path
    addresses = path.addresses(probe.layout)
    if path.active is not None:
        addresses = np.where(path.active, addresses, INACTIVE)
    warps, instructions, lanes = addresses.shape
    # ldmatrix.x1 and .x2 ignore the addresses of the other lanes.
    table = np.zeros((warps, instructions, WARP_LANES), np.int32)
    table[:, :, :lanes] = addresses
    return np.ascontiguousarray(table.transpose(1, 0, 2).reshape(instructions, -1))


def main() -> None:
    """Launches every probe once, in the order of ``PROBES``."""
    arch = arch_of_capability(torch.cuda.get_device_capability())
    options = f"--gpu-arch {arch} --enable-tvm-ffi"
    kernels = {}
    for probe in PROBES:
        table = torch.from_numpy(address_table(probe)).cuda()
        threads = table.shape[1]
        key = (probe.path.instruction, probe.path.active is not None, threads)
        if key not in kernels:
            kernels[key] = compile_probe(*key, options)
        source, out = (torch.from_numpy(np.zeros(n, np.int32)).cuda() for n in (4 * threads, threads))
        kernels[key](table, source, out)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
