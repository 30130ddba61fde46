"""Classes that add what a model with a mask needs to a stock class of transformers, under the name of that class."""

from functools import cache
from typing import Any


class Derived:
    """
    Base of the mixins that [`derived_class`] takes. Instances can be pickled and copied, and setting their `__class__`
    to `stock_class` makes them stock again.
    """

    mixin: type
    stock_class: type

    def __reduce__(self) -> tuple:
        return _new, (self.mixin, self.stock_class), self.__dict__


def derived_class(mixin: type, stock_class: Any) -> Any:
    """
    The class that derives from a mixin and a stock class, with the name of the stock class.

    Args:
        mixin (`type`): A class that derives from [`Derived`].
        stock_class (`type`): The class to derive from.
    """
    return _made(mixin, stock_class)


# Apart from derived_class, as to mypy a class is no hashable argument.
@cache
def _made(mixin, stock_class):
    # Transformers looks up what it knows about a class by its names.
    names = {name: getattr(stock_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(stock_class.__name__, (mixin, stock_class), names | {"mixin": mixin, "stock_class": stock_class})


def _new(mixin, stock_class):
    return object.__new__(derived_class(mixin, stock_class))
