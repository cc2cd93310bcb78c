"""The compiled kernel, emulated under a layout, takes the wavefronts that its paths predict."""

from collections import Counter

import pytest
import torch

from cute_fa.emulator import emulate_forward
from cute_fa.ladder import KERNELS
from layouts import CATALOG
from layouts.access import kernel_paths
from layouts.banks import kernel_report
from layouts.parse import parse_expression

NAMES = ["PLAIN", "PADDED_8", "DIRECT_334", "ATOM_64B"]


def _kind(instruction: str) -> str:
    """The name that the emulator's report gives to an instruction."""
    if instruction.startswith("ldmatrix"):
        return "ldmatrix.trans" if ".trans" in instruction else "ldmatrix"
    return "cp.async" if instruction.startswith("cp.async") else instruction[: len("ld.shared")]


@pytest.mark.parametrize(("head_dim", "name"), [(64, "SWIZZLE_333"), *((128, name) for name in NAMES)])
def test_emulated_wavefronts_equal_the_sum_of_the_paths(head_dim, name):
    generator = torch.Generator().manual_seed(0)
    config = KERNELS["kernel1"].config
    iterations = 2
    q, k, v = (
        torch.randn(1, rows, 1, head_dim, generator=generator).to(torch.bfloat16)
        for rows in (config.tile_m, iterations * config.tile_n, iterations * config.tile_n)
    )
    emulated = emulate_forward(q, k, v, kernel="kernel1", layout=name)
    ideal, actual = Counter(), Counter()
    paths = kernel_paths(head_dim, config.tile_m, config.tile_n, config.num_threads)
    for one in kernel_report(CATALOG[name], paths).reports:
        times = iterations if one.path.per_iteration else 1
        ideal[_kind(one.path.instruction)] += times * one.ideal
        actual[_kind(one.path.instruction)] += times * one.wavefronts
    assert emulated.report.by_path() == {kind: (ideal[kind], actual[kind]) for kind in actual}
    assert not emulated.report.faults


EXOTIC = [
    "S<1,3,4> o (4,64):(64,1)",
    "S<2,4,3> o (8,64):(64,1)",
    "S<1,3,3> o (8,32):(32,1)",
    "(2,16):(24,1)",
    "(32,32):(40,1)",
]


@pytest.mark.parametrize("expression", EXOTIC)
def test_a_layout_that_the_kernel_takes_moves_data_and_nothing_else(expression):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, 64, generator=generator).to(torch.bfloat16) for rows in (70, 130, 130))
    plain, other = (emulate_forward(q, k, v, layout=layout) for layout in ("PLAIN", parse_expression(expression)))
    assert torch.equal(plain.o, other.o) and torch.equal(plain.lse, other.lse)
    assert not other.report.faults
