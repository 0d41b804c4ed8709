"""What is built once for its arguments."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Built = TypeVar("Built")


def remembered(build: Callable[..., Built]) -> Callable[..., Built]:
    """lru_cache, but Dynamo sees the plain function: it folds a text to a constant, and warns of lru_cache."""
    look_up = functools.lru_cache(maxsize=1024)(build)
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(build)
    def built(*key: Any) -> Built:
        if is_compiling():
            return build(*key)
        try:
            return look_up(*key)
        except NoPlainNumber:
            numbered = tuple(map(plain, key))
            if all(a is b for a, b in zip(key, numbered)):
                raise
            return look_up(*numbered)

    return built


class NoPlainNumber(TypeError):
    """A number that is none of Python's own: a tensor's may change, so that it is no key."""


def plain(value: Any) -> Any:
    """NumPy's numbers, and tensors of one number without a gradient, as numbers: what torch takes for a float."""
    if isinstance(value, numbers.Real) or isinstance(value, torch.Tensor) and not (value.dim() or value.requires_grad):
        return float(value)
    return value
