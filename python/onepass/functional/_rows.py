"""Functions of a row: norms, activations, gates, dropout, softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .._arguments.shapes import check_dense, check_groups, check_tensor, given, normalized_shape_of
from .._arguments.symbolic import traceable
from ..call import fused
from . import _lines


@traceable
def bias_act(x: Tensor, bias: Tensor, activation: str | None = "gelu") -> Tensor:
    """activation(x + bias), the end of a linear layer.

    Args:
        x: (..., N).
        bias: (N,).
        activation: a word such as "gelu", "gelu_tanh", "relu", "silu", "leaky_relu(0.2)"; None adds the bias only.

    Returns:
        (..., N), x's dtype.

    Backward reads x and bias again; the gradient of bias is a sum over rows, in float64 at last.
    Line: `bias | <activation>`.
    """
    return fused(_lines.bias_act(activation), x, bias)


@traceable
def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias), with gelu(v) = v Φ(v) (Hendrycks and Gimpel, arXiv:1606.08415).

    Args:
        x: (..., N).
        bias: (N,).
        approximate: "none" is exact, "tanh" the paper's approximation, as in `torch.nn.functional.gelu`.

    Returns:
        (..., N), x's dtype.

    Line: `bias | gelu` or `bias | gelu_tanh`.
    """
    return fused(_lines.bias_act(_lines.gelu_word("bias_gelu", approximate)), x, bias)


@traceable
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    """activation((x - mean) / √(var + eps) · weight + bias), mean and variance over `normalized_shape`.

    Layer normalisation (Ba, Kiros and Hinton, arXiv:1607.06450) with `torch.nn.functional.layer_norm`'s arguments, and
    an activation that costs no further pass. The variance is the mean of squared deviations, never E[x²] - mean².

    Args:
        x: (*, *normalized_shape).
        normalized_shape: the trailing dimensions to normalise over, one or several.
        weight, bias: of shape normalized_shape; either may be None.
        eps: added to the variance.
        activation: applied to the normalised and scaled value.

    Returns:
        x's shape and dtype.

    Saved for backward: x, weight, bias and two numbers a row (three where x has 32 or 64 bits).
    Line: `layer_norm(eps) | scale | bias | <activation>`.
    """
    shape = normalized_shape_of("layer_norm", x, normalized_shape, weight, bias)
    line = _lines.norm("layer_norm", eps, weight is not None, bias is not None, activation)
    if len(shape) == 1:
        return fused(line, x, *given(weight, bias))
    columns = (c.flatten() for c in given(weight, bias))
    return fused(line, x.flatten(-len(shape)), *columns).view(x.shape)


@traceable
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """activation(x / √(mean(x²) + eps) · weight), the mean over `normalized_shape`.

    Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467) with the arguments of
    `torch.nn.functional.rms_norm`.

    Args:
        x: (*, *normalized_shape).
        normalized_shape: the trailing dimensions to normalise over, one or several.
        weight: of shape normalized_shape, or None.
        eps: added to the mean square. None is what `torch.rms_norm` takes: the machine epsilon of the arithmetic, which
            is float32's for bfloat16 and float16 too.
        activation: applied to the normalised and scaled value.

    Returns:
        x's shape and dtype.

    Saved for backward: x, weight and one number a row. Line: `rms_norm(eps) | scale | <activation>`.
    """
    shape = normalized_shape_of("rms_norm", x, normalized_shape, weight, None)
    line = _lines.norm("rms_norm", eps, weight is not None, False, activation)
    if len(shape) == 1:
        return fused(line, x, *given(weight))
    return fused(line, x.flatten(-len(shape)), *(c.flatten() for c in given(weight))).view(x.shape)


@traceable
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    """activation((x - mean) / √(var + eps) · weight + bias), mean and variance over each group of channels.

    Group normalisation (Wu and He, arXiv:1803.08494) with `torch.nn.functional.group_norm`'s arguments, and an
    activation that costs no further pass: "silu" is what U-Nets and autoencoders of diffusion models put behind it.

    Args:
        x: (N, C, *), C a multiple of num_groups. Channels-last, or otherwise not dense in this order, it is copied.
        num_groups: how many groups of C / num_groups neighbouring channels there are.
        weight, bias: (C,), a number for each channel; either may be None.
        eps: added to the variance.
        activation: applied to the normalised and scaled value.

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        RuntimeError, ValueError: where `torch.nn.functional.group_norm` does: x of fewer than two dimensions, C no
            multiple of num_groups, weight or bias of another shape, groups of one number.

    Saved for backward: x, weight, bias and two numbers a group (three where x has 32 or 64 bits).
    Line: `layer_norm(eps) | scale(channels) | bias(channels) | <activation>`, of rows (N, groups, C / groups · *).
    """
    check_groups("group_norm", x, num_groups, weight, bias)
    batch, channels, *sizes = x.shape
    of_group = channels // num_groups
    rows = x.reshape(batch, num_groups, of_group * math.prod(sizes))
    line = _lines.group_norm(eps, weight is not None, bias is not None, activation)
    columns = (c.reshape(num_groups, of_group) for c in given(weight, bias))
    return fused(line, rows, *columns).view(x.shape)


