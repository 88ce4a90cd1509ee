"""Versions of Python and of the packages, and whether they go together."""

import importlib.metadata
import re
from collections.abc import Iterable

from jax_ep.installed import pip_install
from jax_ep.tools.checks.outcome import Outcome, Subject

SUBJECT = Subject("versions")

# The oldest on which jax_ep runs, by whether Python is 3.12 or later: jaxlib 0.11.2 is
# the first with a communicator for handlers, and has no wheel for Python 3.11.
OLDEST_PYTHON = (3, 11)
CUDA_PYTHON = (3, 12)
OLDEST_JAX = {False: (0, 10, 2), True: (0, 11, 2)}
CUDA_JAX = (0, 11, 2)
OLDEST_NUMPY = (2, 0)
OLDEST_FLAX = (0, 12)
# What the tests have run on: later ones are named, and no problem.
NEWEST_TESTED = {"jax": (0, 12), "flax": (0, 12), "numpy": (2, 5)}

PLUGINS = (
    *("jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt"),
)
PACKAGES = ("jax", "jaxlib", *PLUGINS, "numpy", "flax", "cuda-python")


def installed() -> dict[str, str]:
    """The versions of those of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check(
    python: tuple[int, int, int], packages: dict[str, str], has_gpus: bool
) -> list[Outcome]:
    """Judges versions.

    Args:
      python: `sys.version_info[:3]`.
      packages: from `installed`.
      has_gpus: whether this machine has NVIDIA GPUs.
    """
    is_newer = python >= CUDA_PYTHON
    oldest_jax = OLDEST_JAX[is_newer]
    outcomes = [_python(python, has_gpus)]
    for name, oldest in (("jax", oldest_jax), ("jaxlib", oldest_jax)):
        outcomes.append(_package(name, packages, oldest))
    outcomes.append(_same_release(packages))
    outcomes.append(_plugin(python, packages, has_gpus))
    outcomes.append(_cuda_python(packages))
    outcomes.append(_package("numpy", packages, OLDEST_NUMPY))
    if "flax" in packages:
        outcomes.append(_package("flax", packages, OLDEST_FLAX))
    else:
        why = "not installed; only jax_ep.nnx and jax_ep.linen need it"
        outcomes.append(SUBJECT.not_applicable("flax", why))
    return outcomes


def extra(packages: Iterable[str]) -> str:
    """Ours for the CUDA of the plugin that is installed."""
    names = [name for name in packages if name in PLUGINS]
    is_12 = bool(names) and all("cuda12" in name for name in names)
    return "cuda12" if is_12 else "cuda13"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `0.11.2.dev3` is (0, 11, 2)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def text(version: tuple[int, ...]) -> str:
    """`0.11.2`."""
    return ".".join(str(part) for part in version)


def _python(python, has_gpus: bool) -> Outcome:
    found = text(python)
    if python < OLDEST_PYTHON:
        return SUBJECT.problem(
            "Python",
            f"expected >= {text(OLDEST_PYTHON)}, got {found}",
            f"Use Python {text(CUDA_PYTHON)}.",
        )
    if has_gpus and python < CUDA_PYTHON:
        return SUBJECT.problem(
            "Python",
            f"{found}, on which jax_ep runs on CPU devices only, and there are GPUs",
            f"Use Python {text(CUDA_PYTHON)} or later for CUDA.",
        )
    return SUBJECT.healthy("Python", found)


def _package(name: str, packages: dict[str, str], oldest: tuple[int, ...]) -> Outcome:
    if name not in packages:
        return SUBJECT.problem(name, "not installed", f"pip install '{name}'")
    version = packages[name]
    if release(version) < oldest:
        return SUBJECT.problem(
            name,
            f"expected >= {text(oldest)}, got {version}",
            f"pip install -U '{name}>={text(oldest)}'",
        )
    tested = NEWEST_TESTED.get("jax" if name == "jaxlib" else name, ())
    if release(version)[: len(tested)] > tested:
        version += f", later than {text(tested)}, the latest that was tested"
    return SUBJECT.healthy(name, version)


def _same_release(packages: dict[str, str]) -> Outcome:
    name = "jax and jaxlib"
    jax, jaxlib = packages.get("jax", ""), packages.get("jaxlib", "")
    if release(jax)[:3] == release(jaxlib)[:3]:
        return SUBJECT.healthy(name, "of one release")
    return SUBJECT.problem(
        name,
        f"expected one release, got jax {jax} and jaxlib {jaxlib}",
        f"pip install -U 'jax=={jax}' 'jaxlib=={jax}'",
    )


def _plugin(python, packages: dict[str, str], has_gpus: bool) -> Outcome:
    name = "CUDA plugin"
    found = {name: packages[name] for name in PLUGINS if name in packages}
    listed = ", ".join(f"{plugin} {version}" for plugin, version in found.items())
    remedy = pip_install(extra(packages), "-U")
    if {"jax-cuda12-plugin", "jax-cuda13-plugin"} <= found.keys():
        return SUBJECT.problem(
            name,
            f"expected one, got {listed}",
            "pip uninstall the one whose CUDA is not the driver's (nvidia-smi).",
        )
    if not found:
        if not has_gpus:
            return SUBJECT.not_applicable(name, "not installed, and there are no GPUs")
        if python < CUDA_PYTHON:
            remedy = f"Use Python {text(CUDA_PYTHON)} or later, and there: {remedy}"
        return SUBJECT.problem(name, "not installed, and there are GPUs", remedy)
    jaxlib = packages.get("jaxlib", "")
    if any(release(v)[:3] != release(jaxlib)[:3] for v in found.values()):
        return SUBJECT.problem(
            name, f"expected that of jaxlib {jaxlib}, got {listed}", remedy
        )
    if release(jaxlib) < CUDA_JAX:
        return SUBJECT.problem(
            name,
            f"expected jaxlib >= {text(CUDA_JAX)} for CUDA, got {jaxlib}",
            remedy,
        )
    return SUBJECT.healthy(name, listed)


def _cuda_python(packages: dict[str, str]) -> Outcome:
    """NVRTC is called through it, and must be of the plugin's CUDA."""
    name = "cuda-python"
    if name not in packages:
        return SUBJECT.not_applicable(name, "not installed; only CUDA needs it")
    version, has_plugin = packages[name], any(p in packages for p in PLUGINS)
    major = int(extra(packages)[4:])
    if has_plugin and release(version)[:1] != (major,):
        return SUBJECT.problem(
            name,
            f"expected {major}, as the CUDA plugin's CUDA, got {version}",
            pip_install(extra(packages), "-U"),
        )
    return SUBJECT.healthy(name, version)
