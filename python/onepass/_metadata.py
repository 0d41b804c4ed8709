"""The metadata that an installed package has, for a checkout on Python's path: torch.compile finds its backends there,
without their being imported. Where the package is installed, its own metadata is found first."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

__all__ = ["VERSION", "put_metadata"]

VERSION = "0.1.0"
TEXTS = {
    "METADATA": f"Metadata-Version: 2.1\nName: onepass\nVersion: {VERSION}\n",
    "entry_points.txt": "[torch_dynamo_backends]\nonepass = onepass.rewrite.fuse:backend\n",
}


class Checkout(Distribution):
    """The package where it stands."""

    def read_text(self, filename: str) -> str | None:
        return TEXTS.get(filename)

    def locate_file(self, path) -> Path:
        return Path(__file__).parents[1] / path


class Finder(DistributionFinder):
    """Finds the checkout, and no modules."""

    def find_spec(self, *_) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name in (None, "onepass"):
            yield Checkout()


def put_metadata() -> None:
    """For `importlib.metadata`, once."""
    if not any(type(finder) is Finder for finder in sys.meta_path):
        sys.meta_path.append(Finder())
