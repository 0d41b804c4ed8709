"""`python -m fuzz --programs N --seed S --processes P`: hunts, and prints what fails as scripts that show it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fuzz.run.hunt import Summary, hunt


def main() -> int:
    """The command; its status is 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next has the next")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--then", choices=("eager", "aot_eager", "inductor"), default="eager", help="what runs the rest of a graph"
    )
    parser.add_argument("--each", type=int, default=3, help="findings of a kind that a process makes small")
    parser.add_argument("--save", type=Path, help="a folder for the scripts")
    options = parser.parse_args()
    summary, printed = Summary(), 0
    for summary in hunt(options.programs, options.seed, options.processes, options.then, options.each):
        for finding in summary.findings[printed:]:
            report(finding, options.save)
        printed = len(summary.findings)
        rate = summary.programs / max(1e-9, summary.seconds)
        line = f"{summary.programs} of {options.programs}, {summary.with_lines} with lines, {printed} findings"
        print(f"\r{line}, {rate:.1f} a second ", end="", file=sys.stderr, flush=True)
    print(f"\n{summary}")
    return int(bool(summary.findings))


def report(finding, folder: Path | None) -> None:
    """Prints a finding, and saves its script."""
    print(f"\n--- seed {finding.seed}: {finding.text}")
    if finding.script:
        print(finding.program)
        if folder is None:
            print(finding.script)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{finding.kind.replace(' ', '_')}_{finding.seed}.py").write_text(finding.script)


if __name__ == "__main__":
    sys.exit(main())
