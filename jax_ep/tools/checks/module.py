"""What the compiled module offers, and whether this jaxlib can take it."""

from typing import Any

from jax_ep.installed import pip_install
from jax_ep.tools.checks.outcome import Outcome, Subject

SUBJECT = Subject("compiled module")


def check(
    module: Any, runtime: tuple[int, int], has_communicator: bool, has_gpus: bool
) -> list[Outcome]:
    """Judges `jax_ep._ffi`.

    Args:
      module: `jax_ep._ffi`.
      runtime: the XLA FFI version of jaxlib, `registration.runtime_api_version()`.
      has_communicator: whether jaxlib hands its communicator to handlers.
      has_gpus: whether this machine has NVIDIA GPUs.
    """
    built = module.api_version()
    versions = f"built for XLA FFI {_text(built)}, jaxlib offers {_text(runtime)}"
    if built[0] != runtime[0] or built[1] > runtime[1]:
        interface = SUBJECT.problem(
            "interface",
            versions,
            "Install a newer jax, or build jax_ep against this jaxlib: "
            + pip_install("", "--no-cache-dir", "--force-reinstall", "--no-deps"),
        )
    else:
        interface = SUBJECT.healthy("interface", versions)
    targets = {
        platform: sorted(found) for platform, found in module.registrations().items()
    }
    listed = "; ".join(f"{platform}: {', '.join(t)}" for platform, t in targets.items())
    calls = SUBJECT.healthy("custom calls", f"{listed} (ABI {module.abi_version})")
    return [interface, calls, _cuda(module, has_communicator, has_gpus)]


def _cuda(module: Any, has_communicator: bool, has_gpus: bool) -> Outcome:
    name = "CUDA handlers"
    if module.has_cuda and has_communicator:
        return SUBJECT.healthy(name, "compiled in")
    if module.has_cuda:
        found = "compiled in, and this jaxlib has no communicator for them"
    else:
        found = "not compiled in: built on Python 3.11, or against jaxlib < 0.11.2"
    if not has_gpus:
        return SUBJECT.not_applicable(name, f"{found}; no GPUs need them")
    return SUBJECT.problem(
        name, found, f"On Python 3.12 or later: {pip_install('cuda13', '-U')}"
    )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
