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


class Count:
    """A backend that counts the graphs it is given, and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, gm, _):
        self.graphs += 1
        return gm.forward
