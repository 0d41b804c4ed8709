"""Graphs as Dynamo captures them."""

import torch


def captured(function, *inputs):
    """The graph of a function."""
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    (gm,) = graphs
    return gm.graph
