"""Attention forward in the CUTLASS CuTe DSL: a ladder of kernels and a laboratory for their layouts."""

from cute_fa.api import forward
from cute_fa.compat.dense import flash_attn_func
from cute_fa.compat.kvcache import flash_attn_with_kvcache
from cute_fa.compat.sdpa import scaled_dot_product_attention
from cute_fa.compat.transformers import register
from cute_fa.compat.varlen import flash_attn_varlen_func
from cute_fa.problem import ScoreOptions
from cute_fa.warming import warmup

__all__ = [
    "ScoreOptions",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "forward",
    "register",
    "scaled_dot_product_attention",
    "warmup",
]
