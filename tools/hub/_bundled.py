"""The onepass of this process: the one that is loaded, else the one of this folder. torch knows its operators by a
fixed name, so a process has one."""

import sys
from pathlib import Path

from ._version import VERSION

PACKAGE = str(Path(__file__).resolve().parent / "package")

sys.path.insert(0, PACKAGE)
try:
    import onepass
finally:
    sys.path.remove(PACKAGE)

if onepass.__version__ != VERSION:
    raise ImportError(
        f"this kernel is onepass {VERSION}, and this process has loaded onepass {onepass.__version__} from "
        f"{Path(onepass.__file__).parent}; a process can have one version"
    )

functional, fused = onepass.functional, onepass.fused
