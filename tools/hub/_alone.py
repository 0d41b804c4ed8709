"""What the kernel exports, for versions of `kernels` that import this folder in place of the one around it."""

import importlib.util
import sys
from pathlib import Path

_name = f"{__name__}_kernel"
_spec = importlib.util.spec_from_file_location(_name, Path(__file__).resolve().parents[1] / "__init__.py")
_kernel = sys.modules[_name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_kernel)

__all__ = _kernel.__all__
globals().update({name: getattr(_kernel, name) for name in __all__})
