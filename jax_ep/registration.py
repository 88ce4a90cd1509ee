"""Registers the compiled handlers with JAX, if the runtime can take them."""

import importlib.metadata
import re
from pathlib import Path

import jax

from jax_ep import _ffi

MIN_JAX = (0, 10, 2)  # The least that pyproject.toml allows on any Python.


def runtime_api_version() -> tuple[int, int]:
    """The XLA FFI version (major, minor) of the installed jaxlib, from its header."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()

    def constant(name: str) -> int:
        found = re.search(rf"#define {name} (\d+)", text)
        if found is None:
            raise ImportError(f"jax_ep: {name} is not in {header}: is jaxlib complete?")
        return int(found[1])

    return constant("XLA_FFI_API_MAJOR"), constant("XLA_FFI_API_MINOR")


def check_runtime() -> None:
    """Refuses an older jax than ours, or than the headers of the handlers' build.

    XLA would reject such a handler when a backend starts, and with it all of JAX.

    Raises:
      ImportError: naming both versions.
    """
    if jax.__version_info__ < MIN_JAX:
        needed = ".".join(map(str, MIN_JAX))
        raise ImportError(
            f"jax_ep needs jax >= {needed}, and this is jax {jax.__version__}: pip "
            f"install -U 'jax>={needed}'."
        )
    built, found = _ffi.api_version(), runtime_api_version()
    if built[0] != found[0] or built[1] > found[1]:
        jaxlib = importlib.metadata.version("jaxlib")
        raise ImportError(
            f"jax_ep was built for XLA FFI {built[0]}.{built[1]} and jaxlib {jaxlib} "
            f"offers {found[0]}.{found[1]}: install a newer jax, or build jax_ep "
            "against this jaxlib.",
            name="jax_ep",  # `python -m jax_ep` then prints this line alone.
        )


def has_cuda() -> bool:
    """Whether both the build and the runtime offer XLA's communicator to handlers."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "collectives_api.h"
    return _ffi.has_cuda and header.exists()


def register() -> None:
    """Registers state types, then targets, on every platform that can run them."""
    check_runtime()
    platforms = ["cpu", "CUDA"] if has_cuda() else ["cpu"]
    types, targets = _ffi.types(), _ffi.registrations()
    for platform in platforms:
        for name, info in types.get(platform, {}).items():
            jax.ffi.register_ffi_type(name, info, platform=platform)
        for target, stages in targets[platform].items():
            jax.ffi.register_ffi_target(target, stages, platform=platform)
