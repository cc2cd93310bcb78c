"""cute_fa.forward on a GPU, every rung of the ladder."""

from __future__ import annotations

import pytest
import torch

import cute_fa
from cute_fa.arch import arch_of_capability
from cute_fa.ladder import KERNELS, select
from cute_fa.launch import get_launch
from cute_fa.problem import AttentionProblem
from tests.cases import GPU_CASES, Case, assert_close, usable_layouts

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def only_kernels_of_this_gpu(request):
    """Skips the rungs that this GPU lacks the instructions for."""
    rung = KERNELS.get(getattr(request.node, "callspec", None) and request.node.callspec.params.get("kernel"))
    arch = arch_of_capability(torch.cuda.get_device_capability())
    if rung is not None and not rung.runs_on(arch):
        pytest.skip(f"{rung.name} doesn't run on {arch}")


def run(case: Case, q, k, v, **options):
    return cute_fa.forward(q, k, v, causal=case.causal, softmax_scale=case.softmax_scale, return_lse=True, **options)


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_matches_reference(kernel, case, generator):
    q, k, v = case.tensors("cuda", generator)
    assert_close(case, q, k, v, *run(case, q, k, v, kernel=kernel))


@pytest.mark.parametrize("head_dim, layout", usable_layouts())
def test_every_layout_gives_the_same_bits(head_dim, layout, generator):
    case = Case(200, 333, head_dim, causal=True)
    q, k, v = case.tensors("cuda", generator)
    plain, plain_lse = run(case, q, k, v, kernel="kernel1")
    other, other_lse = run(case, q, k, v, layout=layout, kernel="kernel1")
    assert torch.equal(plain, other) and torch.equal(plain_lse, other_lse)


def test_permuted_view(generator):
    case = Case(200, 150, 128, causal=True, num_heads=4, num_heads_kv=2)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in case.tensors("cuda", generator))
    assert not q.is_contiguous()
    assert_close(case, q, k, v, *run(case, q, k, v))


def test_packed_qkv_and_sliced_heads(generator):
    case = Case(100, 100, 64, batch=2, num_heads=4, num_heads_kv=4)
    qkv = torch.randn(2, 100, 3, 8, 64, generator=generator).to(case.dtype).cuda()
    q, k, v = (qkv[:, :, i, 2:6] for i in range(3))
    assert_close(case, q, k, v, *run(case, q, k, v))


def test_rows_that_are_not_16_byte_aligned_are_copied(generator):
    case = Case(100, 90, 64)
    storage = torch.randn(1, 100, 2, 67, generator=generator).to(case.dtype).cuda()
    q, k, v = storage[..., :64], storage[:, :90, :, :64], storage[:, 10:, :, :64].clone()
    assert q.stride(2) % 8
    assert_close(case, q, k, v, *run(case, q, k, v))


def test_expanded_and_single_extents(generator):
    case = Case(1, 77, 64, batch=1, num_heads=1, num_heads_kv=1)
    q, k, v = case.tensors("cuda", generator)
    q = q.as_strided(q.shape, (3, 5, 1, 1))  # strides of extent 1 mean nothing
    assert_close(case, q, k, v, *run(case, q, k, v))
    case = Case(65, 77, 64, batch=3, num_heads=4, num_heads_kv=4)
    q, k, v = case.tensors("cuda", generator)
    k, v = k[:1, :, :1].expand(3, 77, 4, 64), v[:, :, :1].expand(3, 77, 4, 64)
    assert_close(case, q, k, v, *run(case, q, k, v))


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_keys_no_queries_no_batch(kernel):
    q, k = (torch.ones(2, s, 4, 64, dtype=torch.float16, device="cuda") for s in (5, 0))
    o, lse = cute_fa.forward(q, k, k, return_lse=True, kernel=kernel)
    assert torch.equal(o, torch.zeros_like(q)) and torch.equal(lse, torch.full((2, 4, 5), -torch.inf, device="cuda"))
    o, lse = cute_fa.forward(k, q, q, return_lse=True, kernel=kernel)
    assert o.shape == (2, 0, 4, 64) and lse.shape == (2, 4, 0)
    assert cute_fa.forward(q[:0], q[:0], q[:0], kernel=kernel).shape == (0, 5, 4, 64)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", ((100, 30), (65, 1), (300, 64)))
def test_rows_that_see_no_key(kernel, seqlen_q, seqlen_k, generator):
    case = Case(seqlen_q, seqlen_k, 64, causal=True)
    q, k, v = case.tensors("cuda", generator)
    o, lse = run(case, q, k, v, kernel=kernel)
    blind = seqlen_q - seqlen_k
    assert torch.equal(o[:, :blind], torch.zeros_like(o[:, :blind]))
    assert (lse[..., :blind] == -torch.inf).all()
    assert_close(case, q, k, v, o, lse)


