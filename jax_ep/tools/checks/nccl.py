"""The NCCL library that JAX would load, and whether it has what the kernels need."""

import contextlib
import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_ep.tools.checks.outcome import NO_CUDA, Outcome, Subject, one_line

SUBJECT = Subject("NCCL")

_MIN_VERSION = 22800  # symmetric windows with a device-side view
_LSA_POINTER_VERSION = 22900
# XLA's own collectives: with jax 0.12 and NCCL 2.28.9 a sum over two GPUs fails.
_FOR_JAX = (((0, 12), 22900),)
# As ffi/cuda/nccl.cc looks them up.
_NEEDED = ("ncclMemAlloc", "ncclCommWindowRegister", "ncclTeamLsa")
_LSA_POINTER = "ncclGetLsaDevicePointer"
# Settings that leave NCCL without symmetric memory where they are 0.
_SWITCHES = ("NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE")


def library_path() -> str:
    """Of the pip package, which JAX loads where it is installed; else the system's."""
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec and spec.submodule_search_locations) or ():
            path = Path(folder) / "lib" / "libnccl.so.2"
            if path.is_file():
                return str(path)
    return "libnccl.so.2"


def check(
    has_gpus: bool,
    path: str,
    environment: Mapping[str, str],
    *,
    extra: str = "cuda13",
    jax_version: tuple[int, ...] = jax.__version_info__,
    load: Any = ctypes.CDLL,
) -> list[Outcome]:
    """Asks the library for its version and functions.

    Args:
      has_gpus: whether there are CUDA devices.
      path: from `library_path`.
      environment: `os.environ`.
      extra: from `versions.extra`.
      jax_version: of the jax that would use it.
      load: opens a library.
    """
    install = f"pip install -U 'nvidia-nccl-cu{extra[4:]}>=2.29'"
    if not has_gpus:
        return [SUBJECT.not_applicable("library", NO_CUDA)]
    try:
        library = load(path)
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return [SUBJECT.problem("library", one_line(error), install)]
    version = number.value
    shown = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    if version < _MIN_VERSION:
        return [SUBJECT.problem("library", f"expected >= 2.28, got {shown}", install)]
    for newer, least in _FOR_JAX:
        if jax_version >= newer and version < least:
            text = f"{least // 10000}.{least // 100 % 100}"
            jax_text = ".".join(map(str, jax_version))
            found = f"expected >= {text} for jax {jax_text}, got {shown}"
            return [SUBJECT.problem("library", found, install)]
    outcomes = [SUBJECT.healthy("library", f"{shown}, {path}")]
    needed: list[str] = list(_NEEDED)
    if version >= _LSA_POINTER_VERSION:
        needed.append(_LSA_POINTER)
    missing = [name for name in needed if not hasattr(library, name)]
    if missing:
        found = f"{shown} lacks {', '.join(missing)}"
        outcomes.append(SUBJECT.problem("symmetric windows", found, install))
        return outcomes
    how = _LSA_POINTER if _LSA_POINTER in needed else "the window's layout of 2.28"
    for switch in _SWITCHES:
        if environment.get(switch) == "0":
            outcomes.append(
                SUBJECT.problem(
                    "symmetric windows",
                    f"{switch}=0 turns them off",
                    f"Unset {switch}.",
                )
            )
            return outcomes
    found = f"ncclCommWindowRegister; peers' addresses by {how}"
    return [*outcomes, SUBJECT.healthy("symmetric windows", found)]
