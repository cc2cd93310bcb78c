"""cute_fa.forward on CPU tensors: the compiled kernel through the emulator, by the interface of the GPU."""

from __future__ import annotations

import pytest
import torch

import cute_fa
from cute_fa.emulator import EmulationFault, EmulationReport, Fault, emulate_forward
from layouts import COLS, SmemLayout, Swizzle
from tests.cases import EMULATED_KERNELS, Case, assert_close


def run(case: Case, q, k, v, **options):
    return cute_fa.forward(q, k, v, causal=case.causal, softmax_scale=case.softmax_scale, return_lse=True, **options)


@pytest.mark.parametrize("kernel", EMULATED_KERNELS)
def test_matches_reference_and_emulator(kernel, generator):
    case = Case(100, 130, 64, causal=True, num_heads=4)
    q, k, v = case.tensors("cpu", generator)
    o, lse = run(case, q, k, v, kernel=kernel)
    assert_close(case, q, k, v, o, lse)
    emulated = emulate_forward(q, k, v, causal=True, kernel=kernel)
    assert torch.equal(o, emulated.o) and torch.equal(lse, emulated.lse)


def test_a_layout_value_runs_and_shows_its_conflicts(generator):
    """Two bits of swizzle where three are needed: two rows of each eight meet in every bank."""
    layout = SmemLayout("two bits", (8, 64), (64, 1), Swizzle(2, 3, 3))
    case = Case(65, 65, 64, causal=True)
    q, k, v = case.tensors("cpu", generator)
    o, lse = run(case, q, k, v, layout=layout)
    assert_close(case, q, k, v, o, lse)
    emulated = emulate_forward(q, k, v, causal=True, layout=layout)
    assert torch.equal(o, emulated.o)
    ways = {path: actual / ideal for path, (ideal, actual) in emulated.report.by_path().items()}
    assert ways == {"cp.async": 1, "ldmatrix": 2, "ldmatrix.trans": 2, "ld.shared": 1, "st.shared": 2}


def test_rows_that_are_not_16_byte_aligned_are_copied(generator):
    case = Case(60, 60, 64, causal=True)
    storage = torch.randn(1, 60, 2, 67, generator=generator).to(case.dtype)
    q, k, v = storage[..., :64], storage[..., :64], storage[..., :64].clone()
    assert_close(case, q, k, v, *run(case, q, k, v))


def test_no_keys_and_no_queries():
    q, k = (torch.ones(2, s, 4, 64, dtype=torch.float16) for s in (5, 0))
    o, lse = cute_fa.forward(q, k, k, return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()
    assert cute_fa.forward(k, q, q).shape == (2, 0, 4, 64)


def test_arguments_are_checked_as_on_a_gpu():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="kernel must be auto or one of"):
        cute_fa.forward(q, q, q, kernel="kernel0")
    with pytest.raises(ValueError, match="does not divide"):
        cute_fa.forward(q, q, q, layout=SmemLayout("seven rows", (7, COLS), (COLS, 1)))
    with pytest.raises(TypeError, match="q must be"):
        cute_fa.forward(q.float(), q.float(), q.float())


def test_a_fault_of_the_kernel_is_an_exception(monkeypatch):
    report = EmulationReport(faults=[Fault("race", "PTX line 7: st.shared.b32 [%r1], %r2", "two threads")])
    monkeypatch.setattr("cute_fa.emulator.forward.run_forward", lambda *args, **options: report)
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(EmulationFault, match=r"has 1 fault:\s+race: two threads\s+PTX line 7"):
        cute_fa.forward(q, q, q)