def test_values_behind_the_last_key_do_not_matter(generator):
    """Memory past S_k holds NaN; 0 * NaN must not reach the output."""
    case = Case(70, 65, 64)
    q, k, v = case.tensors("cuda", generator)
    k_long, v_long = (torch.full((1, 128, 2, 64), torch.nan, dtype=case.dtype, device="cuda") for _ in range(2))
    k_long[:, :65], v_long[:, :65] = k, v
    assert_close(case, q, k, v, *run(case, q, k_long[:, :65], v_long[:, :65]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_written_outside_the_output(kernel, generator):
    """o and lse lie inside larger tensors, whose rest must stay as it was."""
    case = Case(65, 70, 64, causal=True)
    q, k, v = case.tensors("cuda", generator)
    expected = run(case, q, k, v, kernel=kernel)
    o_all = torch.full((3, 200, 4, 192), 7.0, dtype=case.dtype, device="cuda")
    lse_all = torch.full((3, 4, 200), 7.0, device="cuda")
    inside_o, inside_lse = (slice(1, 2), slice(60, 125), slice(1, 3), slice(64, 128)), (1, slice(1, 3), slice(60, 125))
    problem = AttentionProblem.from_tensors(q, k, v, causal=case.causal, return_lse=True)
    arch = arch_of_capability(torch.cuda.get_device_capability())
    launch = get_launch(problem, *select(problem, arch, kernel), arch)
    launch(q, k, v, o_all[inside_o], lse_all[inside_lse][None], 64**-0.5)
    assert torch.equal(o_all[inside_o], expected[0]) and torch.equal(lse_all[inside_lse][None], expected[1])
    o_all[inside_o], lse_all[inside_lse] = 7.0, 7.0
    assert (o_all == 7.0).all() and (lse_all == 7.0).all()


def test_many_heads_and_batches(generator):
    """More than 65535 batches: the y and z extents of a grid would not do."""
    case = Case(1, 3, 64, batch=66000, num_heads=1, num_heads_kv=1)
    q, k, v = case.tensors("cuda", generator)
    o, _ = run(case, q, k, v)
    last = Case(1, 3, 64, batch=3, num_heads=1, num_heads_kv=1)
    assert_close(last, q[-3:], k[-3:], v[-3:], *run(last, q[-3:], k[-3:], v[-3:]))
    assert torch.equal(o[-3:], run(last, q[-3:], k[-3:], v[-3:])[0])


def test_offsets_beyond_32_bits(generator):
    """Elements past 2**31 from the start of the tensor: batch stride 2**31 - 2**20."""
    case = Case(130, 130, 128, causal=True, batch=2)
    stride = 2**31 - 2**20
    storage = torch.empty(2**31 + 2**28, dtype=case.dtype, device="cuda")
    q, k, v = case.tensors("cuda", generator)
    far = storage.as_strided(q.shape, (stride, 256, 128, 1))
    far.copy_(q)
    assert_close(case, q, k, v, *run(case, far, k, v))
    for row_stride in (2**24, 2**24 + 8):  # row 129 starts past 2**31; the second is copied
        long_rows = storage.as_strided(q.shape, (2**22, row_stride, 128, 1))
        long_rows.copy_(k)
        assert_close(case, q, k, v, *run(case, q, long_rows, v))


def test_current_stream_is_honoured(generator):
    case = Case(2000, 2000, 64, num_heads=16, num_heads_kv=16)
    q, k, v = case.tensors("cuda", generator)
    expected, _ = run(case, q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # if forward ran on another stream, it would read zeros
        late.copy_(q)
        o, _ = run(case, late, k, v)
    stream.synchronize()
    assert torch.equal(o, expected)


def test_cuda_graph_replays(generator):
    case = Case(100, 100, 64)
    q, k, v = case.tensors("cuda", generator)
    run(case, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = run(case, q, k, v)
    q.copy_(case.tensors("cuda", generator)[0])
    graph.replay()
    assert torch.equal(o, run(case, q, k, v)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_of_the_tensors_is_honoured(generator):
    case = Case(100, 100, 64)
    q, k, v = case.tensors("cuda:1", generator)
    assert torch.cuda.current_device() == 0
    o, lse = run(case, q, k, v)
    assert o.device == q.device
    assert_close(case, q, k, v, o, lse)


def test_repeats_are_bit_identical(generator):
    case = Case(500, 500, 128, causal=True, num_heads=8, num_heads_kv=8)
    q, k, v = case.tensors("cuda", generator)
    first, _ = run(case, q, k, v)
    for _ in range(50):
        assert torch.equal(run(case, q, k, v)[0], first)


def test_gradients_allowed_under_no_grad(generator):
    case = Case(65, 65, 64)
    q, k, v = case.tensors("cuda", generator)
    expected, _ = run(case, q, k, v)
    with torch.no_grad():
        assert torch.equal(run(case, q.requires_grad_(), k, v)[0], expected)
    with torch.inference_mode():
        assert torch.equal(run(case, q.clone(), k, v)[0], expected)
