"""The grouped product of the experts, and its gradients, each by the fastest kernel."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import warnings
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep.axis import in_sequence, like, vary_alike
from jax_ep.row_blocks import rows_by_groups, sums_by_groups

Product = Literal["forward", "dgrad", "wgrad"]

_DIMENSIONS = {
    # [C, H] x [L, H, F] -> [C, F]
    "forward": lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [1]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    ),
    # [C, F] x [L, H, F] -> [C, H]
    "dgrad": lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [2]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    ),
    # [C, H] x [C, F] -> [L, H, F]
    "wgrad": lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([0], [0]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    ),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One implementation of a grouped product.

    Attributes:
      name: "xla" is `jax.lax.ragged_dot`; "blocks" those of `row_blocks.py`, for CPU
        devices; "mosaic", "triton" and "tokamax_xla" are those of
        `tokamax.ragged_dot_general`.
      tiles: the fields of tokamax's Config for "mosaic" and "triton", in place of its
        own choice, which knows only devices it was tuned on.
    """

    name: Literal["xla", "blocks", "mosaic", "triton", "tokamax_xla"] = "xla"
    tiles: tuple[tuple[str, int | bool], ...] = ()

    def __str__(self) -> str:
        if not self.tiles:
            return self.name
        return f"{self.name} {' '.join(f'{n}={v}' for n, v in self.tiles)}"


XLA = Kernel()
BLOCKS = Kernel("blocks")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Who computes the three products.

    Attributes:
      forward, dgrad, wgrad: `lhs @ rhs[e]`, the gradient of lhs and that of rhs.
    """

    forward: Kernel = XLA
    dgrad: Kernel = XLA
    wgrad: Kernel = XLA


def _triton(block_n: int, num_warps: int, num_stages: int) -> Kernel:
    tiles = dict(
        block_m=128,
        block_n=block_n,
        block_k=32,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return Kernel("triton", tuple(tiles.items()))


# What examples/benchmarks/grouped_matmul.py found fastest on an H200, in bfloat16, with
# jax 0.11.2, tokamax 0.0.17, jax-triton 0.4.1 and triton 3.9.0: 40 to 78 times as fast
# as XLA at DeepSeek-V3's shapes, where XLA multiplies every row with every expert, and
# twice at Mixtral's. Mosaic's wgrad was wrong there, its other products slower.
_HOPPER = Kernels(
    forward=_triton(block_n=256, num_warps=8, num_stages=5),
    dgrad=_triton(block_n=128, num_warps=4, num_stages=4),
    wgrad=_triton(block_n=128, num_warps=4, num_stages=4),
)

# By device kind. A device that is not here takes XLA for all three.
FASTEST: dict[str, Kernels] = {
    "NVIDIA H200": _HOPPER,
    # The same chip with other memory; not measured.
    "NVIDIA H100 80GB HBM3": _HOPPER,
}


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    kernels: Kernels | None = None,
) -> jax.Array:
    """`lhs[r] @ rhs[e]` for the rows r of each group e.

    Call it anywhere. Rows of group 0 come first, then those of group 1, and so on; rows
    past the last group give anything, in the result and in the gradient of lhs, and
    must be finite for the gradient of rhs to be: mask before and after.

    Args:
      lhs: `[C, H]`.
      rhs: `[L, H, F]`, in lhs's dtype.
      group_sizes: `[L]` int32, rows of each group; their sum is at most C.
      kernels: who computes; by default `kernels_for(lhs.dtype)`.

    Returns:
      `[C, F]` in lhs's dtype; products are added in float32.

    Derivative: `d_lhs[r] = d_out[r] @ rhs[e]ᵀ` ("dgrad") and `d_rhs[e] = lhs[r]ᵀ @
    d_out[r]`, summed over the rows r of group e, 0 without rows ("wgrad").
    """
    kernels = kernels_for(lhs.dtype) if kernels is None else kernels
    lhs, rhs, group_sizes = vary_alike((), (lhs, rhs, group_sizes))
    return _product(kernels, "forward", lhs, rhs, group_sizes)


def kernels_for(dtype: jax.typing.DTypeLike) -> Kernels:
    """The fastest measured kernels for the default backend's devices.

    Args:
      dtype: of both operands. GPU kernels were measured in bfloat16; others take XLA.

    Returns:
      On CPUs, loops over blocks of rows. On GPUs `FASTEST` of the device kind, with XLA
      for each product whose kernel is not installed: tokamax, and triton of at least
      the version that was measured.
    """
    if jax.default_backend() == "cpu":
        return Kernels(BLOCKS, BLOCKS, BLOCKS)
    if jnp.dtype(dtype) != jnp.bfloat16 or jax.default_backend() != "gpu":
        return Kernels()
    kind = jax.devices()[0].device_kind
    found = FASTEST.get(kind, Kernels())
    wanted = (found.forward, found.dgrad, found.wgrad)
    usable = Kernels(*(k if is_installed(k) else XLA for k in wanted))
    if usable != found:
        # Once a process, since the place is always this line.
        warnings.warn(
            f"jax_ep.grouped_matmul: on {kind} some products of the experts are "
            "jax.lax.ragged_dot's, 40 to 78 times slower at DeepSeek-V3's shapes than "
            "kernels that are not installed: install tokamax, jax-triton and triton >= "
            "3.9 (the extra tokamax of jax_ep), or name kernels= or matmul= yourself.",
            stacklevel=1,
        )
    return usable


def is_installed(kernel: Kernel) -> bool:
    """Whether its packages are there; nothing is imported for that."""
    if kernel.name in ("xla", "blocks"):
        return True
    if importlib.util.find_spec("tokamax") is None:
        return False
    # tokamax.ops.gpu, the only public place of tiles, imports Triton's kernels too.
    if kernel.name in ("mosaic", "triton"):
        return _triton_is_installed()
    return True


def _triton_is_installed() -> bool:
    """jax-triton 0.4.1 and triton 3.7.1 do not compile tokamax 0.0.17's; 3.9.0 does."""
    if importlib.util.find_spec("jax_triton") is None:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= (3, 9)


