"""The run-time compiler of the CUDA kernels, and the folder that keeps what it made."""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax_ep import kernels, nvrtc
from jax_ep.installed import pip_install
from jax_ep.tools.checks.outcome import NO_CUDA, Outcome, Subject, one_line

SUBJECT = Subject("kernels")


def has_compiler() -> bool:
    """Whether cuda-python is installed, through which NVRTC is called."""
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


def check(
    is_needed: bool,
    architectures: tuple[str, ...],
    *,
    extra: str = "cuda13",
    version: Callable[[], tuple[int, int]] = nvrtc.version,
    include_folder: Callable[[], Path] = nvrtc.include_folder,
    report: Callable[..., Iterable[Any]] = kernels.report,
) -> list[Outcome]:
    """Compiles a kernel.

    Args:
      is_needed: there are GPUs, or cuda-python is installed for others'.
      architectures: for which to compile.
      extra: from `versions.extra`.
      version: of NVRTC.
      include_folder: CUDA's headers.
      report: compiles kernels, past every cache.
    """
    if not is_needed:
        names = ("NVRTC", "headers", "compilation")
        return [SUBJECT.not_applicable(name, NO_CUDA) for name in names]
    install = f"On Python 3.12 or later: {pip_install(extra, '-U')}"
    outcomes = []
    try:
        outcomes.append(SUBJECT.healthy("NVRTC", "{}.{}".format(*version())))
    except (ImportError, RuntimeError) as error:
        outcomes.append(SUBJECT.problem("NVRTC", one_line(error), install))
    try:
        outcomes.append(SUBJECT.healthy("headers", str(include_folder())))
    except ImportError as error:
        outcomes.append(SUBJECT.problem("headers", one_line(error), install))
    if any(outcome.state == "problem" for outcome in outcomes):
        why = "needs NVRTC and the headers"
        return [*outcomes, SUBJECT.not_applicable("compilation", why)]
    start = time.perf_counter()
    try:
        usages = [
            usage for *_, usage in report([kernels.layout_kernel()], architectures)
        ]
    except Exception as error:  # Whatever it is, it is what a program would meet.
        remedy = "NVRTC and the headers must be of one CUDA release. " + install
        outcomes.append(SUBJECT.problem("compilation", one_line(error), remedy))
        return outcomes
    seconds = time.perf_counter() - start
    registers = ", ".join(str(usage.registers) for usage in usages)
    found = f"layout for {', '.join(architectures)} in {seconds:.1f} s"
    found += f", {registers} registers a thread"
    return [*outcomes, SUBJECT.healthy("compilation", found)]


def check_cache(is_needed: bool, folder: Path | None) -> Outcome:
    """Writes a file into the cache folder, and removes it.

    Args:
      is_needed: see `check`.
      folder: `nvrtc.cache_folder()`.
    """
    name, variable = "cache folder", "JAX_EP_CACHE_DIR"
    if not is_needed and variable not in os.environ:
        return SUBJECT.not_applicable(name, NO_CUDA)
    remedy = f"{variable} may name a folder that can be written to."
    if folder is None:
        found = "none: no home folder, so every process compiles its own kernels"
        return SUBJECT.problem(name, found, remedy)
    try:
        nvrtc.make_folder(folder)
        if reason := nvrtc.not_private(folder):
            found = f"{folder} is not used: {reason}"
            return SUBJECT.problem(name, found, remedy)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor."):
            pass
    except OSError as error:
        reason = error.strerror or one_line(error)
        found = (
            f"{folder} cannot be written to ({reason}): every process compiles its "
            "own kernels"
        )
        return SUBJECT.problem(name, found, remedy)
    num_kernels = len(list(folder.glob("*.cubin")))
    return SUBJECT.healthy(name, f"{folder}, {num_kernels} kernels")
