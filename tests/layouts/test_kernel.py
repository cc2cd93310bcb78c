"""The compiled kernel, emulated under a layout, takes the wavefronts that its paths predict."""

from collections import Counter

import pytest
import torch

from cute_fa.emulator import emulate_forward
from cute_fa.ladder import KERNELS
from layouts import CATALOG
from layouts.access import kernel_paths
from layouts.banks import kernel_report

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
