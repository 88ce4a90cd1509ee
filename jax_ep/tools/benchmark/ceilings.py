"""What the machine's links and memories can do, by a kernel that only copies rows.

The kernel (`copy_rows.cu`) moves rows of 14336 bytes the way dispatch and combine do:
by bulk copies into shared memory and from there to their place, two rows deep in each
of seven warps of a block. No flags, no credits, no routing: the rate is what the
hardware gives to such accesses. Every GPU of this process takes part at the same time;
times are those of CUDA events.
"""

import ctypes
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from jax_ep import nvrtc

ROW_BYTES = 14336
ROWS = 8192  # to each target; 117 MB, more than the L2 cache holds
COPY_ROWS = 4 * ROWS
WARPS, STAGES = 7, 2
LAUNCHES, REPEATS = 10, 5  # of which the median counts

KERNEL = pathlib.Path(__file__).parent / "copy_rows.cu"


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bytes per second.

    Attributes:
      egress: out of each GPU while all send to all, with every SM; None of one GPU.
      egress_by_sms: the same by how many SMs send.
      ingress: into one GPU while all others send to it; None of one GPU.
      memory: read plus written of one GPU that copies its own memory.
    """

    egress: float | None
    egress_by_sms: dict[int, float]
    ingress: float | None
    memory: float


def measure(devices: Sequence[Any]) -> Ceilings:
    """Measures them with the CUDA devices of this process.

    Raises:
      ImportError: no cuda-python. RuntimeError: what the driver says.
    """
    gpus = [_Gpu(device) for device in devices]
    for gpu in gpus:
        gpu.reach(gpus)
    ranks = len(gpus)
    landing = {gpu: [gpu.allocate(ROWS) for _ in gpus] for gpu in gpus}
    source = [gpu.allocate(ROWS) for gpu in gpus]
    everyone = [
        [landing[gpu][rank] for gpu in gpus if gpu is not gpus[rank]]
        for rank in range(ranks)
    ]
    sent = ROWS * ROW_BYTES
    by_sms, ingress = {}, None
    if ranks > 1:
        for sms in sorted({32, gpus[0].num_sms - 32, gpus[0].num_sms}):
            seconds = _time(gpus, source, everyone, ROWS, sms)
            by_sms[sms] = sent * (ranks - 1) / seconds
        one = [[landing[gpus[0]][rank]] for rank in range(1, ranks)]
        seconds = _time(gpus[1:], source[1:], one, ROWS, gpus[0].num_sms)
        ingress = sent * (ranks - 1) / seconds
    first = gpus[:1]
    source = [first[0].allocate(COPY_ROWS)]
    target = [[first[0].allocate(COPY_ROWS)]]
    seconds = _time(first, source, target, COPY_ROWS, first[0].num_sms)
    memory = 2 * COPY_ROWS * ROW_BYTES / seconds
    for gpu in gpus:
        gpu.free()
    return Ceilings(max(by_sms.values(), default=None), by_sms, ingress, memory)


def _time(gpus, sources, targets, num_rows: int, num_sms: int) -> float:
    """Seconds of one launch on the slowest GPU."""
    launches = [
        gpu.launcher(*each, num_rows, num_sms)
        for gpu, each in zip(gpus, zip(sources, targets, strict=True), strict=True)
    ]
    for launch in launches:
        launch(1)
    for gpu in gpus:
        gpu.elapsed()
    times = []
    for _ in range(REPEATS):
        for launch in launches:
            launch(LAUNCHES)
        times.append(max(gpu.elapsed() for gpu in gpus) / LAUNCHES)
    return statistics.median(times)


def source_text() -> str:
    """The kernel, with its sizes."""
    sizes = dict(ROW_BYTES=ROW_BYTES, WARPS=WARPS, STAGES=STAGES)
    defines = [f"#define {name} {value}\n" for name, value in sizes.items()]
    return "".join(defines) + KERNEL.read_text()


class _Gpu:
    """A device of this process by the driver's own interface, in JAX's context."""

    def __init__(self, device: Any):
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        self.driver = driver
        self._call(driver.cuInit, 0)
        ordinal = self._call(driver.cuDeviceGet, device.local_hardware_id)
        self.context = self._call(driver.cuDevicePrimaryCtxRetain, ordinal)
        self._enter()

        def attribute(name):
            which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self._call(driver.cuDeviceGetAttribute, which, ordinal))

        self.num_sms = attribute("MULTIPROCESSOR_COUNT")
        major = attribute("COMPUTE_CAPABILITY_MAJOR")
        minor = attribute("COMPUTE_CAPABILITY_MINOR")
        arch = f"sm_{major}{minor}a"
        cubin = nvrtc.compile_cached("copy_rows", source_text(), {}, arch)
        self._image = cubin.image  # the module refers to it
        self._module = self._call(driver.cuModuleLoadData, self._image)
        self._kernel = self._call(
            driver.cuModuleGetFunction, self._module, b"copy_rows"
        )
        self._shared = WARPS * STAGES * ROW_BYTES
        limit = (
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        )
        self._call(driver.cuFuncSetAttribute, self._kernel, limit, self._shared)
        self._stream = self._call(driver.cuStreamCreate, 1)  # not the legacy stream's
        self._events = [self._call(driver.cuEventCreate, 0) for _ in range(2)]
        self._memory = []

    def _call(self, function, *args) -> Any:
        result, *values = function(*args)
        if result != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {result.name}")
        return values[0] if values else None

    def _enter(self):
        self._call(self.driver.cuCtxSetCurrent, self.context)

    def reach(self, gpus) -> None:
        """Lets this device write to the others' memory."""
        self._enter()
        for gpu in gpus:
            if gpu is not self:
                (result,) = self.driver.cuCtxEnablePeerAccess(gpu.context, 0)
                if result.name not in (
                    "CUDA_SUCCESS",
                    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",  # JAX did
                ):
                    raise RuntimeError(f"cuCtxEnablePeerAccess: {result.name}")

    def allocate(self, rows: int) -> int:
        """Memory for so many rows, not zero (zeros can be faster to move)."""
        self._enter()
        pointer = self._call(self.driver.cuMemAlloc, rows * ROW_BYTES)
        self._memory.append(pointer)
        self._call(self.driver.cuMemsetD8, pointer, 0x5A, rows * ROW_BYTES)
        return int(pointer)

    def launcher(self, source: int, targets: list[int], num_rows: int, num_sms: int):
        """Launches the kernel so many times, between this device's two events."""
        self._enter()
        table = (ctypes.c_uint64 * len(targets))(*targets)
        device_table = self._call(self.driver.cuMemAlloc, ctypes.sizeof(table))
        self._memory.append(device_table)
        self._call(
            self.driver.cuMemcpyHtoD,
            device_table,
            ctypes.addressof(table),
            ctypes.sizeof(table),
        )
        self._call(self.driver.cuCtxSynchronize)
        values = (source, int(device_table), len(targets), num_rows)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)

        def launch(times: int) -> None:
            self._enter()
            self._call(self.driver.cuEventRecord, self._events[0], self._stream)
            for _ in range(times):
                self._call(
                    self.driver.cuLaunchKernel,
                    self._kernel,
                    *(num_sms, 1, 1),
                    *(32 * WARPS, 1, 1),
                    self._shared,
                    self._stream,
                    (values, types),
                    0,
                )
            self._call(self.driver.cuEventRecord, self._events[1], self._stream)

        return launch

    def elapsed(self) -> float:
        """Seconds between the events, once the second has come."""
        self._enter()
        self._call(self.driver.cuEventSynchronize, self._events[1])
        return float(self._call(self.driver.cuEventElapsedTime, *self._events)) / 1e3

    def free(self) -> None:
        """Gives the memory back."""
        self._enter()
        for pointer in self._memory:
            self._call(self.driver.cuMemFree, pointer)
        self._memory = []
