"""AttentionProblem: what is to be computed. The only place that checks tensors, and every error's text."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

DTYPES = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
INPUT_DTYPES = (*DTYPES, FP8)
HEAD_DIMS = range(8, 257, 8)
VECTOR_BYTES = 16
VECTOR = VECTOR_BYTES // 2  # elements of 16 bits
MAX_SEQLEN = 2**30  # positions and their sums stay within int32 in the kernels
MAX_ROW_STRIDE = 2**24  # elements from one position to the next: 128 rows of a tile stay within int32
MAX_CTAS = 2**31 - 1  # x extent of a grid


def padded_head_dim(head_dim: int) -> int:
    """Columns of the tiles in shared memory: what the atoms of 64 columns of the layouts fill."""
    return -(-head_dim // 64) * 64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels compute in and o has: fp8 is widened to bf16, which holds each of its values."""
    return torch.bfloat16 if dtype == FP8 else dtype


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of ``INPUT_DTYPES`` as kernels take it."""
    if tensor.dtype != FP8:
        return tensor
    return tensor.to(torch.bfloat16, memory_format=torch.contiguous_format)


# Where tensors lie, as not every kernel takes it: a kernel's class names what it takes as its ``geometry``.
GEOMETRY = {
    "head_dim_v": "a head dimension of v other than that of q and k",
    "packed": "packed sequences (cu_seqlens_q, cu_seqlens_k)",
    "caches": "keys in a cache (seqused_k, cache_batch_idx, leftpad_k)",
    "pages": "keys in pages (block_table)",
}
# The int32 tensors that say where sequences lie, in the order in which kernels take them.
SEQUENCE_TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "cache_batch_idx", "leftpad_k")


MIN_SOFTCAP, MAX_SOFTCAP = 2.0**-10, 2.0**10  # beyond, fp32 loses too much of softcap tanh(s / softcap)
HIDING_BIAS = -(2.0**125)  # below, a bias hides its key as -inf does
# The arguments that change scores, by which a kernel says what it has; "descales" are those of fp8 inputs.
SCORE_OPTIONS = frozenset(("window_size", "softcap", "alibi_slopes", "sinks", "attn_bias", "descales"))


@dataclass(frozen=True)
class ScoreFeatures:
    """Which score options a kernel is compiled with; ``ScoreOptions`` says what they mean.

    Args:
        window_left, window_right: whether the window hides a key on that side; right not beside a causal mask.
        softcap, alibi, sinks: whether there is one.
        bias: the dtype of ``attn_bias``; None without one.
        descales: whether a head's scores and output have factors of their own.
    """

    window_left: bool = False
    window_right: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    bias: torch.dtype | None = None
    descales: bool = False

    @property
    def is_mask(self) -> bool:
        """Whether the bias is a boolean mask."""
        return self.bias == torch.bool

    @property
    def scales(self) -> bool:
        """Whether scores are scaled before the softmax, since something follows their scale, or heads differ."""
        return self.softcap or self.alibi or self.descales or (self.bias is not None and not self.is_mask)

    @property
    def options(self) -> frozenset[str]:
        """The arguments that are in use, of ``SCORE_OPTIONS``."""
        used = {
            "window_size": self.window_left or self.window_right,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi,
            "sinks": self.sinks,
            "attn_bias": self.bias is not None,
            "descales": self.descales,
        }
        return frozenset(name for name, is_used in used.items() if is_used)


NO_FEATURES = ScoreFeatures()


@dataclass(frozen=True)
class StaticProblem:
    """The part of a problem that a kernel is compiled for; all else is a run-time value.

    ``head_dim_v`` is that of v and o; ``head_dim`` when None is given. ``sequences`` are those of ``SEQUENCE_TENSORS``
    that are given.
    """

    dtype: torch.dtype
    head_dim: int
    causal: bool
    return_lse: bool
    features: ScoreFeatures = NO_FEATURES
    head_dim_v: int | None = None
    sequences: tuple[str, ...] = ()

    def __post_init__(self):
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    @property
    def widest_head_dim(self) -> int:
        return max(self.head_dim, self.head_dim_v)

    @property
    def is_plain(self) -> bool:
        """Whether there is no score option, and no member of a length of its own."""
        return not self.features.options and not self.sequences

    @property
    def geometry(self) -> tuple[str, ...]:
        """What it asks of a kernel besides a batch of equal lengths and head dimensions: keys of ``GEOMETRY``."""
        packed = {"cu_seqlens_q", "cu_seqlens_k"}
        asked = {
            "head_dim_v": self.head_dim_v != self.head_dim,
            "packed": bool(packed & set(self.sequences)),
            "caches": bool(set(self.sequences) - packed - {"block_table"}),
            "pages": "block_table" in self.sequences,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """What changes the scores besides their scale and the causal mask; the defaults change nothing.

    Names and meanings are those of flash-attn 2.8 and, of the last two, of transformers and PyTorch. Query i is at
    position p = i + S_k - S_q, so that the last query stands at the last key.

    Args:
        window_size: (left, right): the query sees keys p - left to p + right; -1 is no bound on a side.
        softcap: above 0 (2**-10 to 2**10), softcap tanh(s / softcap) takes the place of every scaled score s.
        alibi_slopes: (H,) or (B, H), fp32: -slope |p - j| is added to the score of key j.
        sinks: (H,), fp32 or q's dtype: a logit of each head that joins the sum under every row's softmax.
        attn_bias: broadcast to (B, H, S_q, S_k), any strides: added to the scores, in fp32 or q's dtype; or bool with
            False where a key is hidden. Values below -2**125 hide a key as -inf does. A tensor whose last dimension
            is broadcast or not contiguous is copied at each call.
        q_descale, k_descale, v_descale: (H_kv,) or (B, H_kv), fp32, of fp8 inputs alone: what the heads of q (those
            that share a head of k), k and v are to be multiplied by. Names and shapes are flash-attn 3's.
    """

    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    attn_bias: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @staticmethod
    def of(
        window_size,
        softcap,
        alibi_slopes=None,
        sinks=None,
        attn_bias=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    ) -> ScoreOptions:
        """The same as the class, but ``NO_OPTIONS`` itself where all are off."""
        if (
            alibi_slopes is None
            and sinks is None
            and attn_bias is None
            and q_descale is None
            and k_descale is None
            and v_descale is None
            and type(softcap) is float
            and softcap == 0.0
            and type(window_size) is tuple
            and window_size == (-1, -1)
        ):
            return NO_OPTIONS
        return ScoreOptions(window_size, softcap, alibi_slopes, sinks, attn_bias, q_descale, k_descale, v_descale)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are given, by their names."""
        named = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks, "attn_bias": self.attn_bias, **self.descales}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def descales(self) -> dict[str, torch.Tensor | None]:
        """The factors of fp8 inputs by their names."""
        return {"q_descale": self.q_descale, "k_descale": self.k_descale, "v_descale": self.v_descale}

    @property
    def key(self) -> tuple:
        """All that a launch depends on but the tensors' values; types too, since 1 == True."""
        tensors = tuple((t.shape, t.stride(), t.dtype, t.device) for t in self.tensors.values())
        sizes, given = self.window_size, tuple(self.tensors)
        return sizes, tuple(map(type, sizes)), self.softcap, type(self.softcap), given, tensors

    @property
    def needs_grad(self) -> bool:
        """Whether autograd would record one of the tensors."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors.values())

    def check(
        self, batch: int, seqlen_q: int, seqlen_k: int, num_heads: int, num_heads_kv: int, like: torch.Tensor
    ) -> None:
        """Checks the options beside q, of ``like``'s dtype and device.

        Raises:
            TypeError, ValueError: naming the argument, what it was and what is allowed.
        """
        _window_sides(self.window_size)
        if isinstance(self.softcap, bool) or not isinstance(self.softcap, float | int | torch.SymFloat | torch.SymInt):
            raise TypeError(f"softcap must be a number, got {_brief(self.softcap)}")
        if not (self.softcap == 0.0 or MIN_SOFTCAP <= self.softcap <= MAX_SOFTCAP):
            raise ValueError(f"softcap must be 0 (off), or from 2**-10 to 2**10, got {self.softcap}")
        slopes, sinks = self.alibi_slopes, self.sinks
        if slopes is not None:
            _check_option("alibi_slopes", slopes, (torch.float32,), like)
            if tuple(slopes.shape) not in ((num_heads,), (batch, num_heads)):
                raise ValueError(
                    f"alibi_slopes must have the shape (H,) or (B, H), here ({num_heads},) or {(batch, num_heads)}, "
                    f"got {_shape(slopes)}"
                )
        if sinks is not None:
            _check_option("sinks", sinks, (torch.float32, compute_dtype(like.dtype)), like)
            if tuple(sinks.shape) != (num_heads,):
                raise ValueError(f"sinks must have the shape (H,), here ({num_heads},), got {_shape(sinks)}")
        if self.attn_bias is not None:
            check_bias("attn_bias", self.attn_bias, (batch, num_heads, seqlen_q, seqlen_k), like)
        for name, descale in self.descales.items():
            if descale is None:
                continue
            if like.dtype != FP8:
                raise ValueError(f"{name} must be None for q of {like.dtype}, got {_brief(descale)}: it is for {FP8}")
            _check_option(name, descale, (torch.float32,), like)
            if tuple(descale.shape) not in ((num_heads_kv,), (batch, num_heads_kv)):
                raise ValueError(
                    f"{name} must have the shape (H_kv,) or (B, H_kv), here ({num_heads_kv},) or "
                    f"{(batch, num_heads_kv)}, got {_shape(descale)}"
                )

    def check_memory(self) -> None:
        """Checks the values of tensors that passed ``check``: they are there, and nobody wants their gradient."""
        for name, tensor in self.tensors.items():
            _check_values(name, tensor)
            check_no_grad(name, tensor)

    @property
    def features(self) -> ScoreFeatures:
        """What a kernel needs for them; of the window, whether a side has a bound, hidden keys or not."""
        left, right = self.window_size
        bias = None if self.attn_bias is None else self.attn_bias.dtype
        return ScoreFeatures(
            left != -1, right != -1, self.softcap != 0.0, self.alibi_slopes is not None, self.sinks is not None, bias,
            any(descale is not None for descale in self.descales.values()),
        )  # fmt: skip


NO_OPTIONS = ScoreOptions()


@dataclass(frozen=True)
class AttentionProblem:
    """Attention of q (B, S_q, H, D) over k (B, S_k, H_kv, D) and v (B, S_k, H_kv, D_v)."""

    # No field has an object for a default: torch.compile of PyTorch 2.11 can't trace one.
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    return_lse: bool
    window_size: tuple[int, int]
    features: ScoreFeatures
    sequences: tuple[str, ...] = ()

    @property
    def static(self) -> StaticProblem:
        """What to compile for: a window that hides no key, or no more than the causal mask, is none."""
        left, right = self.window_size
        features = replace(
            self.features,
            window_left=left != -1 and left < self.seqlen_k - 1,
            window_right=right != -1 and not self.causal and right < self.seqlen_q - 1,
        )
        return StaticProblem(
            self.dtype, self.head_dim, self.causal, self.return_lse, features, self.head_dim_v, self.sequences
        )

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_q, self.num_heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.num_heads, self.seqlen_q

    @staticmethod
    def from_tensors(
        q, k, v, *, causal: bool = False, return_lse: bool = False, options: ScoreOptions = NO_OPTIONS
    ) -> AttentionProblem:
        """Checks the tensors and describes the problem.

        Raises:
            TypeError: an argument is not a tensor or a bool, or has an unsupported or different dtype.
            ValueError: shapes, strides, devices, alignment or gradients that attention can't take.
            NotImplementedError: tensors inside a transform of torch.func.
        """
        problem = AttentionProblem.from_shapes(q, k, v, causal=causal, return_lse=return_lse, options=options)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _check_memory(name, tensor)
            check_no_grad(name, tensor)
        options.check_memory()
        problem._check_limits()
        return problem

    @staticmethod
    def from_shapes(
        q, k, v, *, causal: bool = False, return_lse: bool = False, options: ScoreOptions = NO_OPTIONS
    ) -> AttentionProblem:
        """``from_tensors`` for tensors that hold no data yet, whose extents may be symbols: no pointer, gradient or
        largest extent is looked at."""
        tensors = {"q": q, "k": k, "v": v}
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        if not isinstance(options, ScoreOptions):
            raise TypeError(f"options must be a cute_fa.ScoreOptions, got {type(options).__name__}")
        for name, flag in {"causal": causal, "return_lse": return_lse}.items():
            require_bool(name, flag)
        for name in ("k", "v"):
            if tensors[name].dtype != q.dtype:
                raise TypeError(f"{name} must have the dtype of q ({q.dtype}), got {tensors[name].dtype}")
            if tensors[name].device != q.device:
                raise ValueError(
                    f"{name} must be on the device of q ({q.device}), got a tensor on {tensors[name].device}"
                )

        batch, seqlen_q, num_heads, head_dim = q.shape
        _, seqlen_k, num_heads_kv, _ = k.shape
        for name, tensor in (("q", q), ("v", v)):
            if tensor.shape[3] % 8 or not 8 <= tensor.shape[3] <= 256:  # HEAD_DIMS, for symbols too
                raise ValueError(
                    f"{name} must have a head dimension (its last) that is a multiple of 8 from 8 to 256, got "
                    f"{tensor.shape[3]}"
                )
        if k.shape[0] != batch:
            raise ValueError(f"k must have the batch size of q ({batch}), got {k.shape[0]} (shape {_shape(k)})")
        if k.shape[3] != head_dim:
            raise ValueError(f"k must have the head dimension of q ({head_dim}), got {k.shape[3]}")
        if v.shape[:3] != k.shape[:3]:
            raise ValueError(f"v must have the shape of k {_shape(k)}, but for its last dimension, got {_shape(v)}")
        if num_heads == 0 or num_heads_kv == 0:
            raise ValueError(f"q, k and v must have at least one head, got {num_heads} (q) and {num_heads_kv} (k, v)")
        if num_heads % num_heads_kv:
            raise ValueError(
                f"q must have a number of heads that is a multiple of k's and v's ({num_heads_kv}), got {num_heads}"
            )
        options.check(batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, q)
        return AttentionProblem(
            batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, v.shape[3], compute_dtype(q.dtype), q.device,
            causal or options.window_size[1] == 0, return_lse, tuple(options.window_size), options.features,
        )  # fmt: skip

    def _check_limits(self) -> None:
        """Extents beyond which positions or offsets leave int32 in a kernel."""
        row = self.num_heads * self.static.widest_head_dim
        if row > MAX_ROW_STRIDE:
            raise ValueError(f"q must have at most 2**24 elements a position (heads times head dimension), got {row}")
        for name, seqlen in (("q", self.seqlen_q), ("k", self.seqlen_k)):
            if seqlen > MAX_SEQLEN:
                raise ValueError(f"{name} must have a sequence length of at most 2**30, got {seqlen}")
        rows = self.batch * self.num_heads * self.seqlen_q
        if rows > MAX_CTAS:
            raise ValueError(f"q must have at most 2**31 - 1 rows over batch, sequence and heads, got {rows}")

    def softmax_scale(self, scale) -> float:
        """The scale of the scores: the caller's, or 1 / sqrt(D) for None.

        Raises:
            TypeError: not a number.
            ValueError: outside of 2**-126 to 2**64. The running maximum is taken over unscaled scores, whose
                order a scale of 0 or less would not keep, and the kernels scale in float32.
        """
        if scale is None:
            return 1.0 / math.sqrt(self.head_dim)
        if not isinstance(scale, float) and (isinstance(scale, bool) or not isinstance(scale, numbers.Real)):
            raise TypeError(f"softmax_scale must be a float or None, got {type(scale).__name__}")
        if not 2.0**-126 <= scale <= 2.0**64:
            raise ValueError(f"softmax_scale must be greater than 0, from 2**-126 to 2**64, got {scale}")
        return float(scale)


def _check_tensor(name: str, tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
    if tensor.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name} must be {_either(INPUT_DTYPES)}, got {tensor.dtype}")
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} must have 4 dimensions (batch, sequence, heads, head_dim), got {tensor.dim()}: "
            f"shape {_shape(tensor)}"
        )
    if tensor.stride(3) != 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension (stride 1), got strides {tuple(tensor.stride())}; "
            f"call .contiguous() on it"
        )


def _check_values(name: str, tensor: torch.Tensor) -> None:
    """Raises unless the tensor's own values lie in memory."""
    if is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{name} must not be inside torch.vmap or another transform of torch.func, got a tensor that is: fold the "
            f"mapped dimension into the batch"
        )
    if tensor.is_neg():
        raise TypeError(f"{name} must not be lazily negated, got such a view; call .resolve_neg() on it")


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """The same, from a 16-byte boundary on."""
    _check_values(name, tensor)
    if tensor.dtype != FP8 and tensor.data_ptr() % VECTOR_BYTES:  # fp8 is copied before a kernel reads it
        raise ValueError(
            f"{name} must start at an address that is a multiple of {VECTOR_BYTES} bytes, got one that is off by "
            f"{tensor.data_ptr() % VECTOR_BYTES}: a view into another tensor? Call .clone() on it"
        )


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError if autograd would record this tensor and nobody said how to go back."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require gradients, got requires_grad=True: cute_fa has a forward only, no backward of "
            f"its own. Call it under torch.no_grad(), pass {name}.detach(), or ask cute_fa.forward for "
            f'backward="sdpa", which recomputes through PyTorch'
        )


