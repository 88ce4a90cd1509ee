"""What a table of names consists of, and what goes wrong with one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """The names of one library's config.

    Attributes:
      label: the library, in messages.
      read: names that say something of the layer, and where in the library's code it is
        decided what.
      ignored: names that sound like a MoE layer's and change none of its values.
      markers: names that tell the source, where no other source has them.
      translate: the given of `read`, without None, as fields of `MoEConfig`; its second
        argument is the fields that other names have set already.
    """

    label: str
    read: Mapping[str, str]
    ignored: frozenset[str]
    markers: frozenset[str]
    translate: Callable[[Values, Values], Values]


def refuse(name: str, value: Any, rule: str) -> None:
    """Raises for a value that is not offered, naming its owner's name of it."""
    raise ValueError(f"jax_ep.MoEConfig: {name} (={value!r}) {rule}.")


def first(given: Values, *names: str) -> Any:
    """The value of the first of the names that is given; None without any."""
    return next((given[name] for name in names if name in given), None)


def same(given: Values, *names: str) -> Any:
    """The value of those of the names that are given, which must agree."""
    said = [name for name in names if name in given]
    for name in said[1:]:
        if given[name] != given[said[0]]:
            refuse(name, given[name], f"and {said[0]} (={given[said[0]]!r}) differ")
    return given[said[0]] if said else None


def known(**values: Any) -> Values:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}
