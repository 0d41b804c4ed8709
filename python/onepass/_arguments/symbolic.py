"""Calls that torch.fx traces symbolically: they stand in its graph as one node, as those of torch.nn do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.fx
from torch.overrides import has_torch_function
from torch.utils._pytree import tree_iter

Function = TypeVar("Function", bound=Callable[..., Any])


def proxy_in(*arguments: Any) -> torch.fx.Proxy | None:
    """One of the proxies among them."""
    return next((a for a in tree_iter(arguments) if isinstance(a, torch.fx.Proxy)), None)


def proxy_among(x: Any, operands: tuple[Any, ...]) -> torch.fx.Proxy | None:
    """The same of a line's tensors, of which some may be lists."""
    lists = [a for a in (x, *operands) if isinstance(a, (list, tuple))]
    if has_torch_function((x, *operands)) or any(map(has_torch_function, lists)):
        return proxy_in(x, operands)
    return None


def node_of(proxy: torch.fx.Proxy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function gives in the graph that a proxy belongs to: a call of it."""
    return type(proxy).__torch_function__(function, (), args, kwargs)


def traceable(function: Function) -> Function:
    """A function that a graph calls."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A proxy is what torch's own functions know by its __torch_function__; the question costs a tenth of a
        # microsecond.
        if has_torch_function(args) or kwargs and has_torch_function(tuple(kwargs.values())):
            proxy = proxy_in(args, kwargs)
            if proxy is not None:
                return node_of(proxy, call, args, kwargs)
        return function(*args, **kwargs)

    return _with_code_of_its_own(call)


def leaf(forward: Function) -> Function:
    """A module's forward: the module itself is called in a graph, where the tracer knows it by a path."""

    @functools.wraps(forward)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args) or kwargs and has_torch_function(tuple(kwargs.values())):
            proxy = proxy_in(args, kwargs)
            if proxy is not None and isinstance(proxy.tracer, torch.fx.Tracer):
                return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return _with_code_of_its_own(call)


def _with_code_of_its_own(call: Function) -> Function:
    """Dynamo keeps a few captures for each code: functions that shared one would take each other's places."""
    call.__code__ = call.__code__.replace(co_name=call.__name__)
    return call
