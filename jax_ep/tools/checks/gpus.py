"""GPUs: whether JAX sees them, what they can, how they are linked, and their memory."""

import glob
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from jax_ep import sizing
from jax_ep.axis import MAX_RANKS
from jax_ep.installed import pip_install
from jax_ep.tools.checks.driver import Driver, Gpu
from jax_ep.tools.checks.outcome import NO_CUDA, Outcome, Subject

SUBJECT = Subject("GPUs")

_MIN_COMPUTE_CAPABILITY = (9, 0)  # Hopper: bulk copies and their barriers.
_GIB = 2**30
# XLA's defaults: it takes this share of a GPU's memory at once.
_DEFAULT_FRACTION = 0.75


def nvidia_devices() -> list[str]:
    """What the system has of NVIDIA GPUs, whether or not JAX sees them."""
    found = sorted(glob.glob("/dev/nvidia[0-9]*"))
    program = shutil.which("nvidia-smi")
    if found or program is None:
        return found
    try:
        listed = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def hidden_by(environment: Mapping[str, str]) -> str:
    """The setting that keeps JAX from the GPUs, or nothing."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return f"JAX_PLATFORMS={platforms}"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible.strip() or '(empty)'}"
    return ""


def _is_of_driver(failure: str) -> bool:
    """Whether a plugin stopped for want of a driver or a GPU, not of a library."""
    words = ("cuinit", "no_device", "no cuda-capable", "driver", "libcuda")
    return any(word in failure.lower() for word in words)


def check(
    system: Sequence[str],
    seen: Sequence[str],
    why_unseen: str,
    driver: Driver | None,
    environment: Mapping[str, str],
    plugin_failures: Sequence[str] = (),
    extra: str = "cuda13",
) -> list[Outcome]:
    """Judges the GPUs.

    Args:
      system: from `nvidia_devices`.
      seen: kinds of the GPUs that JAX sees.
      why_unseen: what JAX said, where it sees none.
      driver: what the CUDA driver says; None without GPUs or without cuda-python.
      environment: `os.environ`.
      plugin_failures: what JAX logged of CUDA plugins that did not start.
      extra: from `versions.extra`.
    """
    if plugin_failures and (system or not _is_of_driver(plugin_failures[0])):
        plugin = SUBJECT.problem(
            "CUDA plugin",
            f"did not start: {plugin_failures[0]}",
            f"{pip_install(extra, '-U')} brings the libraries it needs; where there "
            f"are no GPUs: pip uninstall jax-{extra}-plugin jax-{extra}-pjrt",
        )
        rest = check(system, seen, why_unseen, driver, environment, (), extra)
        return [plugin, *rest]
    names = ("JAX sees", "capability", "peer access", "domains", "memory")
    hidden = hidden_by(environment)
    if not system and not seen:
        why = NO_CUDA
        if hidden.startswith("CUDA_VISIBLE_DEVICES"):  # Not written for a CPU's sake.
            why += f" found, and {hidden} would leave them out"
        return [SUBJECT.not_applicable(name, why) for name in names]
    if hidden:
        why = f"{hidden} leaves the GPUs out"
        return [SUBJECT.not_applicable(name, why) for name in names]
    if not seen:
        found = f"none of the {len(system)} GPUs of this machine ({system[0]}, ...)"
        if why_unseen:
            found += f": {why_unseen}"
        remedy = (
            f"Python 3.12 or later with {pip_install(extra, '-U')}; the NVIDIA "
            f"driver must be one for CUDA {extra[4:]} (nvidia-smi shows it)."
        )
        rest = [SUBJECT.not_applicable(n, "JAX sees no GPUs") for n in names[1:]]
        return [SUBJECT.problem(names[0], found, remedy), *rest]
    of_all = ""
    if len(seen) < len(system) and "CUDA_VISIBLE_DEVICES" in environment:
        visible = environment["CUDA_VISIBLE_DEVICES"]
        of_all = f" of {len(system)} (CUDA_VISIBLE_DEVICES={visible})"
    outcomes = [SUBJECT.healthy(names[0], f"{len(seen)}{of_all}: {_counted(seen)}")]
    if driver is None:
        why = "cuda-python is not installed (see kernels)"
        return outcomes + [SUBJECT.not_applicable(name, why) for name in names[1:]]
    if driver.error:
        outcomes.append(
            SUBJECT.problem(
                "driver", driver.error, "Install an NVIDIA driver for CUDA 12 or later."
            )
        )
        return outcomes
    return [
        *outcomes,
        _capability(driver),
        _peers(driver),
        _domains(driver),
        _memory(driver.gpus, environment),
    ]


def _capability(driver: Driver) -> Outcome:
    oldest = min(gpu.capability for gpu in driver.gpus)
    texts = sorted({f"{major}.{minor}" for major, minor in _capabilities(driver)})
    found = f"{', '.join(texts)}; driver for CUDA {driver.cuda}"
    if oldest < _MIN_COMPUTE_CAPABILITY:
        return SUBJECT.problem(
            "capability",
            f"expected >= 9.0 (Hopper), got {found}",
            "implementation='xla' runs on these GPUs, without our kernels.",
        )
    return SUBJECT.healthy("capability", found)


def _capabilities(driver: Driver) -> set[tuple[int, int]]:
    return {gpu.capability for gpu in driver.gpus}


def _peers(driver: Driver) -> Outcome:
    name = "peer access"
    if len(driver.gpus) < 2:
        return SUBJECT.not_applicable(name, "one GPU")
    missing = [link for link in driver.links if not link.has_access]
    if missing:
        pairs = ", ".join(f"{link.source}-{link.target}" for link in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        return SUBJECT.problem(
            name,
            f"none between the GPUs {pairs}{more}",
            "Choose GPUs of one NVLink domain with CUDA_VISIBLE_DEVICES (nvidia-smi "
            "topo -m shows the links); implementation='xla' runs on any network.",
        )
    num_atomic = sum(link.has_atomics for link in driver.links)
    if num_atomic == len(driver.links):
        kind = "all with native atomics, as over NVLink"
    else:
        kind = f"{num_atomic} with native atomics: the others are not NVLink"
    return SUBJECT.healthy(name, f"all {len(driver.links)} ordered pairs, {kind}")


def _domains(driver: Driver) -> Outcome:
    """GPUs that reach each other, and what `domain_size` they allow."""
    name = "domains"
    near: dict[int, set[int]] = {n: {n} for n in range(len(driver.gpus))}
    for link in driver.links:
        if link.has_access:
            near[link.source].add(link.target)
    # A domain is GPUs that all reach the same ones.
    domains = {frozenset(reached) for reached in near.values()}
    sizes = sorted(len(domain) for domain in domains)
    if sum(sizes) != len(near):
        return SUBJECT.not_applicable(name, "peer access is not the same both ways")
    least = math.gcd(*sizes)
    found = f"{len(sizes)} of {', '.join(map(str, sorted(set(sizes))))} here"
    if len(sizes) == 1:
        return SUBJECT.healthy(
            name,
            f"{found}: an axis over several such machines takes domain_size={least}, "
            "unless NVLink joins the machines too",
        )
    return SUBJECT.healthy(name, f"{found}: an axis over all takes domain_size={least}")


def _memory(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Outcome:
    name = "memory"
    smallest = min(gpu.memory_bytes for gpu in gpus)
    total = f"{smallest / _GIB:.0f} GiB each"
    needed = sizing.workspace_bytes(min(len(gpus), MAX_RANKS))
    workspace = f"a workspace of {needed / 2**20:.0f} MiB"
    setting = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    if setting in ("false", "0"):
        return SUBJECT.healthy(
            name, f"{total}; XLA takes it as needed, beside {workspace}"
        )
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    given = environment.get(variable, environment.get("XLA_CLIENT_MEM_FRACTION", ""))
    try:
        fraction = float(given or _DEFAULT_FRACTION)
    except ValueError:
        return SUBJECT.problem(
            name, f"{variable} is {given!r}, which is no number", f"{variable}=0.75"
        )
    left = smallest * (1 - fraction)
    found = f"{total}; XLA takes {fraction * 100:g}%, {left / _GIB:.1f} GiB stay for"
    if left < needed:
        return SUBJECT.problem(
            name,
            f"{found} {workspace}, CUDA and NCCL",
            f"{variable}={_DEFAULT_FRACTION}, or XLA_PYTHON_CLIENT_PREALLOCATE=false",
        )
    return SUBJECT.healthy(name, f"{found} {workspace}, CUDA and NCCL")


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(sorted(set(kinds)))
