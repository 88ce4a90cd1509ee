"""The CUDA kernels: what is compiled into each, and what a custom call carries of it.

A kernel knows what shapes its code: ranks, top-k, flags, and the leaves' dtypes and row
sizes. Tokens and capacity are arguments, so new ones compile nothing.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep import _ffi, nvrtc

# Compiled for where there is no GPU to ask: Hopper and Blackwell.
DEFAULT_ARCHITECTURES = ("sm_90a", "sm_100a")

MAX_LEAVES = _ffi.limits["leaves"]  # Their pointers are kernel parameters.

_MIN_COMPUTE_CAPABILITY = (9, 0)  # Bulk copies and their barriers (Hopper).

_LEAF_DTYPES = _ffi.leaf_dtypes  # Of what combine can add, by name.

_PREFIX = "jax_ep_"  # of targets, which are the names of the kernels too


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One specialisation of `<stage>.cu`: the macros that it is compiled with."""

    stage: str
    macros: tuple[tuple[str, str], ...] = ()

    def source(self) -> str:
        """The text that is compiled."""
        macros = "".join(
            f"#define JAX_EP_{name} {text}\n" for name, text in self.macros
        )
        return macros + _text(f"{self.stage}.cu")


def layout_kernel() -> Kernel:
    """The usual layout kernel: all its sizes are arguments."""
    return Kernel("layout")


def for_few(kernel: Kernel) -> Kernel:
    """The kernel of the same stage for few tokens; see `few_shape.h`."""
    return dataclasses.replace(kernel, stage=f"few_{kernel.stage}")


def with_stamps(kernel: Kernel) -> Kernel:
    """The kernel that notes when its phases began and ended."""
    return dataclasses.replace(kernel, macros=(*kernel.macros, ("STAMPS", "1")))


def dispatch_kernel(
    *, num_ranks: int, num_topk: int, leaf_bytes: Sequence[int], has_weights: bool
) -> Kernel:
    """Dispatch of leaves of `leaf_bytes` bytes per row."""
    return _kernel(
        "dispatch",
        RANKS=num_ranks,
        TOPK=num_topk,
        HAS_WEIGHTS=has_weights,
        LEAF_BYTES=leaf_bytes,
    )


def combine_kernel(
    *,
    num_ranks: int,
    num_topk: int,
    leaf_dtypes: Sequence[str],
    leaf_widths: Sequence[int],
    has_weights: bool = False,
    has_row_values: bool = False,
    has_bias: bool = False,
    wire_f32: bool = False,
    out_f32: bool = False,
) -> Kernel:
    """Combine of leaves of `leaf_widths` elements per row."""
    return _kernel(
        "combine",
        RANKS=num_ranks,
        TOPK=num_topk,
        HAS_WEIGHTS=has_weights,
        HAS_ROW_VALUES=has_row_values,
        HAS_BIAS=has_bias,
        WIRE_F32=wire_f32,
        OUT_F32=out_f32,
        LEAF_DTYPES=[_LEAF_DTYPES[dtype] for dtype in leaf_dtypes],
        LEAF_WIDTHS=leaf_widths,
    )


def attributes(target: str, params: Mapping[str, Any], operands: Any) -> dict[str, Any]:
    """What a custom call for CUDA carries beyond the attributes of every platform.

    Compiles the call's kernel, or finds it in the cache, for the architectures of the
    local CUDA devices or, where there are none, for `DEFAULT_ARCHITECTURES`.

    Args:
      target: "jax_ep_layout", "jax_ep_dispatch", "jax_ep_combine", or the start of one.
      params: the call's attributes so far; `num_ranks`, `stamps` and
        the flags are read.
      operands: its operands (`ffi.DispatchOperands`, ...) or their types; only shape
        and dtype are read.

    Returns:
      `few`, whether the call is one for few tokens. For dispatch and combine the sizes
      that the kernel is for: `num_topk`, and `leaf_bytes` or `leaf_dtypes` and
      `leaf_widths`. For all three `cubin_archs`, a
      list joined by commas, and for each of them `cubin_<arch>`, the code, and
      `cubin_<arch>_sha256`.

    Raises:
      ImportError: cuda-python, NVRTC or CUDA's headers are missing.
      NotImplementedError: a local device is older than Hopper.
      ValueError: more than `MAX_LEAVES` leaves.
    """
    stage = target.removeprefix(_PREFIX).removesuffix("_start")
    if stage == "layout":
        kernel, found = _layout_call(params, operands)
    elif stage == "dispatch":
        kernel, found = _dispatch_call(params, operands)
    else:
        kernel, found = _combine_call(params, operands)
    if found["few"]:
        kernel = for_few(kernel)
    if params["stamps"]:
        kernel = with_stamps(kernel)
    archs = architectures()
    found["cubin_archs"] = ",".join(archs)
    for arch in archs:
        cubin = compile_kernel(kernel, arch)
        found[f"cubin_{arch}"] = cubin.image
        found[f"cubin_{arch}_sha256"] = cubin.sha256
    return found


def compile_kernel(kernel: Kernel, arch: str) -> nvrtc.Cubin:
    """The kernel's code for `arch`, compiled or cached."""
    source = kernel.source()
    return nvrtc.compile_cached(_PREFIX + kernel.stage, source, _headers(source), arch)


