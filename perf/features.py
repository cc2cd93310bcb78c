"""What cute_fa can do beside its peers: one record a feature, with the tests that stand behind our entry."""

from __future__ import annotations

from dataclasses import dataclass

PEERS = ("SDPA", "cuDNN", "flash-attn", "FlexAttention")
# What the peers' entries were taken from; "-" is what these don't say.
SOURCES = (
    "docs.pytorch.org/docs/2.13: torch.nn.functional.scaled_dot_product_attention, nn.attention.bias, "
    "nn.attention.flex_attention",
    "docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html (cuDNN 9.18)",
    "github.com/Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py of 2.8",
    "github.com/huggingface/transformers: modeling_utils.py of 5.24",
)


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Args:
        name: the feature.
        ours: "yes", "refused", or in a few words how far.
        tests: of ours, "file::function" below tests/cute_fa; of what is refused, that it is.
        peers: what each of ``PEERS`` has, in that order.
    """

    name: str
    ours: str
    tests: tuple[str, ...]
    peers: tuple[str, str, str, str]


_MATRIX = "compat/test_flash_attn_func.py::test_combinations_are_right"
_REFUSED = "compat/test_flash_attn_func.py::test_misuse_is_refused_by_name"
_SDPA = "compat/test_scaled_dot_product_attention.py"
_VARLEN = "compat/test_flash_attn_varlen_func.py"
_KVCACHE = "compat/test_flash_attn_with_kvcache.py"
_SCORES = "test_score_options.py::test_matches_float64"
_ALIBI = "compat/test_flash_attn_func.py::test_alibi"
_GPU = "test_citizenship_gpu.py"
_TRANSFORMERS = "compat/test_transformers.py"

FEATURES: tuple[Feature, ...] = (
    Feature("fp16, bf16", "yes", (_MATRIX, "test_forward_gpu.py::test_matches_reference"), ("yes",) * 4),
    Feature(
        "fp8 (e4m3), a factor for each head",
        "widened to bf16",
        ("test_fp8.py::test_matches_float64", "test_fp8.py::test_packed_sequences"),
        ("-", "yes", "no", "yes"),
    ),
    Feature(
        "head dimension",
        "8 to 256 by 8",
        ("emulator/test_head_dims.py::test_every_head_dim",),
        ("any", "to 256", "to 256", "-"),
    ),
    Feature("grouped heads", "yes", (_MATRIX, f"{_SDPA}::test_like_pytorch"), ("yes",) * 4),
    Feature(
        "causal, last query at last key",
        "yes",
        (_MATRIX, f"{_SDPA}::test_causal_biases"),
        ("causal_lower_right", "yes", "yes", "mask_mod"),
    ),
    Feature(
        "causal, first query at first key",
        "in its SDPA",
        (f"{_SDPA}::test_like_pytorch",),
        ("yes", "yes", "no", "mask_mod"),
    ),
    Feature("sliding window", "yes", (_MATRIX, _SCORES), ("attn_mask", "yes", "yes", "mask_mod")),
    Feature("softcap", "yes", (_MATRIX, _SCORES), ("no", "-", "yes", "score_mod")),
    Feature("ALiBi", "yes", (_ALIBI, _SCORES), ("attn_mask", "yes", "yes", "score_mod")),
    Feature("attention sinks", "yes", (_SCORES, f"{_TRANSFORMERS}::test_sinks_and_windows_of_gpt_oss"), ("-",) * 4),
    Feature(
        "bias or mask as a tensor",
        "yes",
        (f"{_SDPA}::test_masks", "test_score_options.py::test_bias_of_any_strides"),
        ("yes", "yes", "no", "score_mod"),
    ),
    Feature("log-sum-exp", "yes", (_MATRIX,), ("no", "yes", "yes", "yes")),
    Feature(
        "packed sequences of any lengths",
        "yes",
        (
            f"{_VARLEN}::test_each_sequence_is_right",
            f"{_VARLEN}::test_sequences_do_not_see_one_another",
            f"{_VARLEN}::test_one_launch_for_all_sequences",
        ),
        ("nested tensors", "yes", "yes", "mask_mod"),
    ),
    Feature(
        "KV cache, appended in place, rotary",
        "yes",
        (
            f"{_KVCACHE}::test_appends_and_attends",
            f"{_KVCACHE}::test_rotary",
            f"{_KVCACHE}::test_one_launch_whatever_the_lengths",
        ),
        ("no", "-", "yes", "no"),
    ),
    Feature(
        "paged KV cache",
        "yes",
        (f"{_KVCACHE}::test_pages_of_any_size_in_any_order", f"{_VARLEN}::test_pages_give_the_same"),
        ("no", "yes", "yes", "-"),
    ),
    Feature(
        "into the caller's tensor (out=)",
        "yes",
        ("test_out.py::test_writes_into_the_callers_tensor",),
        ("no", "yes", "no", "no"),
    ),
    Feature(
        "gradients",
        "through PyTorch",
        (
            "test_backward.py::test_gradients_are_those_of_float64",
            "test_backward.py::test_gradients_with_options_are_those_of_float64",
            f"{_GPU}::test_inductor_goes_back_through_sdpa",
        ),
        ("yes",) * 4,
    ),
    Feature("dropout", "refused", (_REFUSED,), ("yes", "yes", "yes", "no")),
    Feature(
        "torch.compile without breaks, export",
        "yes",
        (
            "test_operator.py::test_compiles_without_breaks_for_any_lengths",
            "test_operator.py::test_exports_with_dynamic_lengths",
            f"{_GPU}::test_inductor_compiles_without_breaks",
        ),
        ("yes", "-", "yes", "yes"),
    ),
    Feature(
        "CUDA graphs",
        "yes",
        (f"{_GPU}::test_a_cuda_graph_replays_without_memory_of_its_own", f"{_GPU}::test_inductor_with_cuda_graphs"),
        ("-",) * 4,
    ),
    Feature(
        "an attention of transformers",
        "yes",
        (
            f"{_TRANSFORMERS}::test_prefill",
            f"{_TRANSFORMERS}::test_generation_with_a_cache",
            f"{_TRANSFORMERS}::test_padding_in_a_batch",
        ),
        ("yes", "no", "yes", "yes"),
    ),
    Feature(
        "the GPU's kernel on a CPU, with its races found",
        "yes",
        (
            "test_forward_cpu.py::test_matches_reference_and_emulator",
            "emulator/test_planted_faults.py::test_missing_barrier",
        ),
        ("no",) * 4,
    ),
)
