"""Prints what pyproject.toml asks for: of the build, of the package itself, or of an extra, one requirement a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())
groups = {
    "build": project["build-system"]["requires"],
    "dependencies": project["project"]["dependencies"],
    **project["project"]["optional-dependencies"],
}
print(*(requirement for name in sys.argv[1:] for requirement in groups[name]), sep="\n")