def report(
    kernels: Iterable[Kernel], archs: Sequence[str] = DEFAULT_ARCHITECTURES
) -> Iterator[tuple[Kernel, str, nvrtc.Usage]]:
    """Compiles every kernel for every architecture and yields what each one uses."""
    for kernel in kernels:
        source = kernel.source()
        for arch in archs:
            for usage in nvrtc.usage(source, _headers(source), arch):
                yield kernel, arch, usage


def architectures() -> tuple[str, ...]:
    """Of the local CUDA devices, or `DEFAULT_ARCHITECTURES` where there are none."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no CUDA here
        return DEFAULT_ARCHITECTURES
    capabilities = sorted({_capability(device) for device in devices})
    if capabilities and capabilities[0] < _MIN_COMPUTE_CAPABILITY:
        have, need = (
            ".".join(str(part) for part in capability)
            for capability in (capabilities[0], _MIN_COMPUTE_CAPABILITY)
        )
        raise NotImplementedError(
            f"jax_ep: the CUDA kernels need compute capability {need} (Hopper) or "
            f"later, and a local device has {have}; implementation='xla' runs there."
        )
    return tuple(f"sm_{major}{minor}a" for major, minor in capabilities) or (
        DEFAULT_ARCHITECTURES
    )


def _capability(device: Any) -> tuple[int, int]:
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def _kernel(stage: str, **macros: Any) -> Kernel:
    texts = []
    for name, value in macros.items():
        items = value if isinstance(value, Sequence) else [value]
        texts.append((name, ", ".join(str(int(item)) for item in items)))
    return Kernel(stage, tuple(texts))


def _layout_call(params, operands) -> tuple[Kernel, dict[str, Any]]:
    tokens, num_topk = operands.topk_idx.shape
    is_few = _ffi.is_few_ids(
        tokens * num_topk, int(params["num_ranks"]), int(params["num_experts"])
    )
    return layout_kernel(), dict(few=np.bool_(is_few))


def _dispatch_call(params, operands) -> tuple[Kernel, dict[str, Any]]:
    leaves = operands.leaves
    _check_leaves("dispatch", leaves)
    num_topk = operands.slot.shape[1]
    leaf_bytes = [x.shape[1] * jnp.dtype(x.dtype).itemsize for x in leaves]
    kernel = dispatch_kernel(
        num_ranks=params["num_ranks"],
        num_topk=num_topk,
        leaf_bytes=leaf_bytes,
        has_weights=params["has_weights"],
    )
    most = _ffi.few_dispatch_tokens(
        leaf_bytes, num_topk, bool(params["has_weights"]), int(params["num_ranks"])
    )
    return kernel, dict(
        few=np.bool_(operands.slot.shape[0] <= most),
        num_topk=np.int64(num_topk),
        leaf_bytes=np.array(leaf_bytes, np.int64),
    )


def _combine_call(params, operands) -> tuple[Kernel, dict[str, Any]]:
    leaves = operands.leaves
    _check_leaves("combine", leaves)
    num_topk = operands.slot.shape[1]
    dtypes = [jnp.dtype(y.dtype).name for y in leaves]
    widths = [y.shape[1] for y in leaves]
    flags = ("has_weights", "has_row_values", "has_bias", "wire_f32", "out_f32")
    kernel = combine_kernel(
        num_ranks=params["num_ranks"],
        num_topk=num_topk,
        leaf_dtypes=dtypes,
        leaf_widths=widths,
        **{flag: params[flag] for flag in flags},
    )
    numbers = [_LEAF_DTYPES[dtype] for dtype in dtypes]
    most = _ffi.few_combine_tokens(
        numbers,
        widths,
        num_topk,
        bool(params["wire_f32"]),
        bool(params["has_row_values"]),
        int(params["num_ranks"]),
    )
    return kernel, dict(
        few=np.bool_(operands.slot.shape[0] <= most),
        num_topk=np.int64(num_topk),
        leaf_dtypes=np.array(numbers, np.int32),
        leaf_widths=np.array(widths, np.int64),
    )


def _check_leaves(op: str, leaves: Sequence[Any]) -> None:
    if len(leaves) > MAX_LEAVES:
        raise ValueError(
            f"jax_ep.{op}: a call on CUDA moves at most {MAX_LEAVES} leaves, and this "
            f"payload has {len(leaves)}."
        )


@functools.cache
def _text(name: str) -> str:
    """A file of `ffi/cuda`: of a checkout, else as installed with the package."""
    paths = [pathlib.Path(path) for path in jax_ep.__path__]
    folders = [path.parent / "ffi" / "cuda" for path in paths]
    folders += [path / "cuda" for path in paths]
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise FileNotFoundError(
        f"jax_ep: the kernel source {name} is in none of {[str(f) for f in folders]}."
    )


def _headers(source: str) -> dict[str, str]:
    """Texts of all headers of ours that `source` includes, by the names it uses."""
    found: dict[str, str] = {}
    names = _includes(source)
    while names:
        name = names.pop()
        if name not in found:
            found[name] = _text(name)
            names += _includes(found[name])
    return found


def _includes(text: str) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', text, flags=re.MULTILINE)
