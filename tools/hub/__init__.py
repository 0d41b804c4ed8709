"""onepass as a kernel of the Hugging Face Hub: `layers` for `kernelize`, `functional` and `fused` for other calls."""

from . import layers
from ._bundled import functional, fused

__all__ = ["functional", "fused", "layers"]
