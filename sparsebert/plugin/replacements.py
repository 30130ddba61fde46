"""Methods of other libraries' classes that run something of ours until that is undone."""

import inspect
import sys
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
    Runs a function of a module as soon as that is imported, or at once if it is already.

    Args:
        name (`str`): The module.
        function (`Callable`): Called with it.
    """

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self.name, self.function = name, function
        if name in sys.modules:
            function(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """What the other finders find, which runs the function if it is not only looked for but imported."""
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute: Any = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if self in sys.meta_path:
                self.undo()
                self.function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def undo(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
