"""Attention forward in the CUTLASS CuTe DSL: a ladder of kernels and a laboratory for their layouts."""

from cute_fa.api import forward
from cute_fa.problem import ScoreOptions
from cute_fa.warming import warmup

__all__ = ["ScoreOptions", "forward", "warmup"]
