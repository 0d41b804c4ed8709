"""onepass: einsum for fusion.

A line says what happens to a row of a tensor; it becomes one kernel forward and one backward, on CPU and CUDA.

Layers, from the top; a module imports only what lies below it (tests/python/package/test_structure.py):

- ``advice`` says what lines a model is worth; ``rewrite`` finds them in its graph and puts them there.
- ``pricing`` predicts seconds and bytes of operators and of lines; ``graph`` reads a captured graph.
- ``functional`` and ``nn`` speak lines.
- ``call`` runs a line. ``_arguments`` has what is no plain tensor (lists, DTensors, proxies); ``autograd`` and
  ``_operators`` are what PyTorch calls.
- ``line`` describes a line, ``plan`` says how it is computed, ``_native`` is the C++ library.
"""

import torch.compiler.config

from onepass import cache, functional, nn
from onepass._metadata import VERSION, put_metadata
from onepass._native import LIBRARY
from onepass._operators import flops as _flops  # noqa: F401 (registers)
from onepass._operators import vmap as _vmap  # noqa: F401
from onepass._operators.decompositions import decompositions
from onepass.advice.explain import explain
from onepass.autograd import front
from onepass.call import fused
from onepass.define import define_word, defined_words, undefine_word
from onepass.line import Line, LineError
from onepass.plan import Cost, Plan, Strategy, Traffic
from onepass.rewrite.fuse import fuse, report, unfuse
from onepass.word import Word, WordError, words

front()  # whose operators a graph of torch.jit that is loaded may hold
put_metadata()

__version__ = VERSION
# torch.compile's caches on disk know an operator by its name: a graph of another version, or of a library that was
# built otherwise, may expect other tensors.
_tag = f"onepass-{__version__}-{LIBRARY.stat().st_mtime_ns:x}"
if _tag not in torch.compiler.config.cache_key_tag:
    torch.compiler.config.cache_key_tag += _tag
__all__ = [
    "Cost",
    "Line",
    "LineError",
    "Plan",
    "Strategy",
    "Traffic",
    "Word",
    "WordError",
    "cache",
    "decompositions",
    "define_word",
    "defined_words",
    "explain",
    "functional",
    "fuse",
    "fused",
    "nn",
    "report",
    "undefine_word",
    "unfuse",
    "words",
]
