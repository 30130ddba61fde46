""""""

from ..training.recipes import load_recipe
from ..training.seq2seq import SECTIONS, translate


def main(arguments):
    print(translate(load_recipe(arguments, SECTIONS)))
