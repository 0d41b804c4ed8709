"""`onepass case NAME`: teaching cases of fusion, each checked, counted and timed. One file a case, named in CASES."""

from collections.abc import Callable
from functools import partial

from onepass.case import bias_gelu, fuse_or_not, layernorm_activation, layernorm_linear, roofline
from onepass.case.comparison import compare

__all__ = ["CASES"]

# Each takes what `compare` does, from device on, and returns the command's exit code.
CASES: dict[str, Callable[..., int]] = {
    case.COMPARISON.name: partial(compare, case.COMPARISON)
    for case in (layernorm_linear, layernorm_activation, bias_gelu, fuse_or_not, roofline)
}