def check_out(out, q: torch.Tensor, v: torch.Tensor) -> None:
    """Checks what the caller wants o (B, S_q, H, D_v) in, against a q and v that were checked.

    Raises:
        TypeError: not a dense tensor, or not of q's dtype.
        ValueError: another shape or device, or gradients.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor or None, got {type(out).__name__}")
    if out.layout != torch.strided:
        raise TypeError(f"out must be a dense (strided) tensor, got layout {out.layout}")
    if out.dtype != compute_dtype(q.dtype):
        raise TypeError(f"out must have the dtype of o ({compute_dtype(q.dtype)}), got {out.dtype}")
    wanted = (*q.shape[:3], v.shape[3])
    if out.shape != wanted:
        raise ValueError(f"out must have the shape of q and the head dimension of v, {wanted}, got {_shape(out)}")
    if out.device != q.device:
        raise ValueError(f"out must be on the device of q ({q.device}), got a tensor on {out.device}")
    if out.requires_grad:
        raise ValueError(
            "out must not require gradients, got requires_grad=True: what is written into it has no backward"
        )


def check_out_memory(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks where the elements of an ``out`` lie that passed ``check_out``.

    Raises:
        TypeError: a lazily negated view.
        NotImplementedError: inside a transform of torch.func.
        ValueError: strides or an address that a kernel can't write, or memory that is shared with an input. Memory
            is taken from the first to the last element: views of one tensor that interleave count as shared.
    """
    _check_memory("out", out)
    strides = out.stride()
    if strides[3] != 1:
        raise ValueError(f"out must have a contiguous last dimension (stride 1), got strides {strides}")
    if any(extent > 1 and stride % VECTOR for extent, stride in zip(out.shape, strides[:3], strict=False)):
        raise ValueError(f"out must have strides that are multiples of {VECTOR} elements, got {strides}")
    if out.shape[1] > 1 and strides[1] > MAX_ROW_STRIDE:
        raise ValueError(f"out must have at most 2**24 elements between positions, got strides {strides}")
    if _overlaps_itself(out):
        raise ValueError(f"out must have a place for each element, got shape {_shape(out)} with strides {strides}")
    first, end = out.data_ptr(), out.data_ptr() + memory_bytes(out)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        other_first, other_end = tensor.data_ptr(), tensor.data_ptr() + memory_bytes(tensor)
        if first < other_end and other_first < end:
            raise ValueError(
                f"out must not share memory with {name}, which is read while out is written; their addresses "
                f"{first:#x} to {end:#x} and {other_first:#x} to {other_end:#x} overlap"
            )


