"""What torch.compile is told of this package's functions without being imported: Dynamo and Inductor take a second."""

from collections.abc import Callable
from typing import TypeVar

__all__ = ["assume_constant_result"]

Function = TypeVar("Function", bound=Callable)


def assume_constant_result(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports Dynamo to set the one attribute that Dynamo asks for."""
    function._dynamo_marked_constant = True
    return function
