"""What the CUDA driver says of GPUs and links, without JAX and without a context."""

import dataclasses
import itertools
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU, in the driver's order."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Link:
    """From one GPU to another: whether it may load and store there, and add."""

    source: int
    target: int
    has_access: bool
    has_atomics: bool


@dataclasses.dataclass(frozen=True)
class Driver:
    """The driver's answers; `error` says why there are none."""

    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    error: str = ""


def ask() -> Driver | None:
    """Asks the driver through cuda-python; None where that is not installed."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        return _ask(driver)
    except RuntimeError as error:  # a call failed, or cuda-python found no library
        return Driver(error=" ".join(str(error).split()))


def _ask(api: Any) -> Driver:
    def call(name: str, *args: Any) -> Any:
        result, *values = getattr(api, name)(*args)
        if int(result) != 0:
            raise RuntimeError(f"{name}: {getattr(result, 'name', result)}")
        return values[0] if values else None

    call("cuInit", 0)
    version = call("cuDriverGetVersion")
    devices = [call("cuDeviceGet", n) for n in range(call("cuDeviceGetCount"))]
    attribute, p2p = api.CUdevice_attribute, api.CUdevice_P2PAttribute
    gpus = []
    for device in devices:
        name = call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()
        capability = tuple(
            call("cuDeviceGetAttribute", which, device)
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        gpus.append(Gpu(name, capability, call("cuDeviceTotalMem", device)))
    links = []
    for source, target in itertools.permutations(range(len(devices)), 2):
        pair = devices[source], devices[target]
        has_access = bool(call("cuDeviceCanAccessPeer", *pair))
        atomics = p2p.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        has_atomics = bool(call("cuDeviceGetP2PAttribute", atomics, *pair))
        links.append(Link(source, target, has_access, has_atomics))
    cuda = f"{version // 1000}.{version % 1000 // 10}"
    return Driver(cuda, tuple(gpus), tuple(links))
