"""The whole layer against a dense one, over meshes of every kind."""

import dataclasses
import functools
import re

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.config import MoEConfig
from jax_ep.params import MoEParams, init_params, param_specs

BATCH, LENGTH, HIDDEN, WIDTH, EXPERTS = 8, 4, 16, 12, 8
SIZES = dict(
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    hidden_size=HIDDEN,
    moe_intermediate_size=WIDTH,
    load_balance_loss_weight=0.05,
    router_z_loss_weight=0.02,
)
PLAIN = dict()
FULL = dict(  # DeepSeek-V3's router, Qwen2's gated shared experts.
    score_func="sigmoid",
    selection_bias=True,
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
    num_shared_experts=2,
    shared_expert_gate=True,
    load_balance_scope="sequence",
)
GPT_OSS = dict(
    activation="clipped_swiglu", mlp_bias=True, router_bias=True, fuse_gate_up=False
)


@functools.cache
def make(**fields):
    """A config, random parameters and x `[B, S, H]`."""
    config = MoEConfig(**{**SIZES, **fields})
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    params = jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) * 0.4).astype(np.float32), shapes
    )
    x = rng.standard_normal((BATCH, LENGTH, HIDDEN)).astype(np.float32)
    return config, params, x


def factors() -> np.ndarray:
    rng = np.random.default_rng(9)
    return rng.standard_normal((BATCH, LENGTH, HIDDEN)).astype(np.float32)


def loss_and_gradients(function, params, x):
    """Of a mean over all tokens and the auxiliary losses; also out and stats."""

    def loss(params, x):
        out, stats, aux = function(x, params)
        return (out * factors()).mean() + aux, (out, stats)

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, (out, stats)), gradients = jax.jit(gradient)(params, x)
    return (value, out, gradients), stats


@functools.cache
def expected_of(**fields):
    """What a literal dense layer gives on one device."""
    config, params, x = make(**fields)
    flat = x.reshape(-1, HIDDEN)
    ids = dense.moe(np, flat, params, config)[1]

    def function(x, params):
        flat = x.reshape(-1, HIDDEN)
        out, _, probs, logits = dense.moe(jnp, flat, params, config, ids)
        balance = dense.balance_loss(probs, ids, EXPERTS)
        if config.load_balance_scope == "sequence":
            by_sequence = [
                dense.balance_loss(one, one_ids, EXPERTS)
                for one, one_ids in zip(
                    probs.reshape(BATCH, LENGTH, -1),
                    ids.reshape(BATCH, LENGTH, -1),
                    strict=True,
                )
            ]
            balance = sum(by_sequence) / BATCH
        aux = config.load_balance_loss_weight * balance
        aux += config.router_z_loss_weight * dense.z_loss(jnp, logits)
        return out.reshape(x.shape), ids, aux

    with jax.numpy_rank_promotion("allow"):
        return loss_and_gradients(function, params, x)


def global_layer(config, **options):
    def function(x, params):
        out, stats = jax_ep.sharded_moe(x, params, config, **options)
        return out, stats, stats.aux_loss

    return function


def assert_close(one, two, tolerance=2e-4):
    one, two = jax.tree.leaves(one), jax.tree.leaves(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * 1e-2)


def check_stats(stats, fields, num_ranks):
    _, ids = expected_of(**fields)
    load = np.bincount(ids.reshape(-1), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.expert_load, load)
    np.testing.assert_array_equal(stats.num_recv, load.reshape(num_ranks, -1).sum(1))
    assert not np.asarray(stats.num_dropped).any()
    assert stats.num_dropped.shape == (num_ranks,)
    np.testing.assert_allclose(stats.max_load_ratio, [load.max() / load.mean()])


@pytest.mark.parametrize(
    "fields", [PLAIN, FULL, GPT_OSS], ids=["plain", "full", "gpt_oss"]
)
def test_against_dense(backend, fields):
    config, params, x = make(**fields)
    config = dataclasses.replace(config, implementation=backend.implementation)
    mesh = backend.mesh(data=2, expert=2)
    actual, stats = loss_and_gradients(global_layer(config, mesh=mesh), params, x)
    assert_close(actual, expected_of(**fields)[0])
    check_stats(stats, fields, 2)


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_ep_degree_changes_nothing(num_ranks):
    config, params, x = make(**FULL)
    mesh = CPU_FFI.mesh(expert=num_ranks)
    actual, stats = loss_and_gradients(global_layer(config, mesh=mesh), params, x)
    assert_close(actual, expected_of(**FULL)[0])
    check_stats(stats, FULL, num_ranks)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("has_context", [True, False])