def check_bias(name: str, bias, full: tuple[int, int, int, int], like: torch.Tensor) -> None:
    """Checks a bias or mask that is to broadcast to (B, H, S_q, S_k), beside q of ``like``'s dtype and device.

    Raises:
        TypeError, ValueError: by the name that its caller knows it by.
    """
    _check_option(name, bias, (torch.bool, torch.float32, compute_dtype(like.dtype)), like)
    if bias.dim() > 4 or any(
        have != 1 and have != want for have, want in zip(bias.shape, full[4 - bias.dim() :], strict=True)
    ):
        raise ValueError(f"{name} must broadcast to (B, H, S_q, S_k), here {full}, got {_shape(bias)}")


def _check_option(name: str, tensor, dtypes: tuple[torch.dtype, ...], like: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {_either(dtypes)}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of q ({like.device}), got a tensor on {tensor.device}")


def _window_sides(window_size) -> tuple[int, int]:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {_brief(window_size)}")
    left, right = window_size
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, int | torch.SymInt):
            raise TypeError(f"window_size must hold integers, got {window_size}")
        if side < -1:
            raise ValueError(f"window_size must hold lengths of 0 or more, or -1 for no bound, got {window_size}")
    return left, right


def require_bool(name: str, value) -> None:
    """Raises TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def require_int(name: str, value) -> None:
    """Raises TypeError unless it is an integer, or a symbol of one, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")


