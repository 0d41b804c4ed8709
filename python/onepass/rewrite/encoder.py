"""Encoder layers that PyTorch computes by one operator in inference: opened, so that lines find what is within."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from onepass.graph.operations import is_tensor, value_of

__all__ = ["open_encoder_layers"]


class _Layer(NamedTuple):
    """The operator's arguments, as `torch.nn.TransformerEncoderLayer` gives them."""

    src: fx.Node
    embed_dim: int
    num_heads: int
    in_proj_weight: fx.Node
    in_proj_bias: fx.Node
    out_proj_weight: fx.Node
    out_proj_bias: fx.Node
    use_gelu: bool
    norm_first: bool
    eps: float
    norm1_weight: fx.Node
    norm1_bias: fx.Node
    norm2_weight: fx.Node
    norm2_bias: fx.Node
    linear1_weight: fx.Node
    linear1_bias: fx.Node
    linear2_weight: fx.Node
    linear2_bias: fx.Node
    mask: fx.Node | None = None
    mask_type: int | None = None


def open_encoder_layers(graph: fx.Graph) -> int:
    """Writes each out. On the CPU and without a mask: what padding is there would be other numbers, and on CUDA nobody
    has measured it. Returns how many there were."""
    opened = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch._transformer_encoder_layer_fwd or node.kwargs:
            continue
        layer = _Layer(*node.args)
        src = value_of(layer.src)
        if layer.mask is not None or src.is_nested or src.dim() != 3 or src.device.type != "cpu":
            continue
        with graph.inserting_before(node):
            result = _written_out(_Writer(graph), layer)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        opened += 1
    return opened


def _written_out(write: _Writer, layer: _Layer) -> fx.Node:
    """As `torch.nn.TransformerEncoderLayer.forward`."""
    x = layer.src

    def norm1(y: fx.Node) -> fx.Node:
        return write(F.layer_norm, y, (layer.embed_dim,), layer.norm1_weight, layer.norm1_bias, layer.eps)

    def norm2(y: fx.Node) -> fx.Node:
        return write(F.layer_norm, y, (layer.embed_dim,), layer.norm2_weight, layer.norm2_bias, layer.eps)

    if layer.norm_first:
        x = write(torch.add, x, _attention(write, layer, norm1(x)))
        return write(torch.add, x, _feed_forward(write, layer, norm2(x)))
    x = norm1(write(torch.add, x, _attention(write, layer, x)))
    return norm2(write(torch.add, x, _feed_forward(write, layer, x)))


def _attention(write: _Writer, layer: _Layer, x: fx.Node) -> fx.Node:
    heads = (3, layer.num_heads, layer.embed_dim // layer.num_heads)
    packed = write(torch._C._nn.linear, x, layer.in_proj_weight, layer.in_proj_bias)
    packed = write("permute", write("unflatten", packed, -1, heads), 2, 0, 3, 1, 4)
    attended = write(F.scaled_dot_product_attention, *(write("select", packed, 0, i) for i in range(3)))
    joined = write("flatten", write("transpose", attended, 1, 2), -2)
    return write(torch._C._nn.linear, joined, layer.out_proj_weight, layer.out_proj_bias)


def _feed_forward(write: _Writer, layer: _Layer, x: fx.Node) -> fx.Node:
    hidden = write(torch._C._nn.linear, x, layer.linear1_weight, layer.linear1_bias)
    hidden = write(F.gelu if layer.use_gelu else F.relu, hidden)
    return write(torch._C._nn.linear, hidden, layer.linear2_weight, layer.linear2_bias)


class _Writer:
    """Adds calls of functions, or of methods by their name, with what they would give."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def __call__(self, target, *arguments) -> fx.Node:
        values = [value_of(a) if is_tensor(a) else a for a in arguments]
        if isinstance(target, str):
            node, value = self.graph.call_method(target, arguments), getattr(Tensor, target)(*values)
        else:
            node, value = self.graph.call_function(target, arguments), target(*values)
        node.meta = {"example_value": value}
        return node
