"""How a kernel that may have score options and sequences is called, with and without them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_fa.device.scores import ScoreArguments


class Entries:
    """The two entries of a kernel whose ``launch`` takes the options' values and the sequences, or None, too.

    Two, since a compiled function takes as many arguments as its entry has, the defaults among them.
    """

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
    ):
        """Launches the kernel: Q, O (B, S_q, H, D or D_v); K, V (B, S_k, H_kv, D or D_v); LSE (B, H, S_q) or None."""
        self.launch(mQ, mK, mV, mO, mLSE, softmax_scale, None, None, stream)

    @cute.jit
    def with_extras(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: cutlass.Float32,
        arguments: ScoreArguments | None,
        sequences: tuple | None,
        stream,
    ):
        """The same with what a kernel is built with besides.

        arguments: the values of its score options.
        sequences: the fields of ``SequenceTensors``. Packed queries are a batch of 1 here, as are packed keys; pages
            take the place of K's and V's batch, in kernels that have them.
        """
        self.launch(mQ, mK, mV, mO, mLSE, softmax_scale, arguments, sequences, stream)