def require_tensor(
    name: str,
    value,
    *,
    dims: tuple[str, ...] | None = None,
    like: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int | None, ...] | None = None,
) -> None:
    """Checks a tensor in what is given.

    Args:
        dims: a name for each of its dimensions.
        like: a tensor on the device that is wanted.
        shape: the extent of every dimension; None is any.

    Raises:
        TypeError, ValueError: naming ``name``, what it was and what is allowed.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if dims is not None and value.dim() != len(dims):
        raise ValueError(
            f"{name} must have {len(dims)} dimensions ({', '.join(dims)}), got {value.dim()}: shape {_shape(value)}"
        )
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on the device of q ({like.device}), got a tensor on {value.device}")
    if shape is not None and (
        value.dim() != len(shape)
        or any(wanted is not None and wanted != extent for extent, wanted in zip(value.shape, shape, strict=True))
    ):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} must have the shape ({wanted}), got {_shape(value)}")


def memory_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last; 0 for a tensor without elements."""
    if not tensor.numel():
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether dimensions in the order of their strides reach into one another."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += (extent - 1) * stride
    return False


def _brief(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {_shape(value)}"
    return repr(value)


def _either(options) -> str:
    *rest, last = (str(option) for option in options)
    return f"{', '.join(rest)} or {last}" if rest else last


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))
