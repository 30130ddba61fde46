"""Methods of other libraries' classes that run something of ours until that is undone."""

import inspect
import sys
import threading
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from typing import Any


def by_name(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names, without those that are not given."""
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    return arguments | arguments.pop("kwargs", {})


class Replacement:
    """
    A method of a class that is replaced until [`~Replacement.undo`].

    Args:
        holder (`type`): The class that defines it.
        name (`str`): A method or class method.
        function (`Callable`): What runs instead, with the stock method (a function) before the arguments.
    """

    def __init__(self, holder: Any, name: str, function: Callable[..., Any]) -> None:
        self.holder, self.name, self.active = holder, name, True
        self.before = vars(holder)[name]
        stock = getattr(self.before, "__func__", self.before)

        @wraps(stock)
        def method(*args, **kwargs):
            return function(stock, *args, **kwargs) if self.active else stock(*args, **kwargs)

        self.made = classmethod(method) if isinstance(self.before, classmethod) else method
        setattr(holder, name, self.made)

    def undo(self) -> None:
        """Restore the class. If others have replaced the method since, ours stays below theirs and does nothing."""
        self.active = False
        if vars(self.holder)[self.name] is self.made:
            setattr(self.holder, self.name, self.before)


class AfterImport(MetaPathFinder):
    """
    Runs a function as soon as one of some modules has been imported and no import of their packages is under way in
    this thread, so that it may import all that is in them; at once if one is there already.

    Args:
        function (`Callable`): Called once.
        modules (`str`): Names of the modules.
        packages (`tuple[str, ...]`, *optional*): Names of the packages; by default those of the modules.
    """

    def __init__(self, function: Callable[[], None], *modules: str, packages: tuple[str, ...] = ()) -> None:
        self.function, self.modules = function, {*modules}
        self.packages = packages or tuple(name.partition(".")[0] for name in modules)
        self.thread = threading.local()
        sys.meta_path.insert(0, self)
        self._run_if_there(self.modules)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """What the finders below this one find, which runs the function if it is not only looked for but imported."""
        if fullname.partition(".")[0] not in self.packages or self not in sys.meta_path:
            return None
        below = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in below)), None)
        if spec is None or spec.loader is None:
            return spec
        execute: Any = spec.loader.exec_module

        def exec_module(module):
            there = set()
            under_way = self.thread.under_way = getattr(self.thread, "under_way", 0) + 1
            try:
                execute(module)
                there = self.modules
            except Exception:
                there = self.modules - {fullname}
                raise
            finally:
                self.thread.under_way = under_way - 1
                if under_way == 1:
                    self._run_if_there(there)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _run_if_there(self, names):
        if self in sys.meta_path and any(name in sys.modules for name in names):
            self.undo()
            self.function()

    def undo(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
