"""From a compiled kernel to a function of one call's tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_fa.compiled import get_compiled
from cute_fa.config import KernelConfig
from cute_fa.device.scores import ScoreArguments
from cute_fa.ladder import Rung
from cute_fa.problem import NO_FEATURES, AttentionProblem, ScoreFeatures, ScoreOptions


def get_launch(problem: AttentionProblem, rung: Rung, config: KernelConfig, arch: str) -> Callable:
    """A function of (q, k, v, o, lse or None, softmax_scale), and with score options or sequences of both besides.

    It takes tensors of this problem's shapes on its device, and as the last two ``score_arguments`` and the tuple of
    the sequences, or None for either. A rung that splits the keys allocates what its splits leave to be merged at each
    call, on the current stream.
    """
    compiled = get_compiled(problem.static, rung, config, arch)
    if not rung.splits_keys:
        return compiled
    num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
    num_ctas = rung.kernel.num_ctas(problem.batch, problem.seqlen_q, problem.num_heads, problem.num_heads_kv)
    num_splits = rung.kernel.num_splits(config, num_ctas, problem.seqlen_k, num_sms)
    floats = rung.kernel.workspace_floats(
        problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim, num_splits
    )

    def launch(q, k, v, o, lse, softmax_scale, arguments=None, sequences=None):
        workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
        compiled(q, k, v, o, lse, softmax_scale, workspace, num_splits, sequences)

    return launch


def score_arguments(options: ScoreOptions, features: ScoreFeatures, problem: AttentionProblem) -> ScoreArguments | None:
    """The values of checked options as a kernel that is compiled with ``features`` takes them, None for what is off.

    None for them all where the kernel has none.

    Tensors are views of the caller's with a stride of 0 where they are broadcast, wherever a kernel can read them so.
    """
    if features == NO_FEATURES:
        return None
    batch, num_heads, shape = problem.batch, problem.num_heads, (problem.seqlen_q, problem.seqlen_k)
    left, right = options.window_size
    slopes, sinks, bias = options.alibi_slopes, options.sinks, options.attn_bias
    return ScoreArguments(
        softcap=float(options.softcap) if features.softcap else None,
        window_left=left if features.window_left else None,
        window_right=right if features.window_right else None,
        alibi_slopes=None if slopes is None else slopes.detach().expand(batch, num_heads),
        sinks=None if sinks is None else sinks.detach().to(torch.float32).contiguous(),
        attn_bias=None if bias is None else _bias_rows(bias.detach(), (batch, num_heads, *shape)),
        score_factors=_factors(problem, options.q_descale, options.k_descale) if features.descales else None,
        output_factors=_factors(problem, options.v_descale) if features.descales else None,
    )


def _factors(problem: AttentionProblem, *descales: torch.Tensor | None) -> torch.Tensor:
    """The product of those that are given, for each head of q: (B, H)."""
    product = torch.ones(problem.num_heads_kv, dtype=torch.float32, device=problem.device)
    for descale in descales:
        product = product if descale is None else product * descale.detach()
    group = problem.num_heads // problem.num_heads_kv
    return product.repeat_interleave(group, -1).expand(problem.batch, problem.num_heads)


def _bias_rows(bias: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """The bias of every score, its rows contiguous; a mask as bytes."""
    if bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    bias = bias[(None,) * (4 - bias.dim())]
    if bias.stride(3) != 1 or bias.shape[3] != shape[3]:
        once = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride()[:3])]
        bias = once.expand(*once.shape[:3], shape[3]).contiguous()
    return bias.expand(shape)
