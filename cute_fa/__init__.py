"""Attention forward in the CUTLASS CuTe DSL: a ladder of kernels and a laboratory for their layouts."""

from cute_fa.api import forward

__all__ = ["forward"]
