"""cute_fa in a PyTorch program on a GPU: compiled, captured, on several streams and threads, without autograd."""

from __future__ import annotations

import threading

import pytest
import torch

import cute_fa
from tests.cases import Case

pytestmark = pytest.mark.gpu
CASE = Case(500, 700, 128, causal=True, batch=2, num_heads=8, num_heads_kv=2)


def attend(q, k, v, **options):
    return cute_fa.forward(q, k, v, causal=True, return_lse=True, **options)


def assert_equal(got, expected):
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_compiles_without_breaks(dynamic, generator):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attend(q * 2, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
                             fullgraph=True, dynamic=dynamic)  # fmt: skip
    for seqlen_q in (500, 130):
        q, k, v = Case(seqlen_q, 700, 128, batch=2, num_heads=8, num_heads_kv=2).tensors("cuda", generator)
        assert_equal(compiled(q, k, v), attend(q * 2, k, v))


def test_inductor_with_cuda_graphs(generator):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        tensors = CASE.tensors("cuda", generator)
        assert_equal([tensor.clone() for tensor in compiled(*tensors)], attend(*tensors))


def test_inductor_goes_back_through_sdpa(generator):
    torch._dynamo.reset()
    tensors = [tensor.requires_grad_() for tensor in CASE.tensors("cuda", generator)]
    grad_o = torch.randn(tensors[0].shape, generator=generator).to(CASE.dtype).cuda()

    def gradients(call):
        return torch.autograd.grad(call(*tensors, backward="sdpa")[0], tensors, grad_o)

    for one, other in zip(gradients(torch.compile(attend, fullgraph=True)), gradients(attend), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("writes_out", [False, True])
def test_a_cuda_graph_replays_without_memory_of_its_own(writes_out, generator):
    """After the capture nothing is allocated, and new inputs give what eager mode gives."""
    q, k, v = CASE.tensors("cuda", generator)
    options = {"out": torch.empty_like(q)} if writes_out else {}
    attend(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, **options)
    for _ in range(3):
        for tensor, fresh in zip((q, k, v), CASE.tensors("cuda", generator), strict=True):
            tensor.copy_(fresh)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        assert_equal(captured, attend(q, k, v))


def test_eager_calls_with_out_allocate_nothing(generator):
    q, k, v = CASE.tensors("cuda", generator)
    out = torch.empty_like(q)
    cute_fa.forward(q, k, v, out=out)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    cute_fa.forward(q, k, v, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


def test_two_streams_at_once(generator):
    """Each stream's inputs arrive late on that stream: a launch on the other would read zeros."""
    inputs = [CASE.tensors("cuda", generator) for _ in range(2)]
    expected = [attend(*tensors) for tensors in inputs]
    late = [[torch.zeros_like(tensor) for tensor in tensors] for tensors in inputs]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for stream, zeros, tensors in zip(streams, late, inputs, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for zero, tensor in zip(zeros, tensors, strict=True):
                zero.copy_(tensor)
            results.append(attend(*zeros))
    torch.cuda.synchronize()
    for got, right in zip(results, expected, strict=True):
        assert_equal(got, right)


def test_32_threads_on_streams_of_their_own(generator):
    cases = [Case(64 + i, 100 + 3 * i, 64, causal=True, num_heads=4, num_heads_kv=2) for i in range(32)]
    inputs = [case.tensors("cuda", generator) for case in cases]
    expected = [attend(*tensors) for tensors in inputs]
    torch.cuda.synchronize()
    wrong, barrier = [], threading.Barrier(32)

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for _ in range(20):
                got = attend(*inputs[i])
                if not all(torch.equal(one, other) for one, other in zip(got, expected[i], strict=True)):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inference_mode(generator):
    tensors = CASE.tensors("cuda", generator)
    expected = attend(*tensors)
    with torch.inference_mode():
        inside = [tensor.clone() for tensor in tensors]
        assert_equal(attend(*inside), expected)
        assert attend(*inside)[0].is_inference()
    assert_equal(attend(*inside), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_in_one_process(generator):
    inputs = [CASE.tensors("cpu", generator) for _ in range(2)]
    placed = [[tensor.to(f"cuda:{i}") for tensor in tensors] for i, tensors in enumerate(inputs)]
    results = [attend(*tensors) for tensors in placed]
    assert torch.cuda.current_device() == 0
    for i in range(2):
        with torch.cuda.device(1 - i):
            assert_equal(attend(*placed[i]), results[i])
        assert results[i][0].device == torch.device("cuda", i)
    assert_equal([result.cpu() for result in results[1]],
                 [result.cpu() for result in attend(*(tensor.cuda(0) for tensor in inputs[1]))])  # fmt: skip


def test_the_current_device_stays_what_it_was(generator, monkeypatch):
    """With one device, what the guard is asked for shows it: the device of the tensors."""
    q, k, v = CASE.tensors("cuda", generator)
    expected, _ = attend(q, k, v)
    guarded = []
    real = torch.cuda.device

    def record(device):
        guarded.append(device)
        return real(device)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # as if another device were current
    monkeypatch.setattr(torch.cuda, "device", record)
    got, _ = attend(q, k, v)
    monkeypatch.undo()
    assert guarded == [0] and torch.equal(got, expected)


def test_a_first_call_inside_a_capture(generator):
    """A shape that no call had, of a kernel that has run."""
    attend(*CASE.tensors("cuda", generator))
    q, k, v = Case(77, 99, 128, batch=3, num_heads=4, num_heads_kv=4).tensors("cuda", generator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v)
    graph.replay()
    assert_equal(captured, attend(q, k, v))
