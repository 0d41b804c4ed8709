"""The lines behind the named functions, as text. Each is built once for its arguments; a call costs a look-up."""

from __future__ import annotations

from .._arguments.remembered import NoPlainNumber, remembered
from ..reference import ACTIVATIONS


@remembered
def bias_act(activation: str | None) -> str:
    return join("bias", activation_word("bias_act", activation))


@remembered
def norm(name: str, eps: float | None, weight: bool, bias: bool, activation: str | None) -> str:
    return join(normalisation_word(name, eps), weight and "scale", bias and "bias", activation_word(name, activation))


@remembered
def group_norm(eps: float, weight: bool, bias: bool, activation: str | None) -> str:
    return join(
        normalisation_word("layer_norm", number("group_norm", "eps", eps)),
        weight and "scale(channels)",
        bias and "bias(channels)",
        activation_word("group_norm", activation),
    )


@remembered
def add_norm(
    name: str,
    eps: float | None,
    weight: bool,
    bias: bool,
    activation: str | None,
    input_bias: bool,
    dropout_p: float,
    training: bool,
) -> str:
    return join(
        input_bias and "bias",
        dropout_word(f"add_{name}", dropout_p, training),
        "add",
        "keep",
        normalisation_word(name, eps),
        weight and "scale",
        bias and "bias",
        activation_word(f"add_{name}", activation),
    )


@remembered
def dropout_add(bias: bool, activation: str | None, p: float, training: bool) -> str:
    return join(
        bias and "bias", activation_word("dropout_add", activation), dropout_word("dropout_add", p, training), "add"
    )


@remembered
def gate(function: str, activation: str) -> str:
    if activation is None:
        raise ValueError(f"{function}(): expected activation to be a word such as 'silu', but got None")
    return f"gate({activation_word(function, activation)})"


@remembered
def rope(rotary_dim: int | None, interleaved: bool) -> str:
    first = None if rotary_dim is None else str(int(rotary_dim))
    inside = ", ".join(part for part in (first, interleaved and "interleaved") if part)
    return f"rope({inside})" if inside else "rope"


@remembered
def norm_rope(eps: float, weight: bool, weight_offset: float, rotary_dim: int | None, interleaved: bool) -> str:
    offset = number("qk_norm_rope", "weight_offset", weight_offset)
    scale = weight and (f"scale({offset!r})" if offset else "scale")
    return join(normalisation_word("rms_norm", eps), scale, rope(rotary_dim, interleaved))


@remembered
def linear(bias: bool, activation: str | None, strategy: str) -> str:
    return join(linear_word("linear", strategy), bias and "bias", activation_word("linear", activation))


@remembered
def norm_linear(
    name: str,
    eps: float | None,
    norm_weight: bool,
    norm_bias: bool,
    norm_activation: str | None,
    bias: bool,
    activation: str | None,
    strategy: str,
) -> str:
    function = f"{name}_linear"
    return join(
        normalisation_word(name, eps),
        norm_weight and "scale",
        norm_bias and "bias",
        activation_word(function, norm_activation),
        linear_word(function, strategy),
        bias and "bias",
        activation_word(function, activation),
    )


@remembered
def act_linear(function: str, act_bias: bool, activation: str | None, bias: bool, strategy: str) -> str:
    return join(
        act_bias and "bias", activation_word(function, activation), linear_word(function, strategy), bias and "bias"
    )


@remembered
def gated_linear(function: str, activation: str, strategy: str) -> str:
    return join(gate(function, activation), linear_word(function, strategy))


@remembered
def softmax(function: str, scale: float, mask: bool, is_causal: bool, dropout_p: float, training: bool) -> str:
    factor = number(function, "scale", scale)
    return join(
        factor != 1.0 and f"mul({factor!r})",
        mask and "mask",
        is_causal and "causal",
        "softmax",
        dropout_word(function, dropout_p, training),
    )


@remembered
def attention_scores(scale: float, mask: bool, is_causal: bool, dropout_p: float) -> str:
    return join("scores", softmax("attention_scores", scale, mask, is_causal, dropout_p, True))


@remembered
def attention(scale: float, mask: bool, is_causal: bool, dropout_p: float, keep: bool) -> str:
    weights = softmax("scaled_dot_product_attention", scale, mask, is_causal, dropout_p, True)
    return join("scores", weights, keep and "keep", "values")


def join(*words: str | bool | None) -> str:
    return " | ".join(word for word in words if word)


def normalisation_word(name: str, eps: float | None) -> str:
    return name if eps is None and name == "rms_norm" else f"{name}({number(name, 'eps', eps)!r})"


def dropout_word(function: str, p: float, training: bool) -> str | None:
    p = number(function, "p", p)
    if not 0 <= p <= 1:
        raise ValueError(f"{function}(): dropout probability has to be between 0 and 1, but got {p}")
    return f"dropout({p!r})" if training and p > 0 else None


def linear_word(function: str, strategy: str) -> str:
    if not isinstance(strategy, str):
        raise TypeError(f"{function}(): argument 'strategy' must be str, not {type(strategy).__name__}")
    return "linear" if strategy == "auto" else f"linear({strategy})"


def activation_word(function: str, activation: str | None) -> str | None:
    if activation is None:
        return None
    if not isinstance(activation, str):
        raise TypeError(f"{function}(): argument 'activation' must be str, not {type(activation).__name__}")
    if activation.partition("(")[0].strip() not in ACTIVATIONS:
        raise ValueError(
            f"{function}(): expected activation to be one of {', '.join(ACTIVATIONS)}, but got {activation!r}"
        )
    return activation


def gelu_word(function: str, approximate: str) -> str:
    if approximate == "none":
        return "gelu"
    if approximate == "tanh":
        return "gelu_tanh"
    raise RuntimeError(f"{function}(): approximate argument must be either none or tanh, but got {approximate!r}")


def number(function: str, argument: str, value: float | None) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    raise NoPlainNumber(f"{function}(): argument '{argument}' must be float, not {type(value).__name__}")
