"""
Modules in the current folder, which `python -m sparsebert` does not import: a `torch.py` that lies there would run.
They are imported if it is the folder of the package itself.
"""

import os
import re
import sys


def is_command(words: list[str]) -> bool:
    """Whether a command line of Python says `-m sparsebert`, perhaps among other options."""
    for index, word in enumerate(words):
        if found := re.fullmatch("-[bBdEiIOPqsSuvx]*m(.*)", word):
            return (found[1] or "".join(words[index + 1 : index + 2])).split(".")[0] == __package__
    return False


def leave_current_folder() -> None:
    """Take the current folder from the search path if Python has put it there for this command."""
    # Python imports the package of a module before it sets the first argument to the path of the module.
    asked = sys.argv[:1] == ["-m"] and is_command(sys.orig_argv) and not getattr(sys.flags, "safe_path", False)
    here = os.getcwd()
    if asked and sys.path[:1] == [here] and not os.path.samefile(here, os.path.join(os.path.dirname(__file__), "..")):
        del sys.path[0]


leave_current_folder()