@traceable
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    input_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """h = residual + dropout(x + input_bias), y = activation(layer_norm(h) · weight + bias); both are returned.

    The step between two blocks of a transformer: y feeds the next block, h is its residual stream.

    Args:
        x: (*, *normalized_shape), what the block computed.
        residual: broadcastable to x's shape.
        normalized_shape, weight, bias, eps, activation: as in `layer_norm`.
        input_bias: (N,), N the size of the last dimension: the bias of the linear layer that made x. None adds nothing.
        dropout_p: the probability that an element of x + input_bias is zeroed while training.
        training: False makes dropout the identity.

    Returns:
        (y, h), both of x's shape and dtype. y is computed from h as it is stored, rounded to x's dtype.

    Saved for backward: h (which the caller holds anyway), weight, bias, two numbers a row, and the state of the random
    generator where dropout acts.
    Line: `bias | dropout(p) | add | keep | layer_norm(eps) | scale | bias | <activation>`.
    """
    check_tensor("add_layer_norm", "residual", residual)
    shape = normalized_shape_of("add_layer_norm", x, normalized_shape, weight, bias)
    line = _lines.add_norm(
        "layer_norm",
        eps,
        weight is not None,
        bias is not None,
        activation,
        input_bias is not None,
        dropout_p,
        training,
    )
    if len(shape) == 1:
        return fused(line, x, *given(input_bias, residual, weight, bias), training=training)
    return _add_norm_over(shape, line, x, residual, weight, bias, input_bias, training)


@traceable
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    input_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """h = residual + dropout(x + input_bias), y = activation(rms_norm(h) · weight); both are returned.

    Args:
        x: (*, *normalized_shape), what the block computed.
        residual: broadcastable to x's shape.
        normalized_shape, weight, eps, activation: as in `rms_norm`.
        input_bias, dropout_p, training: as in `add_layer_norm`.

    Returns:
        (y, h), both of x's shape and dtype. y is computed from h as it is stored, rounded to x's dtype.

    Saved for backward: h, weight, one number a row, and the state of the random generator where dropout acts.
    Line: `bias | dropout(p) | add | keep | rms_norm(eps) | scale | <activation>`.
    """
    check_tensor("add_rms_norm", "residual", residual)
    shape = normalized_shape_of("add_rms_norm", x, normalized_shape, weight, None)
    line = _lines.add_norm(
        "rms_norm", eps, weight is not None, False, activation, input_bias is not None, dropout_p, training
    )
    if len(shape) == 1:
        return fused(line, x, *given(input_bias, residual, weight), training=training)
    return _add_norm_over(shape, line, x, residual, weight, None, input_bias, training)


@traceable
def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """residual + dropout(activation(x + bias)).

    Dropout (Srivastava et al., JMLR 15, 2014) keeps an element with probability 1 - p and divides it by that. p is
    rounded to a multiple of 2^-16 and the division is by the rounded probability, so the mean is exact. A dropped
    element is zero even where x is infinite or NaN.

    Args:
        x: (..., N).
        residual: broadcastable to x's shape.
        p: the probability of zeroing an element.
        training: False makes dropout the identity.
        bias: (N,), or None.
        activation: applied before dropout.

    Returns:
        x's shape and dtype.

    Saved for backward: x and bias where the activation needs them, and the generator's state; the mask is drawn again.
    Line: `bias | <activation> | dropout(p) | add`.
    """
    check_tensor("dropout_add", "residual", residual)
    return fused(
        _lines.dropout_add(bias is not None, activation, p, training), x, *given(bias, residual), training=training
    )


@traceable
def gated(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    """activation(gate) · up: the gated linear units of Shazeer, arXiv:2002.05202, after their two projections.

    Args:
        gate: (..., N), or with `up=None` one packed tensor (..., 2N), the gate half first.
        up: broadcastable to gate's shape, or None.
        activation: the word applied to gate.

    Returns:
        (..., N), gate's dtype.

    Saved for backward: gate and up. Line: `gate(<activation>)`.
    """
    return _gated("gated", gate, up, activation)


@traceable
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) · up, with silu(v) = v · sigmoid(v) (arXiv:2002.05202).

    gate, up, packed or not, and the result as in `gated`. Line: `gate(silu)`.
    """
    return _gated("swiglu", gate, up, "silu")


@traceable
def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(gate) · up (arXiv:2002.05202).

    gate, up, packed or not, and the result as in `gated`; approximate as in `torch.nn.functional.gelu`: "none" is
    exact, "tanh" the approximation. Line: `gate(gelu)` or `gate(gelu_tanh)`.
    """
    return _gated("geglu", gate, up, _lines.gelu_word("geglu", approximate))


