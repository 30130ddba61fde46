"""`python finetune.py ...` is `sparsebert finetune ...`."""

import sys

from sparsebert.commands import main


if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
