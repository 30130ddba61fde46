"""The modules of `studies/`, which a checkout has beside the package and a wheel has not."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


STUDIES = Path(__file__).resolve().parents[2] / "studies"


def study(name: str) -> ModuleType:
    """
    A module of `studies/`, wherever the command runs.

    Raises:
        ImportError: If the package was installed without it.
    """
    if "studies" not in sys.modules:
        path = STUDIES / "__init__.py"
        if not path.is_file():
            raise ImportError(
                "this needs the folder studies/ of the repository, which is not part of the installed package: clone "
                "the repository, run `pip install --editable .` in it, and repeat the command"
            )
        # By its file, so that nothing else of this name is taken for it.
        spec = importlib.util.spec_from_file_location("studies", path, submodule_search_locations=[str(STUDIES)])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["studies"] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"studies.{name}")
