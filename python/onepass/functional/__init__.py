"""Functions under PyTorch's names; each is one line of the language, run as one kernel forward and one backward.

They hold for all of them:

* Tensors are float64, float32, bfloat16 or float16, in any layout, on the CPU or a CUDA device. Parameters and other
  operands may have another dtype than `x` (bfloat16 activations with float32 weights, say).
* The result has the dtype and shape of `x`, under autocast too: nothing is cast behind the caller's back. (A function
  with a matrix gives that matrix's dtype, and autocast casts the matrix, as in `torch.nn.functional.linear`.)
  Arithmetic is float32 (float64 where `x` is), with one rounding when a tensor is stored.
* Saved for backward are the inputs (`softmax`, `log_softmax`: the result; `linear_cross_entropy`: gradients that are
  made in forward) and at most three numbers a row; never an activation, a normalised row or a mask.
  Gradients have their tensor's dtype and shape, and only those that are needed are computed.
* Results and gradients are bit-identical from run to run. Dropout follows `torch.manual_seed`.
* `activation` is a word of the vocabulary (`onepass.words()`), with its number where it has one: "gelu",
  "leaky_relu(0.2)". None is the identity.
* A bad argument raises what PyTorch would raise: RuntimeError for shapes and dtypes, TypeError for something that is no
  tensor or number, ValueError for a value out of range.
"""

from __future__ import annotations

from ._attention import attention_engine, attention_scores, scaled_dot_product_attention
from ._linear import gated_mlp, layer_norm_linear, layer_norm_mlp, linear, rms_norm_linear
from ._losses import cross_entropy, kl_div_logits, linear_cross_entropy, linear_log_prob, log_prob
from ._rows import (
    add_layer_norm,
    add_rms_norm,
    bias_act,
    bias_gelu,
    dropout_add,
    gated,
    geglu,
    group_norm,
    layer_norm,
    log_softmax,
    logsumexp,
    normalize,
    qk_norm_rope,
    reglu,
    rms_norm,
    rope,
    softmax,
    swiglu,
)

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention_engine",
    "attention_scores",
    "bias_act",
    "bias_gelu",
    "cross_entropy",
    "dropout_add",
    "gated",
    "gated_mlp",
    "geglu",
    "group_norm",
    "kl_div_logits",
    "layer_norm",
    "layer_norm_linear",
    "layer_norm_mlp",
    "linear",
    "linear_cross_entropy",
    "linear_log_prob",
    "log_prob",
    "log_softmax",
    "logsumexp",
    "normalize",
    "reglu",
    "rms_norm",
    "rms_norm_linear",
    "qk_norm_rope",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
    "swiglu",
]
