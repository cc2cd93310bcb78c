"""From a compiled kernel to a function of one call's tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_fa.compiled import get_compiled
from cute_fa.config import KernelConfig
from cute_fa.ladder import Rung
from cute_fa.problem import AttentionProblem


def get_launch(problem: AttentionProblem, rung: Rung, config: KernelConfig, arch: str) -> Callable:
    """A function of (q, k, v, o, lse or None, softmax_scale), and for sequences their tuple.

    It takes tensors of this problem's shapes on its device. A rung that splits the keys allocates what its splits leave
    to be merged at each call, on the current stream.
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

    def launch(q, k, v, o, lse, softmax_scale, *sequences):
        workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
        compiled(q, k, v, o, lse, softmax_scale, workspace, num_splits, *sequences)

    return launch
