"""Reports that are tables of rich: as text as wide as the terminal, and as HTML in a notebook."""

from __future__ import annotations

import shutil
from io import StringIO

from rich.console import Console

__all__ = ["Printed"]

WIDTH = 120
"""Where there is no terminal."""
PRE = '<pre style="white-space: pre; overflow-x: auto; font-family: monospace">{code}</pre>'


class Printed:
    """Whatever has `__rich__`."""

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=shutil.get_terminal_size((WIDTH, 24)).columns)
        console.print(self)
        return console.file.getvalue()

    def _repr_html_(self) -> str:
        """What Jupyter shows."""
        console = Console(file=StringIO(), record=True, width=WIDTH)
        console.print(self)
        return console.export_html(code_format=PRE, inline_styles=True)