def test_data_fsdp_expert(kind, has_context):
    """Weights split over fsdp and expert, gradients split likewise."""
    config, params, x = make(**FULL)
    names = ("data", "fsdp", "expert")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(kind,) * 3)
    specs = param_specs(config, expert="expert", hidden="fsdp")
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
        params,
        specs,
    )
    x = jax.device_put(x, NamedSharding(mesh, P(names)))
    if has_context:
        with jax.set_mesh(mesh):
            actual, stats = loss_and_gradients(
                global_layer(config, specs=specs), params, x
            )
    else:
        layer = global_layer(config, specs=specs, mesh=mesh)
        actual, stats = loss_and_gradients(layer, params, x)
    assert_close(actual, expected_of(**FULL)[0])
    check_stats(stats, FULL, 2)
    _, out, gradients = actual
    for leaf, like in zip(
        jax.tree.leaves((out, *gradients)), jax.tree.leaves((x, params, x)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def test_explicit_output_is_sharded_as_the_input():
    config, params, x = make(**FULL)
    mesh = jax.make_mesh((2, 2), ("replica", "expert"))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, P("replica"))
        actual, _ = loss_and_gradients(global_layer(config), params, x)
        # Residual and statistics combine with what else lives on the mesh.
        out, stats = jax.jit(global_layer(config))(x, params)[:2]
        total = jax.jit(lambda s: sum(leaf.sum() for leaf in jax.tree.leaves(s)))
        with jax.numpy_dtype_promotion("standard"):
            assert np.isfinite(total(stats))
        assert (x + out).sharding.spec[0] == "replica"
    assert_close(actual, expected_of(**FULL)[0])


@pytest.mark.parametrize(
    "sizes", [dict(data=4), dict(data=4, expert=1)], ids=["absent", "one"]
)
def test_no_expert_axis(sizes):
    config, params, x = make(**PLAIN)
    named = dict() if "expert" in sizes else dict(axis_name=())
    layer = global_layer(config, mesh=CPU_FFI.mesh(**sizes), **named)
    actual, stats = loss_and_gradients(layer, params, x)
    assert_close(actual, expected_of(**PLAIN)[0])
    check_stats(stats, PLAIN, 1)


def test_one_device_takes_any_axis_name():
    config, params, x = make(**PLAIN)
    layer = global_layer(config, mesh=CPU_FFI.mesh(data=1), axis_name="ep")
    actual, _ = loss_and_gradients(layer, params, x)
    assert_close(actual, expected_of(**PLAIN)[0])


def test_no_mesh_and_no_jit():
    config, params, x = make(**PLAIN)
    out, stats = jax_ep.sharded_moe(jnp.asarray(x), params, config)
    assert_close(out, expected_of(**PLAIN)[0][1])
    check_stats(stats, PLAIN, 1)


def test_tensor_axis_holds_copies():
    """Tokens split over one axis only: the other computes the same twice."""
    config, params, x = make(**PLAIN)
    mesh = CPU_FFI.mesh(expert=2, tensor=2)
    layer = global_layer(config, mesh=mesh, data_axes=())
    actual, stats = loss_and_gradients(layer, params, x)
    assert_close(actual, expected_of(**PLAIN)[0])
    check_stats(stats, PLAIN, 2)


def test_tuple_of_expert_axes():
    config, params, x = make(**PLAIN)
    mesh = CPU_FFI.mesh(data=2, fsdp=2)
    layer = global_layer(config, mesh=mesh, axis_name=("data", "fsdp"))
    actual, stats = loss_and_gradients(layer, params, x)
    assert_close(actual, expected_of(**PLAIN)[0])
    check_stats(stats, PLAIN, 4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_users_shard_map(check_vma):
    config, params, x = make(**FULL)
    axes = ("data", "expert")

    def local(x, params):
        out, stats = jax_ep.moe(x, params, config, sequence_axes=())
        return out, stats, stats.aux_loss

    layer = jax.shard_map(
        local,
        mesh=CPU_FFI.mesh(data=2, expert=4),
        in_specs=(P(axes), param_specs(config, expert="expert")),
        out_specs=(P(axes), P(), P()),
        check_vma=check_vma,
    )
    actual, stats = loss_and_gradients(layer, params, x)
    assert_close(actual, expected_of(**FULL)[0])
    check_stats(stats, FULL, 4)


def rolled(params):
    """The same layer with expert e's tokens at expert e + 1."""
    kernel = params.router_kernel
    roll = np.roll if isinstance(kernel, np.ndarray) else jnp.roll
    return dataclasses.replace(params, router_kernel=roll(kernel, 1, axis=1))


def test_two_layers_in_one_program():
    """Their routing does not mix."""
    config, params, x = make(**PLAIN)
    mesh = CPU_FFI.mesh(expert=4)
    flat = x.reshape(-1, HIDDEN)
    middle, first_ids, *_ = dense.moe(np, flat, params, config)
    second_ids = dense.moe(np, middle, rolled(params), config)[1]

    def ours(x, params):
        x, _ = jax_ep.sharded_moe(x, params, config, mesh=mesh)
        x, _ = jax_ep.sharded_moe(x, rolled(params), config, mesh=mesh)
        return x, None, 0.0

    def literal(x, params):
        flat = x.reshape(-1, HIDDEN)
        flat = dense.moe(jnp, flat, params, config, first_ids)[0]
        flat = dense.moe(jnp, flat, rolled(params), config, second_ids)[0]
        return flat.reshape(x.shape), None, 0.0

    with jax.numpy_rank_promotion("allow"):
        expected, _ = loss_and_gradients(literal, params, x)
    actual, _ = loss_and_gradients(ours, params, x)
    assert_close(actual, expected, tolerance=1e-3)


def test_all_equal_logits_under_remat():
    config, params, x = make(**PLAIN)
    params = dataclasses.replace(
        params, router_kernel=np.zeros_like(params.router_kernel)
    )
    mesh = CPU_FFI.mesh(expert=4)
    plain, stats = loss_and_gradients(global_layer(config, mesh=mesh), params, x)
    remat, again = loss_and_gradients(
        jax.checkpoint(global_layer(config, mesh=mesh)), params, x
    )
    assert_close(remat, plain)
    load = [BATCH * LENGTH] * 2 + [0] * 6
    assert stats.expert_load.tolist() == again.expert_load.tolist() == load


def test_top_one_router_learns():
    config, params, x = make(
        num_experts_per_tok=1, load_balance_loss_weight=0.0, router_z_loss_weight=0.0
    )
    layer = global_layer(config, mesh=CPU_FFI.mesh(expert=2))
    (_, _, (d_params, _)), _ = loss_and_gradients(layer, params, x)
    assert np.abs(d_params.router_kernel).max() > 1e-4


def test_masked_tokens(backend):
    """Padding tokens are NaN, and no real token, gradient or loss sees them."""
    config, params, x = make(**FULL)
    config = dataclasses.replace(config, implementation=backend.implementation)
    mask = np.arange(LENGTH) < 1 + np.arange(BATCH)[:, None] % LENGTH
    x = np.where(mask[..., None], x, np.nan).astype(np.float32)
    layer = global_layer(config, mesh=backend.mesh(data=2, expert=2), token_mask=mask)
    (value, out, gradients), stats = loss_and_gradients(layer, params, x)
    for leaf in jax.tree.leaves((value, out, gradients)):
        assert np.isfinite(leaf).all()
    assert not np.asarray(out)[~mask].any()
    assert stats.expert_load.sum() == mask.sum() * 2
    expected = dense.moe(np, x[mask], params, config)
    np.testing.assert_allclose(np.asarray(out)[mask], expected[0], rtol=1e-3, atol=1e-4)


def test_nan_token_stays_in_its_row():
    config, params, x = make(**PLAIN)
    mesh = CPU_FFI.mesh(expert=4)
    run = jax.jit(global_layer(config, mesh=mesh))
    clean = np.asarray(run(x, params)[0])
    x = x.copy()
    x[3, 1] = np.nan
    out = np.asarray(run(x, params)[0])
    others = np.ones((BATCH, LENGTH), bool)
    others[3, 1] = False
    np.testing.assert_array_equal(out[others], clean[others])


def test_capacity_drops_are_counted(backend):
    config, params, x = make(
        num_experts_per_tok=1, capacity_factor=1.0, score_func="sigmoid"
    )
    config = dataclasses.replace(config, implementation=backend.implementation)
    kernel = np.zeros_like(params.router_kernel)
    kernel[0, 0] = 10.0  # Expert 0 for x[..., 0] > 0, expert 1 otherwise: one rank.
    params = dataclasses.replace(params, router_kernel=kernel)
    mesh = backend.mesh(expert=4)
    (_, out, (d_params, d_x)), stats = loss_and_gradients(
        global_layer(config, mesh=mesh), params, x
    )
    wanted, capacity = BATCH * LENGTH, BATCH * LENGTH // 4
    assert stats.num_recv.tolist() == [wanted, 0, 0, 0]
    assert stats.num_dropped.tolist() == [wanted - capacity, 0, 0, 0]
    assert stats.dropped_fraction == pytest.approx(0.75)
    assert stats.required_capacity_factor[0] == 4
    is_kept = np.asarray(out).any(-1)
    assert is_kept.sum() == capacity
    flat = x.reshape(-1, HIDDEN)
    full, *_ = dense.moe(np, flat, params, config)
    np.testing.assert_allclose(
        out[is_kept], full[is_kept.reshape(-1)], rtol=1e-3, atol=1e-4
    )
    for leaf in jax.tree.leaves((d_params, d_x)):
        assert np.isfinite(leaf).all()


def test_dropless_fallback(backend):
    fields = dict(capacity_factor=0.5, dropless_fallback=True)
    config, params, x = make(**fields, **GPT_OSS)
    config = dataclasses.replace(config, implementation=backend.implementation)
    layer = global_layer(config, mesh=backend.mesh(data=2, expert=2))
    actual, stats = loss_and_gradients(layer, params, x)
    assert_close(actual, expected_of(**fields, **GPT_OSS)[0])
    check_stats(stats, dict(**fields, **GPT_OSS), 2)
    assert stats.num_rounds[0] > 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
    config, params, x = make(**FULL)
    low = jnp.asarray(x, dtype)
    mesh = CPU_FFI.mesh(expert=4)
    out, _ = jax.jit(functools.partial(jax_ep.sharded_moe, config=config, mesh=mesh))(
        low, params
    )
    assert out.dtype == dtype
    exact = np.asarray(low, np.float32).reshape(-1, HIDDEN)
    expected, *_ = dense.moe(np, exact, params, config)
    error = np.asarray(out, np.float32).reshape(-1, HIDDEN) - expected
    limit = 4 * float(jnp.finfo(dtype).eps) * np.linalg.norm(expected)
    assert np.linalg.norm(error) < limit


def test_no_tokens():
    config, params, x = make(**FULL)
    layer = global_layer(config, mesh=CPU_FFI.mesh(expert=4))
    out, stats, aux = jax.jit(layer)(x[:0], params)
    assert out.shape == (0, LENGTH, HIDDEN)
    assert stats.expert_load.tolist() == [0] * EXPERTS
    assert aux == 0


def test_tokens_are_not_gathered():
    """x split over two axes goes into the layer as it is."""
    config, params, x = make(**PLAIN)
    mesh = CPU_FFI.mesh(fsdp=2, expert=2)
    x = jax.device_put(x, NamedSharding(mesh, P(("fsdp", "expert"))))
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
        params,
        param_specs(config, expert="expert"),
    )
    call = jax.jit(lambda x, p: jax_ep.sharded_moe(x, p, config, mesh=mesh)[0])
    text = call.lower(x, params).compile().as_text()
    assert not re.findall(r"all-gather|all-to-all|collective-permute", text)


def test_jitter_and_random_routing():
    config, params, x = make(router_jitter_noise=0.3)
    mesh = CPU_FFI.mesh(expert=4)
    run = jax.jit(
        lambda key: jax_ep.sharded_moe(x, params, config, mesh=mesh, key=key)[0]
    )
    one, two = run(jax.random.key(0)), run(jax.random.key(1))
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(one, run(jax.random.key(0)))
    config, params, x = make(use_random_routing=True)
    x = np.ones_like(x)
    _, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh, key=jax.random.key(0))
    # Ranks draw different numbers for equal tokens: each expert gets some.
    assert (np.asarray(stats.expert_load) > 0).all()


