"""Measure speed, as ratios within one run; `gpu` measures what one card can show."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # this folder is the package `bench`

from bench import gpu, runner  # noqa: E402


def main() -> None:
    """Run the benchmarks that are named, or all."""
    names = ", ".join(runner.NAMES)
    parser = argparse.ArgumentParser(prog="python tests/bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {names} (default: all), or gpu")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--out", default="runs/bench.json", help="file for the figures")
    options = parser.parse_args()
    try:
        if options.names[:1] == ["gpu"]:
            return gpu.main(options.names[1:])
        runner.run(options.names, options.repeats, options.out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
