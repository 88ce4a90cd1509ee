"""The flags that the examples share: one name, one rule and one line of help each."""

import argparse
import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax

Wrong = argparse.ArgumentTypeError  # What a flag's value is refused with.
MOST = 2**31 - 1
MOST_DEVICES = 64


class Parser(argparse.ArgumentParser):
    """What was not given is not set; what is wrong is one line."""

    def __init__(self, description: str | None, examples: str):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            epilog=f"examples:\n{examples}",
        )

    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    @contextlib.contextmanager
    def refusals(self):
        """What settings, files or memory refuse, as a line."""
        try:
            yield
        except MemoryError as error:
            self.error(f"not enough memory: {error}")
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.error(f"not enough memory: {error}")
        except OSError as error:
            if error.filename is None:
                raise
            self.error(f"{error.filename}: {error.strerror}")


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    def convert(text: str) -> int:
        # Longer ones Python itself refuses to read.
        is_number = text.isdecimal() and len(text) <= len(str(MOST))
        if not is_number or not least <= int(text) <= most:
            raise Wrong(
                f"must be a whole number from {least} to {most}, and is {text!r}"
            )
        return int(text)

    return convert


def number(least: float, most: float, rule: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise Wrong(f"must be {rule}, and is {text!r}")
        return value

    return convert


MOST_FACTOR = 1e6  # Long before that there is room for everything.
_room = number(0, MOST_FACTOR, f"a number up to {MOST_FACTOR:g}, or none")


def factor(text: str) -> float | None:
    return None if text == "none" else _room(text)


def file(text: str) -> Path:
    if not Path(text).name:
        raise Wrong(f"must name a file, and is {text!r}")
    return Path(text)


# By name: what reads a value, its letter, and what it means. `--help` says the default.
_VALUES: dict[str, tuple[Callable[[str], Any], str, str]] = dict(
    layers=(whole(1, 128), "N", "MoE blocks"),
    hidden=(whole(1, 8192), "N", "features"),
    experts=(whole(1, 2048), "N", "experts in each block"),
    topk=(whole(1, 32), "N", "experts that see a token"),
    shared_experts=(whole(0, 64), "N", "experts in each block that see every token"),
    capacity_factor=(
        factor,
        "X",
        "room at a device for X times its fair share of rows; more are dropped and "
        "counted. none: room for all",
    ),
    tokens=(whole(1), "N", "tokens of each device"),
    batch=(whole(1, 256), "N", "sequences at once"),
    length=(whole(1, 10**6), "N", "bytes to generate"),
    temperature=(
        number(0, 100, "a number from 0 to 100"),
        "X",
        "of the choice of bytes; 0 takes the likeliest",
    ),
    data=(whole(1, MOST_DEVICES), "N", "size of the data axis"),
    fsdp=(whole(1, MOST_DEVICES), "N", "size of the axis that weights are stored over"),
    expert=(
        whole(1, MOST_DEVICES),
        "N",
        "size of the expert axis, a divisor of --experts",
    ),
    tensor=(
        whole(1, MOST_DEVICES),
        "N",
        "size of the axis that each expert's width is split over",
    ),
    steps=(whole(1), "N", "training steps in all"),
    seed=(whole(0), "N", "of random numbers"),
    out=(Path, "DIR", "for all files"),
)
_CHOICES = dict(
    implementation=(
        ("ffi", "xla"),
        "jax_ep's custom calls or plain JAX collectives [ffi where it runs]",
    )
)
# Those that are there or not.
_SWITCHES = dict(
    dropless_fallback="send what exceeds the capacity in further rounds",
    resume="go on from the checkpoints in --out",
)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add(group: Any, **defaults: Any) -> None:
    """Adds flags of these names, in this order; their defaults are only told."""
    for name, default in defaults.items():
        if name in _SWITCHES:
            group.add_argument(flag(name), action="store_true", help=_SWITCHES[name])
            continue
        if name in _CHOICES:
            choices, text = _CHOICES[name]
            group.add_argument(flag(name), choices=choices, help=text)
            continue
        convert, letter, text = _VALUES[name]
        if default is not None:
            text += f" [{default}]"
        group.add_argument(flag(name), type=convert, metavar=letter, help=text)


def check_layer(
    *, experts: int, topk: int, expert: int | None, capacity_factor: float | None
) -> None:
    """What the flags of a MoE layer say together.

    Raises:
      ValueError: what no layer can be.
    """
    if topk > experts:
        raise ValueError(
            f"--topk must be at most --experts (={experts}), and is {topk}"
        )
    if expert and experts % expert:
        raise ValueError(
            f"--expert must divide --experts (={experts}), and is {expert}"
        )
    least = 1 / topk
    if capacity_factor is not None and not capacity_factor >= least:
        raise ValueError(
            f"--capacity-factor must be at least 1 / --topk (={least:.3g}), and is "
            f"{capacity_factor:g}"
        )


def check_tensor(hidden: int, tensor: int) -> None:
    """Raises ValueError where a tensor axis cannot be of that size."""
    if hidden % tensor:
        raise ValueError(f"--tensor must divide --hidden (={hidden}), and is {tensor}")


def saved_settings(
    path: Path, names: set[str], flag: str = "--resume"
) -> dict[str, Any]:
    """What a run began with.

    Raises:
      ValueError: there is none, or it is not of the program whose settings have these
        names.
    """
    if not path.is_file():
        raise ValueError(f"{flag}: there is no run in {path.parent}")
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() <= names:
        raise ValueError(f"{flag}: {path} is not of a run of this program")
    return found
