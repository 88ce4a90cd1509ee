"""The layer under vmap, over layers or batches that lie on a mesh axis."""

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.slow

CONFIG = jax_ep.MoEConfig(
    num_experts=4,
    num_experts_per_tok=2,
    hidden_size=8,
    moe_intermediate_size=8,
    load_balance_loss_weight=0.5,
)
X = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)


@functools.cache
def layers():
    """Two layers' parameters, stacked."""
    keys = jax.random.split(jax.random.key(0), 2)
    stacked = jax.vmap(lambda key: jax_ep.init_params(key, CONFIG))(keys)
    return jax.tree.map(lambda leaf: np.asarray(leaf) * 2, stacked)


def nth(tree, n):
    return jax.tree.map(lambda leaf: leaf[n], tree)


@functools.cache
def expected(over):
    """Loss and gradients of dense layers, one after another."""
    over_layers, over_x = "layers" in over, "x" in over

    def loss(params, x):
        total = 0.0
        for n in range(2):
            mine = nth(params, n) if over_layers else params
            used = nth(layers(), n if over_layers else 0)
            at = n if over_x else 0
            ids = dense.moe(np, X[at], used, CONFIG)[1]
            out, _, probs, _ = dense.moe(jnp, x[n] if over_x else x, mine, CONFIG, ids)
            total += (out * X[n]).sum() + 0.5 * dense.balance_loss(probs, ids, 4)
        return total

    params = layers() if over_layers else nth(layers(), 0)
    x = X if over_x else X[0]
    with jax.numpy_rank_promotion("allow"):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("kind", "name", "over", "data_axes"),
    [
        (AxisType.Auto, None, "layers, x", None),
        (AxisType.Auto, "stage", "layers, x", "data"),
        (AxisType.Auto, "stage", "x", None),
        (AxisType.Auto, "stage", "x", "data"),
        (AxisType.Auto, "stage", "layers", "data"),
        (AxisType.Explicit, None, "layers, x", None),
        (AxisType.Explicit, "stage", "layers, x", "data"),
        (AxisType.Explicit, None, "x", None),
    ],
)
def test_on_a_mesh_axis(kind, name, over, data_axes):
    """Gradients too, also by what is not mapped."""
    names = ("stage", "data", "expert")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(kind,) * 3)

    def loss(params, x):
        def one(params, x, weight):
            out, stats = jax_ep.sharded_moe(x, params, CONFIG, data_axes=data_axes)
            return (out * weight).sum() + stats.aux_loss

        mapped = (0 if "layers" in over else None, 0 if "x" in over else None, 0)
        return jax.vmap(one, mapped, spmd_axis_name=name)(params, x, weights).sum()

    with jax.set_mesh(mesh):
        put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("stage")))
        x, weights = put(X) if "x" in over else X[0], put(X)
        params = layers()
        params = jax.tree.map(put, params) if "layers" in over else nth(params, 0)
        got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)
    for one, two in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected(over)), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-5)


def test_refusals():
    kind = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("stage", "expert"), axis_types=kind)
    params = nth(layers(), 0)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("stage")))
        layer = functools.partial(
            jax_ep.sharded_moe, params=params, config=CONFIG, data_axes="stage"
        )
        with pytest.raises(ValueError) as raised:
            jax.vmap(layer)(x)
        assert str(raised.value) == (
            'jax_ep.sharded_moe: data_axes and axis_name must not have "stage", which '
            "a vmap around this call maps over."
        )
        # A shard_map that leaves an axis, without any vmap.
        layer = jax.shard_map(
            lambda x, params: jax_ep.moe(x, params, CONFIG)[0],
            in_specs=(P("expert"), jax_ep.param_specs(CONFIG, expert="expert")),
            out_specs=P("expert"),
            axis_names={"expert"},
        )
        args = (
            jax.device_put(X[0], P("expert")),
            jax.tree.map(
                jax.device_put, params, jax_ep.param_specs(CONFIG, expert="expert")
            ),
        )
        with pytest.raises(ValueError) as raised:
            jax.jit(layer)(*args)
    assert str(raised.value) == (
        "jax_ep: the enclosing shard_map must be manual over every mesh axis, but "
        "leaves ('stage',) automatic: drop its axis_names."
    )
