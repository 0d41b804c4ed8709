"""onepass: einsum for fusion.

A line says what happens to a row of a tensor; it becomes one kernel forward and one backward, on CPU and CUDA.

Layers, from the top: ``functional`` and ``nn`` speak lines; ``line`` parses and calls them; ``autograd`` and ``_ops``
join them to PyTorch; ``_native`` is the C++ library.
"""

from onepass import cache, functional, nn
from onepass.line import Cost, Line, LineError, Plan, Strategy, Traffic, Word, fused, words

__version__ = "0.1.0"
__all__ = [
    "Cost",
    "Line",
    "LineError",
    "Plan",
    "Strategy",
    "Traffic",
    "Word",
    "cache",
    "functional",
    "fused",
    "nn",
    "words",
]