@traceable
def reglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """max(gate, 0) · up (arXiv:2002.05202).

    gate, up, packed or not, and the result as in `gated`. Line: `gate(relu)`.
    """
    return _gated("reglu", gate, up, "relu")


@traceable
def rope(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None = None, *, interleaved: bool = False) -> Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864): x · cos + (-x₂, x₁) · sin, of a row's halves x₁, x₂.

    Args:
        x: (..., N) with N even, queries or keys of shape (B, H, L, N), say. Or a list of such tensors: queries and keys
            in one kernel.
        cos: x's shape, or what broadcasts to it: (B, 1, L, N), say. Its rows have rotary_dim numbers, or half as many,
            one for each pair.
        sin: likewise.
        rotary_dim: how many of a row's first numbers are turned, an even number; the others pass. None: all of them.
        interleaved: whether x₁ and x₂ are what is turned at even and at odd places (GPT-J), else its halves (GPT-NeoX).

    Returns:
        x's shape and dtype; a list, where x is one.

    Raises:
        RuntimeError: for an N that is odd or below rotary_dim, and where cos or sin require a gradient, which they do
            not get.
        LineError: (a ValueError) for an odd rotary_dim.

    Saved for backward: cos and sin.
    Line: `rope`, `rope(rotary_dim)`, `rope(interleaved)` or `rope(rotary_dim, interleaved)`.
    """
    return fused(_lines.rope(rotary_dim, interleaved), x, cos, sin)


@traceable
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    unsqueeze_dim: int = 1,
    weight_offset: float = 0.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """rope(rms_norm(q) · q_weight) and rope(rms_norm(k) · k_weight): the heads of queries and keys normalised by their
    root mean square and turned, as Qwen 3 and Gemma 3 do. On CUDA one launch forward and one backward for both.

    Args:
        q: (B, H, L, D), of any strides: a transposed view of a projection's result is read as it lies.
        k: (B, K, L, D) with its own number of heads.
        q_weight, k_weight: (D,), or both None.
        cos, sin: (B, L, D) or (1, L, D), as transformers makes them, or of q's number of dimensions. As of `rope`, rows
            may have rotary_dim numbers or one for each pair.
        eps: added to the mean square.
        unsqueeze_dim: where the heads are: 1 for (B, H, L, D), 2 for (B, L, H, D).
        weight_offset: added to the weights, in float32: 1 for Gemma's.
        rotary_dim, interleaved: as of `rope`.

    Returns:
        q's and k's shape and dtype, contiguous.

    Raises:
        ValueError: where only one of the weights is None.
        RuntimeError: as `rope` does.

    Saved for backward: q, k, the weights, cos, sin and one number a row.
    Line: `rms_norm(eps) | scale | rope`, of a list; `scale(weight_offset)` where that is not 0.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope(): expected both q_weight and k_weight, or neither")
    line = _lines.norm_rope(eps, q_weight is not None, weight_offset, rotary_dim, interleaved)
    tables = [t if t.dim() == q.dim() else t.unsqueeze(unsqueeze_dim) for t in (cos, sin)]
    weights = [] if q_weight is None else [[q_weight, k_weight]]
    turned = fused(line, [q, k], *weights, *tables)
    return turned[0], turned[1]


@traceable
def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """dropout(softmax(x · scale, masked)) over `dim`: attention probabilities from attention scores.

    Args:
        x: any shape of at least one dimension.
        dim: the dimension that sums to one.
        scale: multiplies x before the mask.
        mask: broadcastable to x's shape. bool: True takes part, as in
            `torch.nn.functional.scaled_dot_product_attention`; floating point: added to x · scale, and given a gradient
            where it requires one.
        is_causal: element (i, j) of the last two dimensions takes part where j <= i; dim must be the last, and both
            is_causal and a mask may be given.
        dropout_p: the probability of zeroing a result while training.
        training: False makes dropout the identity.

    Returns:
        x's shape and dtype. A row that is masked throughout is zeros, with zero gradients, where PyTorch gives NaN.
        Where `dim` is not the last, the result is a view whose strides have `dim` innermost.

    Raises:
        IndexError: dim is out of range.
        ValueError: is_causal with another dim than the last, or dropout_p outside [0, 1].

    Saved for backward: the result and a boolean mask; where dropout acts instead x, the mask, two numbers a row and the
    state of the random generator.
    Line: `mul(scale) | mask | causal | softmax | dropout(p)`.
    """
    line = _lines.softmax("softmax", scale, mask is not None, is_causal, dropout_p, training)
    if dim == -1 or dim == x.dim() - 1:
        return fused(line, x, *given(mask), training=training)
    if is_causal:
        raise ValueError(f"softmax(): is_causal masks over the last dimension, but got dim={dim} of {x.dim()}")
    moved = x.movedim(dim, -1)
    masks = (m.expand(x.shape).movedim(dim, -1) for m in given(mask))
    return fused(line, moved, *masks, training=training).movedim(-1, dim)