# forward: d_lhs[r] = d_out[r] @ rhs[e].T
#          d_rhs[e] = lhs[r].T @ d_out[r], summed over the rows r of group e
# The three products are each other's derivatives, so there are those of any order.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(kernels, which, lhs, rhs, group_sizes):
    kernel = getattr(kernels, which)
    out = _product_p.bind(lhs, rhs, group_sizes, kernel=kernel, which=which)
    if which == "wgrad":
        # Grouped products have left garbage in the gradients of empty groups.
        out = jnp.where(group_sizes[:, None, None] > 0, out, jnp.zeros((), out.dtype))
    return out


def _product_fwd(kernels, which, lhs, rhs, group_sizes):
    out = _product(kernels, which, lhs, rhs, group_sizes)
    return out, (lhs, rhs, group_sizes)


def _product_bwd(kernels, which, residuals, d_out):
    lhs, rhs, group_sizes = residuals
    operands = {
        "forward": (("dgrad", d_out, rhs), ("wgrad", lhs, d_out)),
        "dgrad": (("forward", d_out, rhs), ("wgrad", d_out, lhs)),
        "wgrad": (("dgrad", rhs, d_out), ("forward", lhs, d_out)),
    }
    d_lhs, d_rhs = (_product(kernels, *o, group_sizes) for o in operands[which])
    return d_lhs, d_rhs, None


_product.defvjp(_product_fwd, _product_bwd)


def product(
    kernel: Kernel, which: Product, lhs: jax.Array, rhs: jax.Array, group_sizes
) -> jax.Array:
    """One of the three products by one kernel, in lhs's dtype.

    Args:
      kernel: who computes.
      which: "forward" `[C, H] x [L, H, F]`, "dgrad" `[C, F] x [L, H, F]`, or "wgrad"
        `[C, H] x [C, F]`.
      lhs: as `which` says.
      rhs: likewise, in lhs's dtype.
      group_sizes: `[L]` int32.

    Returns:
      `[C, F]`, `[C, H]` or `[L, H, F]`.

    Raises:
      NotImplementedError: tokamax has no such kernel for this device or shape.
    """
    dimensions = _DIMENSIONS[which]
    if kernel.name == "xla":
        return lax.ragged_dot_general(lhs, rhs, group_sizes, dimensions)
    if kernel.name == "blocks":
        if which == "wgrad":
            return sums_by_groups(lhs, rhs, group_sizes)
        return rows_by_groups(lhs, rhs, group_sizes, transpose=which == "dgrad")
    # Not a dependency, and slow to import.
    import tokamax  # pyright: ignore[reportMissingImports]

    # Its own code promotes, whatever this process allows.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return tokamax.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            dimensions,
            preferred_element_type=lhs.dtype,
            implementation=[_tokamax_kernel(kernel)],
        )


def _tokamax_kernel(kernel: Kernel):
    if kernel.name == "tokamax_xla":
        return "xla"
    if not kernel.tiles:
        return kernel.name
    from tokamax.ops import gpu  # pyright: ignore[reportMissingImports]

    of = dict(
        mosaic=(gpu.PallasMosaicRaggedDot, gpu.PallasMosaicRaggedDotConfig),
        triton=(gpu.PallasTritonRaggedDot, gpu.PallasTritonRaggedDotConfig),
    )
    op, config = of[kernel.name]
    return op(config=config(**dict(kernel.tiles)))


def _result_type(lhs, rhs, group_sizes, *, kernel, which):
    del kernel  # All operands vary over the same mesh axes, and so does the result.
    if which == "wgrad":
        shape = (*group_sizes.shape, lhs.shape[1], rhs.shape[1])
    else:
        shape = (lhs.shape[0], rhs.shape[2 if which == "forward" else 1])
    return like(lhs, shape, lhs.dtype)


def _lower(ctx, *operands, kernel, which):
    return _lower_product(ctx, operands, XLA if kernel == BLOCKS else kernel, which)


def _lower_cpu(ctx, *operands, kernel, which):
    # Also in a program for several platforms, or for a CPU beside the GPU.
    named = kernel.name in ("xla", "tokamax_xla")
    return _lower_product(ctx, operands, kernel if named else BLOCKS, which)


def _lower_elsewhere(ctx, *operands, kernel, which):
    named = kernel.name == "tokamax_xla"
    return _lower_product(ctx, operands, kernel if named else XLA, which)


def _lower_product(ctx, operands, kernel, which):
    run = functools.partial(product, kernel, which)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _one_after_another(operands, dims, **params):
    """vmap: tokamax's kernels have no batch dimension, and ragged_dot not any."""
    return in_sequence(_product_p, operands, dims, **params), 0


# Tokamax's kernels are calls of Pallas, which do not say over which mesh axes their
# result varies, and exist for one platform: a primitive knows the one while tracing,
# and the other when it is lowered.
_product_p = Primitive("jax_ep_grouped_matmul")
_product_p.def_abstract_eval(_result_type)
_product_p.def_impl(jax.jit(_product_p.bind, static_argnames=("kernel", "which")))
batching.primitive_batchers[_product_p] = _one_after_another
mlir.register_lowering(_product_p, _lower, platform="cuda")
mlir.register_lowering(_product_p, _lower_cpu, platform="cpu")
mlir.register_lowering(_product_p, _lower_elsewhere)
