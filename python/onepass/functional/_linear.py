"""Functions with a matrix."""

from __future__ import annotations

from torch import Tensor

from .._arguments.shapes import given
from .._arguments.symbolic import traceable
from ..call import fused
from . import _lines


@traceable
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    strategy: str = "auto",
) -> Tensor:
    """activation(x · weightᵀ + bias): `torch.nn.functional.linear` and what follows it.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N,) or None.
        activation: a word such as "gelu", or None.
        strategy: "auto", or one that `Line.plan` lists: "unfused", or one kernel on CUDA: "tiled", "small_m" (few
            rows), "small_k" (few in_features), "small_n" (few out_features, on the CPU too).

    Returns:
        (..., N), weight's dtype.

    Raises:
        RuntimeError: the strategy cannot take these tensors; "auto" always can.

    Saved for backward: x and weight, and where there is an activation bias and x · weightᵀ.
    Line: `linear | bias | <activation>`.
    """
    return fused(_lines.linear(bias is not None, activation, strategy), x, *given(weight, bias))


@traceable
def layer_norm_linear(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    norm_activation: str | None = None,
    activation: str | None = None,
    strategy: str = "auto",
) -> Tensor:
    """activation(norm_activation(layer_norm(x) · ln_weight + ln_bias) · weightᵀ + bias).

    Args:
        x: (..., K).
        ln_weight, ln_bias: (K,); either may be None.
        weight: (N, K).
        bias: (N,) or None.
        eps: added to the variance.
        norm_activation: applied to the normalised and scaled value, before the product.
        activation: applied to the result.
        strategy: as in `linear`.

    Returns:
        (..., N), weight's dtype.

    Saved for backward: x, the parameters and two numbers a row, never the normalised value, which is computed again;
    with an activation x · weightᵀ too.
    Line: `layer_norm(eps) | scale | bias | <norm_activation> | linear | bias | <activation>`.
    """
    line = _lines.norm_linear(
        "layer_norm",
        eps,
        ln_weight is not None,
        ln_bias is not None,
        norm_activation,
        bias is not None,
        activation,
        strategy,
    )
    return fused(line, x, *given(ln_weight, ln_bias, weight, bias))


@traceable
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    norm_activation: str | None = None,
    activation: str | None = None,
    strategy: str = "auto",
) -> Tensor:
    """activation(norm_activation(rms_norm(x) · norm_weight) · weightᵀ + bias).

    Args:
        x: (..., K).
        norm_weight: (K,) or None.
        weight: (N, K).
        bias: (N,) or None.
        eps: added to the mean square; None is the machine epsilon, as in `torch.nn.functional.rms_norm`.
        norm_activation: applied to the normalised and scaled value, before the product.
        activation: applied to the result.
        strategy: as in `linear`.

    Returns:
        (..., N), weight's dtype.

    Saved for backward: as in `layer_norm_linear`, with one number a row.
    Line: `rms_norm(eps) | scale | <norm_activation> | linear | bias | <activation>`.
    """
    line = _lines.norm_linear(
        "rms_norm", eps, norm_weight is not None, False, norm_activation, bias is not None, activation, strategy
    )
    return fused(line, x, *given(norm_weight, weight, bias))


@traceable
def layer_norm_mlp(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "gelu",
    strategy: str = "auto",
) -> Tensor:
    """activation(layer_norm(x) · up_weightᵀ + up_bias) · down_weightᵀ + down_bias: a transformer's feed-forward block.

    Args:
        x: (..., K).
        ln_weight, ln_bias: (K,); either may be None.
        up_weight, up_bias: (F, K), and (F,) or None.
        down_weight, down_bias: (N, F), and (N,) or None.
        eps: added to the variance.
        activation: the word between the two products.
        strategy: of both, as in `linear`.

    Returns:
        (..., N), weight's dtype.

    Saved for backward: x, the parameters, two numbers a row and the first product; neither the normalised value nor
    the activation, which are computed again.
    Lines: `layer_norm(eps) | scale | bias | linear`, then `bias | <activation> | linear | bias`.
    """
    line = _lines.norm_linear(
        "layer_norm", eps, ln_weight is not None, ln_bias is not None, None, False, None, strategy
    )
    hidden = fused(line, x, *given(ln_weight, ln_bias, up_weight))
    line = _lines.act_linear("layer_norm_mlp", up_bias is not None, activation, down_bias is not None, strategy)
    return fused(line, hidden, *given(up_bias, down_weight, down_bias))


@traceable
def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    strategy: str = "auto",
) -> Tensor:
    """(activation(x · gate_weightᵀ) · (x · up_weightᵀ)) · down_weightᵀ: the MLP of Llama (arXiv:2002.05202).

    Args:
        x: (..., K).
        gate_weight, up_weight: (F, K).
        down_weight: (N, F).
        activation: the word applied to the gate.
        strategy: of all three products, as in `linear`.

    Returns:
        (..., N), weight's dtype.

    Saved for backward: x, the weights and the two products, of which the gated value is computed again.
    Lines: `linear` twice, then `gate(<activation>) | linear`.
    """
    product = _lines.linear(False, None, strategy)
    gate_value, up_value = fused(product, x, gate_weight), fused(product, x, up_weight)
    return fused(_lines.gated_linear("gated_mlp", activation, strategy), gate_value, up_value, down_weight)
