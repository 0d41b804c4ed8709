"""`onepass case NAME`: teaching cases of fusion, each checked, counted and timed. One file a case, named in CASES."""

from collections.abc import Callable
from functools import partial

from onepass.case import layernorm_linear
from onepass.case.comparison import compare

__all__ = ["CASES"]

# Each takes device, json, quick, compiled and console, as `compare` does, and returns the command's exit code.
CASES: dict[str, Callable[..., int]] = {
    "layernorm-linear": partial(compare, layernorm_linear.COMPARISON),
}