@traceable
def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x - log(Σ exp(x)) over `dim`, with `torch.nn.functional.log_softmax`'s arguments.

    Args:
        x: any shape of at least one dimension.
        dim: the dimension of which the probabilities are.

    Returns:
        x's shape and dtype. A row that is -inf throughout gives NaN, as PyTorch does. Where `dim` is not the last, the
        result is a view whose strides have `dim` innermost.

    Raises:
        IndexError: dim is out of range.

    Saved for backward: the result. Line: `log_softmax`.
    """
    check_tensor("log_softmax", "x", x)
    return _over(dim, "log_softmax", x)


@traceable
def logsumexp(x: Tensor, dim: int | Sequence[int] = -1, keepdim: bool = False) -> Tensor:
    """log(Σ exp(x)) over `dim`, with `torch.logsumexp`'s arguments.

    Args:
        x: any shape.
        dim: the dimension that is summed over, or several.
        keepdim: whether the result keeps them, with size 1.

    Returns:
        x's shape without `dim`, in float32 (float64 of float64 x): not rounded to 16 bits, as PyTorch's result is.

    Raises:
        IndexError: a dimension is out of range.
        RuntimeError: a dimension stands there twice, or there is none.

    Saved for backward: x, and two numbers a row. Line: `logsumexp`.
    """
    check_tensor("logsumexp", "x", x)
    if isinstance(dim, Sequence):
        dims = _sorted_dims("logsumexp", x, dim)
        result = fused("logsumexp", x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)))
    else:
        dims = [dim]
        result = fused("logsumexp", x if dim in (-1, x.dim() - 1) else x.movedim(dim, -1))
    if keepdim and x.dim():
        for each in dims:
            result = result.unsqueeze(each)
    return result


@traceable
def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """x / max(‖x‖₂, eps) over `dim`, with `torch.nn.functional.normalize`'s arguments.

    Args:
        x: any shape that has the dimension.
        p: 2, the one norm that there is.
        dim: the dimension that gets length one: the second, as in PyTorch.
        eps: what a shorter row is divided by. Such a row's gradient is that of the division alone.

    Returns:
        x's shape and dtype. Where `dim` is not the last, the result is a view whose strides have `dim` innermost.

    Raises:
        IndexError: dim is out of range.
        ValueError: p is not 2.

    Saved for backward: x and two numbers a row. Line: `l2_norm(eps)`.
    """
    if p != 2:
        raise ValueError(f"normalize(): expected p to be 2, but got {p!r}")
    check_tensor("normalize", "x", x)
    return _over(dim, _lines.normalisation_word("l2_norm", eps), x)


def _sorted_dims(function: str, x: Tensor, dims: Sequence[int]) -> list[int]:
    count = x.dim()
    for dim in dims:
        if not -count <= dim < count:
            expected = f"expected to be in range of [{-count}, {count - 1}], but got {dim}"
            raise IndexError(f"{function}(): Dimension out of range ({expected})")
    found = sorted({dim % count for dim in dims})
    if len(found) != len(dims) or not found:
        raise RuntimeError(f"{function}(): expected dim to be dimensions that differ, but got {tuple(dims)}")
    return found


def _over(dim: int, line: str, x: Tensor) -> Tensor:
    """A line along any dimension."""
    return fused(line, x) if dim in (-1, x.dim() - 1) else fused(line, x.movedim(dim, -1)).movedim(-1, dim)


def _gated(function: str, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        check_tensor(function, "gate", gate)
        check_dense(function, "gate", gate)
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise RuntimeError(
                f"{function}(): expected the last dimension of a packed gate and up to be even, "
                f"but got a tensor of size {list(gate.shape)}"
            )
        gate, up = gate.chunk(2, -1)
    return fused(_lines.gate(function, activation), gate, up)


def _add_norm_over(
    shape: tuple[int, ...],
    line: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Several trailing dimensions as one. input_bias repeats along all but the last of them."""
    columns = [c if c is None else c.flatten() for c in (weight, bias)]
    if input_bias is not None:
        input_bias = input_bias.expand(shape).flatten()
    residual = residual.expand(x.shape).flatten(-len(shape))
    rows = x.flatten(-len(shape))
    y, h = fused(line, rows, *given(input_bias, residual, *columns), training=training)
    return y.view(x.shape), h.view(x.shape)
