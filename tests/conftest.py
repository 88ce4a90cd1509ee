"""Eight CPU devices, the GPUs where there are any, and the two implementations.

Set JAX_EP_REQUIRE_GPUS=n where n GPUs must be there: a test that needs up to n of them
then fails where it would have been skipped.
"""

import dataclasses
import functools
import glob
import os

NUM_CPU_DEVICES = 8

_FLAGS: dict[str, object] = {"--xla_force_host_platform_device_count": NUM_CPU_DEVICES}
if not glob.glob("/dev/nvidia[0-9]*"):
    # Most of the time on CPU devices is LLVM's, for programs that run once. CI also
    # runs tests with its expensive passes: those of the newest jax.
    _FLAGS["--xla_llvm_disable_expensive_passes"] = "true"
_given = os.environ.get("XLA_FLAGS", "")
_ours = [f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_ours]).strip()
# Several pytest workers share the GPUs.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@functools.cache
def gpus() -> list[jax.Device]:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where a test runs: a platform, and one of the two implementations."""

    platform: str
    implementation: str

    def devices(self, num: int) -> list[jax.Device]:
        """The first `num` devices. Skips the test where there are fewer."""
        if self.platform == "cpu":
            return jax.devices("cpu")[:num]
        if len(gpus()) < num:
            shortage = f"needs {num} GPUs, and there are {len(gpus())}"
            if num <= int(os.environ.get("JAX_EP_REQUIRE_GPUS", "0")):
                pytest.fail(shortage)
            pytest.skip(shortage)
        return gpus()[:num]

    def mesh(self, **sizes: int) -> Mesh:
        """A mesh of automatic axes, e.g. `mesh(data=2, expert=4)`."""
        num = int(np.prod(list(sizes.values())))
        devices = np.array(self.devices(num)).reshape(tuple(sizes.values()))
        return Mesh(devices, tuple(sizes))


CPU_FFI = Backend("cpu", "ffi")
CPU_XLA = Backend("cpu", "xla")


def _backends(implementations: tuple[str, ...]):
    return [
        pytest.param(
            Backend(platform, implementation),
            id=f"{platform}-{implementation}",
            marks=[pytest.mark.gpu] if platform == "gpu" else [],
        )
        for platform in ("cpu", "gpu")
        for implementation in implementations
    ]


@pytest.fixture(params=_backends(("ffi", "xla")))
def backend(request) -> Backend:
    """Every platform with every implementation."""
    return request.param


def enough_for_reference(backend: Backend, case: object) -> None:
    """Skips a case on the reference whose program differs from others' only for ffi.

    The reference is plain JAX and slow to compile, so it runs some of the cases.
    """
    if backend.implementation == "xla" and not case:
        pytest.skip("the reference runs a part of these cases")


@pytest.fixture(params=_backends(("ffi",)))
def ffi_backend(request) -> Backend:
    """Every platform with our custom calls."""
    return request.param


@pytest.fixture
def x64():
    """64-bit types for one test."""
    with jax.enable_x64(True):
        yield
