"""What is held between forward and backward: by PyTorch's operators, and by a line in their place."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, fx

from onepass.graph.operations import is_tensor, operation, sizes, value_of

__all__ = ["saved_by"]

INPUT = ("pow", "square", "erf", "relu", "silu", "mish", "hardswish", "softplus", "gelu", "elu", "leaky_relu", "var")
RESULT = ("tanh", "sigmoid", "softmax", "sqrt", "rsqrt")


def saved_by(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the tensors that PyTorch saves for the backward of these operators, parameters not among them."""
    nodes, held, masks = list(nodes), set(), 0
    for node in nodes:
        op = operation(node)
        if op is None:
            continue
        tensors = [a for a in op.arguments if is_tensor(a) and a.op not in ("placeholder", "get_attr")]
        if op.name in RESULT or op.name == "relu":
            held.add(node)
        elif op.name in INPUT or op.name in ("layer_norm", "rms_norm"):
            held |= set(tensors[:1])
        elif op.name in ("mul", "div") and len([a for a in op.arguments if is_tensor(a)]) == 2:
            held |= set(tensors)
        elif op.name == "dropout":
            masks += _numbers(value_of(node))
    return masks + sum(_numbers(value_of(node)) * value_of(node).itemsize for node in held)


def _numbers(tensor: Tensor) -> int:
    count = 1
    for size in sizes(tensor):
        count *= size
    return count
