"""How a kernel that may have score options is called, with and without them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_fa.device.scores import ScoreArguments


class Entries:
    """The two entries of a kernel whose ``launch`` takes the options' values, or None, before the stream."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: cutlass.Float32,
        stream,
        sequences: tuple | None = None,
    ):
        """Launches the kernel: Q, O (B, S_q, H, D or D_v); K, V (B, S_k, H_kv, D or D_v); LSE (B, H, S_q) or None.

        sequences: the fields of ``SequenceTensors``. Packed queries are a batch of 1 here, as are packed keys; pages
        take the place of K's and V's batch, in kernels that have them.
        """
        self.launch(mQ, mK, mV, mO, mLSE, softmax_scale, None, stream, sequences)

    @cute.jit
    def with_options(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: cutlass.Float32,
        arguments: ScoreArguments,
        stream,
        sequences: tuple | None = None,
    ):
        """The same with the values of the score options that it is built with."""
        self.launch(mQ, mK, mV, mO, mLSE, softmax_scale, arguments, stream, sequences)
