"""The grouped product in plain JAX, for CPUs: a loop over blocks of each group's rows.

`lax.ragged_dot` multiplies every row with every group there. Here the work is that of
the rows in use, whatever the buffer's length: 16 groups of 1024 rows in all, 256 x 256,
took 8 ms in place of 76, and the same rows in a buffer of 4096 8 ms in place of 424
(two cores, jax 0.10.2).
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.axis import vary_alike

# Rows of one product: enough to use a core well, few enough that groups of a few rows
# do not cost much more than their rows.
BLOCK = 32


def rows_by_groups(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose: bool
) -> jax.Array:
    """`lhs[r] @ rhs[e]`, or `lhs[r] @ rhs[e]ᵀ`, for the rows r of each group e.

    Args:
      lhs: `[C, H]`, or `[C, F]` to transpose.
      rhs: `[L, H, F]`, in lhs's dtype.
      group_sizes: `[L]` int32, rows of each group, the first group's first.
      transpose: whether rhs is.

    Returns:
      `[C, F]`, or `[C, H]`, in lhs's dtype, added in float32; anything in rows past the
      last group.
    """
    num_rows, width = lhs.shape[0], rhs.shape[1 if transpose else 2]
    dimensions = (((1,), (1 if transpose else 0,)), ((), ()))
    # So that a group's last block may reach beyond it. What that writes is of no group,
    # or of the next one, which comes after and begins there.
    lhs = _with_block(lhs)
    offsets = jnp.cumsum(group_sizes) - group_sizes

    def group(e, out):
        weight = lax.dynamic_index_in_dim(rhs, e, keepdims=False)

        def block(number, out):
            start = offsets[e] + number * BLOCK
            rows = lax.dynamic_slice_in_dim(lhs, start, BLOCK)
            product = lax.dot_general(
                rows, weight, dimensions, preferred_element_type=jnp.float32
            )
            product = product.astype(out.dtype)
            return lax.dynamic_update_slice_in_dim(out, product, start, 0)

        return lax.fori_loop(0, _num_blocks(group_sizes[e]), block, out)

    out = jnp.zeros((lhs.shape[0], width), lhs.dtype)
    _, out = vary_alike((), ((lhs, rhs, group_sizes), out))
    return lax.fori_loop(0, rhs.shape[0], group, out)[:num_rows]


def sums_by_groups(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`lhs[r]ᵀ @ rhs[r]`, summed over the rows r of each group e; 0 without rows.

    Args:
      lhs: `[C, H]`.
      rhs: `[C, F]`, in lhs's dtype.
      group_sizes: `[L]` int32.

    Returns:
      `[L, H, F]` in lhs's dtype, added in float32.
    """
    lhs, rhs = _with_block(lhs), _with_block(rhs)
    offsets = jnp.cumsum(group_sizes) - group_sizes
    num_groups = group_sizes.shape[0]
    row = jnp.arange(BLOCK, dtype=group_sizes.dtype)

    def rows_of(array, start, is_in_group):
        rows = lax.dynamic_slice_in_dim(array, start, BLOCK)
        return jnp.where(is_in_group[:, None], rows, jnp.zeros((), rows.dtype))

    def group(e, out):
        def block(number, total):
            start = offsets[e] + number * BLOCK
            is_in_group = row < group_sizes[e] - number * BLOCK
            return total + lax.dot_general(
                rows_of(lhs, start, is_in_group),
                rows_of(rhs, start, is_in_group),
                (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )

        total = lax.fori_loop(0, _num_blocks(group_sizes[e]), block, zero)
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), e, 0)

    shape = (lhs.shape[1], rhs.shape[1])
    zero, out = (
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((num_groups, *shape), lhs.dtype),
    )
    _, zero, out = vary_alike((), ((lhs, rhs, group_sizes), zero, out))
    return lax.fori_loop(0, num_groups, group, out)


def _with_block(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, BLOCK), (0, 0)))


def _num_blocks(num_rows: jax.Array) -> jax.Array:
    return -(-num_rows // BLOCK)
