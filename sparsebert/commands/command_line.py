""""""

import sys
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError


def run_script(main):
    """Call `main` with the command line's arguments; what the user got wrong ends in one sentence, not a traceback."""
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, StrictDataclassError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