@pytest.mark.parametrize(
    "fields, num_tokens, num_ranks, expected",
    [
        (dict(), 16, 1, 32),  # Dropless: R*T*min(K, L).
        (dict(), 16, 8, 128),  # L = 1: a token comes once.
        (dict(expert_alignment=16), 16, 2, 2 * 16 * 2 + 4 * 15),
        (dict(capacity_factor=1.0), 16, 2, 32),
        (dict(capacity_factor=1.25), 16, 4, 40),
        (dict(capacity_factor=1.25, expert_alignment=16), 16, 4, 48),
        (dict(capacity_factor=1.1), 5, 4, 11),  # Not 12, for 1.1 * 10 > 11.
        (dict(capacity_factor=100.0), 16, 4, 4 * 16 * 2),
        (dict(), 0, 4, None),
    ],
)
def test_receive_capacity(fields, num_tokens, num_ranks, expected):
    config = MoEConfig(**SIZES, **fields)
    assert jax_ep.receive_capacity(config, num_tokens, num_ranks) == expected


def test_refusals():
    config, params, x = make(**PLAIN)
    mesh = CPU_FFI.mesh(data=2, expert=4)

    def message(error=ValueError, **changes):
        arguments = dict(dict(x=x, params=params, config=config, mesh=mesh), **changes)
        with pytest.raises(error) as raised:
            jax_ep.sharded_moe(**arguments)
        return str(raised.value)

    assert message(data_axes=("data", "expert")) == (
        'jax_ep.sharded_moe: data_axes (="data,expert") must not have "expert", which '
        "is the expert axis: tokens are always split over it."
    )
    assert message(data_axes="fsdp") == (
        'jax_ep.sharded_moe: data_axes (="fsdp") must name axes of the mesh, which has '
        "('data', 'expert')."
    )
    assert message(axis_name="expret") == (
        'jax_ep.sharded_moe: axis_name (="expret") must name axes of the mesh, which '
        "has ('data', 'expert'): did you mean \"expert\"?"
    )
    assert message(axis_name=("expert", "model")) == (
        'jax_ep.sharded_moe: axis_name (="expert,model") must name axes of the mesh, '
        "which has ('data', 'expert')."
    )
    # The default name is no mistake where there is no expert axis, but here is one.
    assert message(mesh=CPU_FFI.mesh(data=2, ep=4)) == (
        'jax_ep.sharded_moe: axis_name (="expert") must name axes of the mesh, which '
        "has ('data', 'ep'): did you mean \"ep\"?"
    )
    assert message(params=dataclasses.replace(params, gate_up_proj=None)) == (
        "jax_ep.sharded_moe: params.gate_up_proj must be given with this config, which "
        "asks for router_kernel, gate_up_proj, down_proj."
    )
    surplus = dataclasses.replace(params, down_bias=np.zeros((EXPERTS, HIDDEN)))
    assert message(params=surplus) == (
        "jax_ep.sharded_moe: params.down_bias must not be given with this config, "
        "which asks for router_kernel, gate_up_proj, down_proj."
    )
    small = dataclasses.replace(params, down_proj=params.down_proj[:4])
    assert message(params=small) == (
        "jax_ep.sharded_moe: params.down_proj must have shape (8, 12, 16), and has "
        "(4, 12, 16)."
    )
    with pytest.raises(ValueError, match=r'^jax_ep\.moe: axis_name \(="expert"\) must'):
        jax_ep.moe(x, params, config)


def test_params_are_a_hashable_tree_of_specs():
    config = MoEConfig(**SIZES)
    specs = param_specs(config, expert="expert", hidden="fsdp")
    assert hash(specs) == hash(param_specs(config, expert="expert", hidden="fsdp"))
    assert specs.gate_up_proj == P("expert", "fsdp", None)
    assert specs.router_kernel == P(None, None)
    assert jax.tree.structure(MoEParams()).num_leaves == 0
