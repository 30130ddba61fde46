""""""

import argparse
from pathlib import Path

from ..analysis.pictures import plot_gallery


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m sparsebert.visualization",
        description="Draw every known pattern: patterns.png. Masks and runs: python -m sparsebert.analyze.",
    )
    parser.add_argument("--gallery", type=Path, metavar="OUT_DIR", required=True, help="created if missing")
    plot_gallery(parser.parse_args(arguments).gallery / "patterns.png")
