"""`python pretrain.py ...` is `sparsebert pretrain ...`."""

import sys

from sparsebert.commands import main


if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
