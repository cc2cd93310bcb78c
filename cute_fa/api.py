"""The forward that people call: arguments -> problem -> rung -> launch."""

from __future__ import annotations

from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from cute_fa import ops  # registers torch.ops.cute_fa.forward
from cute_fa.plan import run
from cute_fa.problem import FP8, AttentionProblem, ScoreOptions, check_no_grad, check_out
from layouts import SmemLayout

BACKWARDS = ("sdpa",)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    backward: str | None = None,
    kernel: str = "auto",
    layout: str | SmemLayout | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T) v, for each batch and head.

    Tensors on a GPU run on it, on the current stream. Tensors on the CPU run through the emulator: the
    compiled kernel, instruction by instruction, with its races and stray accesses found; slow, for small
    problems. Under torch.compile, torch.export and for fake tensors it is the operator ``torch.ops.cute_fa.forward``.

    Args:
        q: (B, S_q, H, D), fp16, bf16 or fp8 (e4m3, which is widened to bf16 before the kernel), last dimension
            contiguous, any other strides; D is a multiple of 8 from 8 to 256.
        k: (B, S_k, H_kv, D), of the same dtype; H is a multiple of H_kv (each head of k and v serves H / H_kv heads
            of q).
        v: (B, S_k, H_kv, D_v), of the same dtype; D_v is such a multiple too, mostly D.
        causal: query i sees keys up to i + S_k - S_q: the last query sees the last key.
        softmax_scale: greater than 0 (2**-126 to 2**64); 1 / sqrt(D) when None.
        return_lse: also return the log-sum-exp of the scaled scores.
        window_size: (left, right): the query at position p = i + S_k - S_q sees keys p - left to p + right; -1 is no
            bound on a side. ``causal`` makes right 0.
        softcap: above 0 (2**-10 to 2**10), softcap * tanh(s / softcap) takes the place of every scaled score s.
        alibi_slopes: (H,) or (B, H), fp32: -slope * |p - j| is added to the score of key j.
        sinks: (H,), fp32 or q's dtype: a logit of each head that joins the sum under every row's softmax.
        attn_bias: what broadcasts to (B, H, S_q, S_k), any strides: added to the scores, fp32 or q's dtype, or bool
            with False where a key is hidden. See ``cute_fa.problem.ScoreOptions`` for its corners.
        q_descale, k_descale, v_descale: (H_kv,) or (B, H_kv), fp32, for fp8 alone: what each head of k and v, and the
            heads of q that share it, are to be multiplied by; 1 when None.
        out: a tensor that o is written into, of o's shape, dtype and device, with rows at multiples of 16 bytes,
            and no memory shared with q, k or v.
        backward: None: inputs that require gradients are refused. "sdpa": autograd goes back through PyTorch's
            scaled_dot_product_attention, which computes the attention again; with an argument that changes scores,
            through operators of PyTorch that hold all B H S_q S_k scores, in fp32. lse has no gradient; fp8 has none.
        kernel: a rung of the ladder ("kernel1", ...), or "auto" for the best.
        layout: another shared-memory layout for that kernel, by its name in the catalog or as a value.

    Returns:
        o (B, S_q, H, D_v), dtype (bf16 for fp8) and device of q, contiguous, or ``out``; with ``return_lse`` also
        lse (B, H, S_q), fp32, natural logarithm. A query that sees no key has o = 0 and lse = -inf, or its head's sink.

    Raises:
        TypeError, ValueError: before anything is launched, naming the argument and what is allowed.
        NotImplementedError: likewise, for what is planned.
        EmulationError: on the CPU, a fault of the kernel, or more work than the emulator should be given.
    """
    options = ScoreOptions.of(window_size, softcap, alibi_slopes, sinks, attn_bias, q_descale, k_descale, v_descale)
    if (
        backward is not None
        or type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or is_compiling()
        or _len_torch_dispatch_stack()
        or _get_tracing_state() is not None
    ):
        o, lse = _run_by_operator(q, k, v, causal, softmax_scale, return_lse, out, backward, options, kernel, layout)
    else:
        o, lse = run(q, k, v, causal, softmax_scale, return_lse, out, options, kernel, layout)
    return (o, lse) if return_lse else o


def _run_by_operator(q, k, v, causal, softmax_scale, return_lse, out, backward, options, kernel, layout):
    """``run`` through the dispatcher; what the operator's schema can't say is checked here."""
    problem = AttentionProblem.from_shapes(q, k, v, causal=causal, return_lse=return_lse, options=options)
    problem.softmax_scale(softmax_scale)
    if backward not in (None, *BACKWARDS):
        raise ValueError(f"backward must be None or {' or '.join(map(repr, BACKWARDS))}, got {backward!r}")
    if backward is not None and q.dtype == FP8:
        raise ValueError(f"backward must be None for {FP8}, got {backward!r}")
    if backward is None or out is not None:
        for name, tensor in {"q": q, "k": k, "v": v, **options.tensors}.items():
            check_no_grad(name, tensor)
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be the name of a kernel, got {type(kernel).__name__}")
    if not isinstance(layout, str | None):
        raise TypeError(f"layout must be a name of the catalog or None for an operator, got {type(layout).__name__}")
    if out is not None:
        check_out(out, q, v)
    o, lse = ops.forward(
        q, k, v, problem.causal, softmax_scale, return_lse, kernel, layout, *problem.window_size, options.softcap,
        options.alibi_slopes, options.sinks, options.attn_bias, *options.descales.values(),
    )  # fmt: skip
    if out is not None:
        o = out.copy_(o)
    return o, lse
