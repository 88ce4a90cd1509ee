"""Expert placement: the planner, by hand and by property; ids and parameters placed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.placement import (
    Placement,
    identity_placement,
    place_params,
    place_topk,
    plan_placement,
    rank_loads,
)

SKEWED = np.array([90, 10, 40, 12, 8, 20, 5, 15.0])


def imbalance(loads, placement, num_ranks):
    each = rank_loads(loads, placement, num_ranks=num_ranks)
    return each.max() / each.mean()


def check(placement: Placement, num_ranks: int):
    """Every rule that a placement keeps, whatever the loads."""
    num_slots, num_experts = placement.num_slots, placement.num_experts
    assert num_slots % num_ranks == 0
    counts = np.bincount(placement.phys_to_log, minlength=num_experts)
    np.testing.assert_array_equal(counts, placement.num_replicas)
    assert counts.min() >= 1
    for expert, slots in enumerate(placement.log_to_phys):
        held, padding = np.split(slots, [counts[expert]])
        np.testing.assert_array_equal(
            held, np.flatnonzero(placement.phys_to_log == expert)
        )
        assert (padding == -1).all()
    for array in (
        placement.phys_to_log,
        placement.log_to_phys,
        placement.num_replicas,
    ):
        assert array.dtype == np.int32


def test_plan_by_hand():
    placement = plan_placement(SKEWED, num_ranks=2, num_slots=10)
    # One slot more for 90; a third replica would share a rank, so the other goes to 40.
    np.testing.assert_array_equal(placement.num_replicas, [2, 1, 2, 1, 1, 1, 1, 1])
    # Rank 0 takes 45 20 20 10 5, rank 1 takes 45 20 15 12 8.
    np.testing.assert_array_equal(placement.phys_to_log, [0, 1, 2, 5, 6, 0, 2, 3, 4, 7])
    np.testing.assert_array_equal(
        rank_loads(SKEWED, placement, num_ranks=2), [100, 100]
    )
    np.testing.assert_array_equal(
        rank_loads(SKEWED, identity_placement(8), num_ranks=2), [152, 48]
    )
    check(placement, 2)


def test_plan_is_deterministic_and_its_shapes_do_not_depend_on_loads():
    first = plan_placement(SKEWED, num_ranks=4, num_slots=12)
    again = plan_placement(SKEWED.copy(), num_ranks=4, num_slots=12)
    other = plan_placement(np.zeros(8), num_ranks=4, num_slots=12)
    for a, b, c in zip(*map(jax.tree.leaves, (first, again, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == c.shape
    # Without any load, replicas go round.
    np.testing.assert_array_equal(other.num_replicas, [2, 2, 2, 2, 1, 1, 1, 1])


def test_experts_that_ranks_do_not_divide():
    placement = plan_placement(np.ones(6), num_ranks=4)
    assert placement.num_slots == 8
    check(placement, 4)


@pytest.mark.parametrize("seed", range(20))
def test_plan_properties(seed):
    random = np.random.default_rng(seed)
    num_ranks = int(random.choice([1, 2, 4, 8]))
    num_experts = int(random.integers(num_ranks, 65))
    most = num_experts * num_ranks // num_ranks
    per_rank = int(random.integers(-(-num_experts // num_ranks), most + 1))
    loads = random.zipf(1.3, num_experts).clip(max=10**6).astype(float)
    placement = plan_placement(
        loads, num_ranks=num_ranks, num_slots=per_rank * num_ranks
    )
    check(placement, num_ranks)
    total = rank_loads(loads, placement, num_ranks=num_ranks).sum()
    np.testing.assert_allclose(total, loads.sum())
    # No slot's load could be lowered by giving a replica from another expert: taking
    # one away anywhere leaves a load at least as high as the highest there is now.
    share = loads / placement.num_replicas
    more = placement.num_replicas < num_ranks
    if more.any():
        taken = placement.num_replicas > 1
        without = loads[taken] / (placement.num_replicas[taken] - 1)
        assert not taken.any() or without.min() >= share[more].max()


def test_plan_lowers_the_imbalance_of_a_skewed_load():
    loads = 1 / np.arange(1, 65)
    before = imbalance(loads, identity_placement(64), 8)
    moved = imbalance(loads, plan_placement(loads, num_ranks=8), 8)
    after = imbalance(loads, plan_placement(loads, num_ranks=8, num_slots=80), 8)
    assert before > 4.5
    assert after < 1.05 < moved < before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(loads=np.ones((2, 2)), num_ranks=2),
            "jax_ep.plan_placement: loads must have shape [E], and has (2, 2).",
        ),
        (
            dict(loads=[1, np.nan], num_ranks=2),
            "jax_ep.plan_placement: loads must be finite and at least 0.",
        ),
        (
            dict(loads=[1, -1], num_ranks=2),
            "jax_ep.plan_placement: loads must be finite and at least 0.",
        ),
        (
            dict(loads=np.ones(8), num_ranks=0),
            "jax_ep.plan_placement: num_ranks (=0) must be at least 1.",
        ),
        (
            dict(loads=np.ones(8), num_ranks=4, num_slots=4),
            "jax_ep.plan_placement: num_slots (=4) must be from 8, one for each "
            "expert, to 32.",
        ),
        (
            dict(loads=np.ones(2), num_ranks=2, num_slots=6),
            "jax_ep.plan_placement: num_slots (=6) must be from 2, one for each "
            "expert, to 4.",
        ),
        (
            dict(loads=np.ones(8), num_ranks=4, num_slots=10),
            "jax_ep.plan_placement: num_slots (=10) must be divisible by num_ranks "
            "(=4).",
        ),
    ],
)
def test_plan_messages(arguments, message):
    with pytest.raises(ValueError) as error:
        plan_placement(**arguments)
    assert str(error.value) == message


def on_ranks(function, num_ranks, in_specs, **options):
    mesh = CPU_FFI.mesh(expert=num_ranks)
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=P("expert"), **options
        )
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_place_topk_shares_evenly(check_vma):
    ranks, tokens, topk = 4, 40, 2
    placement = plan_placement(SKEWED, num_ranks=ranks, num_slots=16)
    assert placement.num_replicas[0] > 2
    random = np.random.default_rng(0)
    # Every fourth token asks for expert 0: a counter modulo replicas would feed one.
    ids = random.integers(1, 8, (ranks, tokens, topk), np.int32)
    ids[:, ::4, 0] = 0
    ids[1, 5] = [-3, 8]
    ids[2, 5] = [-(2**31), 2**31 - 1]
    place = on_ranks(place_topk, ranks, (P("expert"), P()), check_vma=check_vma)
    got = np.asarray(place(ids.reshape(-1, topk), placement)).reshape(ids.shape)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got[1, 5], [-1, 16])
    np.testing.assert_array_equal(got[2, 5], [-1, 16])
    valid = (ids >= 0) & (ids < 8)
    np.testing.assert_array_equal(placement.phys_to_log[got[valid]], ids[valid])
    for rank in range(ranks):
        shares = np.bincount(got[rank][valid[rank]], minlength=16)
        for expert, slots in enumerate(placement.log_to_phys):
            of_expert = shares[slots[slots >= 0]]
            assert of_expert.max() - of_expert.min() <= 1, (rank, expert)
    # Rank r begins with replica r: few slots on each rank still reach all replicas.
    one = np.zeros((ranks, 1), np.int32)
    first = np.asarray(place(one, placement))[:, 0]
    assert len(set(first.tolist())) == min(ranks, placement.num_replicas[0])


def test_place_topk_wide_ids(x64):
    placement = plan_placement(SKEWED, num_ranks=2, num_slots=10)
    ids = np.array([[2**32 + 3], [-(2**32) + 3]], np.int64)
    place = on_ranks(place_topk, 2, (P("expert"), P()))
    np.testing.assert_array_equal(place(ids, placement), [[10], [-1]])


def test_place_topk_wide_ids_of_numpy():
    """As JAX would not see them: by default it has no such numbers."""
    placement = plan_placement(SKEWED, num_ranks=2, num_slots=10)
    ids = np.array([[2**32 + 3], [-(2**32) + 3]], np.int64)

    def place(rank):
        return place_topk(ids, placement) + 0 * rank

    got = on_ranks(place, 2, P("expert"))(np.zeros((4, 1), np.int32))
    np.testing.assert_array_equal(got, [[10], [-1]] * 2)


def test_wide_tables(x64):
    """Loads of NumPy make tables of int64; the layer's numbers stay as they are."""
    wide = jax.tree.map(np.int64, plan_placement(SKEWED, num_ranks=4, num_slots=12))
    params, x = jax.tree.map(jnp.float32, skewed_layer(LAYER))
    mesh = CPU_FFI.mesh(expert=4)
    want, _ = jax_ep.sharded_moe(x, params, LAYER, mesh=mesh)
    got, _ = jax_ep.sharded_moe(x, params, LAYER, mesh=mesh, placement=wide)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# A layer of linear experts: enough to see every gradient.
def layer(x, ids, weights, kernel, bias, placement, *, implementation):
    num_experts = kernel.shape[0] * jax.lax.axis_size("expert")
    params = dict(kernel=kernel, bias=bias)
    if placement is not None:
        num_experts = placement.num_slots
        ids = place_topk(ids, placement)
        params = place_params(params, placement, implementation=implementation)
    handle = jax_ep.dispatch_layout(
        ids, num_experts=num_experts, implementation=implementation
    )
    recv_x, recv_weights = jax_ep.dispatch(x, handle, weights)
    y = jax.lax.ragged_dot(recv_x, params["kernel"], handle.group_sizes)
    of_row = jnp.repeat(
        params["bias"], handle.group_sizes, axis=0, total_repeat_length=y.shape[0]
    )
    y = (jnp.tanh(y) + of_row) * recv_weights[:, None]
    return jax_ep.combine(y, handle)


@pytest.mark.jax_version
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "params_spec", [P("expert"), P()], ids=["sharded", "replicated"]
)
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_gradients_are_summed_over_replicas(implementation, params_spec, check_vma):
    ranks, tokens, topk, hidden, experts = 4, 12, 2, 3, 8
    random = np.random.default_rng(1)
    n = ranks * tokens
    x = random.normal(size=(n, hidden)).astype(np.float32)
    ids = random.choice(experts, (n, topk), p=SKEWED / SKEWED.sum()).astype(np.int32)
    ids[::7, 1] = -1
    weights = random.random((n, topk)).astype(np.float32)
    kernel = random.normal(size=(experts, hidden, hidden)).astype(np.float32)
    bias = random.normal(size=(experts, hidden)).astype(np.float32)
    target = random.normal(size=(n, hidden)).astype(np.float32)
    placement = plan_placement(
        np.bincount(ids[ids >= 0], minlength=experts), num_ranks=ranks, num_slots=12
    )
    assert placement.num_replicas.max() > 2

    def make(placement):
        def call(x, ids, weights, kernel, bias):
            if placement is None and params_spec == P():
                rank = jax.lax.axis_index("expert")
                local = experts // ranks
                kernel, bias = (
                    jax.lax.dynamic_slice_in_dim(a, rank * local, local)
                    for a in (kernel, bias)
                )
            return layer(
                x, ids, weights, kernel, bias, placement, implementation=implementation
            )

        spec = (P("expert"), P("expert"), P("expert"), params_spec, params_spec)
        run = on_ranks(call, ranks, spec, check_vma=check_vma)

        def loss(x, weights, kernel, bias):
            out = run(x, ids, weights, kernel, bias)
            return jnp.sum((out - target) ** 2), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))

    (_, want_out), want = make(None)(x, weights, kernel, bias)
    (_, got_out), got = make(placement)(x, weights, kernel, bias)
    np.testing.assert_allclose(got_out, want_out, rtol=1e-5, atol=1e-5)
    for name, g, w in zip(("x", "weights", "kernel", "bias"), got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4, err_msg=name)
        assert np.abs(w).max() > 0.1, name


def test_placed_parameters_are_those_of_the_slots():
    ranks, experts = 4, 8
    placement = plan_placement(SKEWED, num_ranks=ranks, num_slots=16)
    params = dict(
        wi=np.arange(experts * 6, dtype=np.float32).reshape(experts, 2, 3),
        bias=np.arange(experts, dtype=np.float16)[:, None],
    )
    for spec in (P("expert"), P()):
        place = on_ranks(place_params, ranks, (spec, P()))
        got = place(params, placement)
        for name, value in params.items():
            np.testing.assert_array_equal(got[name], value[placement.phys_to_log])


def test_a_new_plan_compiles_nothing():
    ranks = 4
    compiled = []

    def call(ids, placement):
        compiled.append(1)
        return place_topk(ids, placement)

    place = on_ranks(call, ranks, (P("expert"), P()))
    ids = np.zeros((ranks * 3, 1), np.int32)
    for loads in (SKEWED, SKEWED[::-1], np.ones(8)):
        place(ids, plan_placement(loads, num_ranks=ranks, num_slots=12))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("shapes", "num_ranks", "num_slots", "message"),
    [
        (
            [(5, 2)],
            4,
            12,
            "jax_ep.place_params: params['a'] must have 2 or 8 experts first, and has "
            "shape (5, 2).",
        ),
        (
            [(2, 2), (8, 2)],
            4,
            12,
            "jax_ep.place_params: params must have either 2 or 8 experts in every "
            "array, and has both.",
        ),
        (
            [(2, 2)],
            4,
            10,
            "jax_ep.place_params: the placement's 10 slots must be divisible by the 4 "
            'ranks of axis "expert".',
        ),
    ],
)
def test_place_params_messages(shapes, num_ranks, num_slots, message):
    placement = plan_placement(SKEWED, num_ranks=2, num_slots=num_slots)
    params = {name: jnp.zeros(shape) for name, shape in zip("ab", shapes, strict=False)}
    place = on_ranks(place_params, num_ranks, (P(), P()))
    with pytest.raises(ValueError) as error:
        place(params, placement)
    assert str(error.value) == message


LAYER = jax_ep.MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=6,
    moe_intermediate_size=4,
    num_shared_experts=1,
    load_balance_loss_weight=0.01,
)


def skewed_layer(config):
    params = jax_ep.init_params(jax.random.key(0), config)
    kernel = params.router_kernel.at[:, 0].set(0.5)
    x = jax.random.normal(jax.random.key(1), (8, 8, config.hidden_size)) + 1
    return dataclasses.replace(params, router_kernel=kernel), x


@pytest.mark.parametrize(
    "settings",
    [{}, dict(capacity_factor=0.5, dropless_fallback=True), dict(mlp_bias=True)],
    ids=["dropless", "in rounds", "biases"],
)
def test_the_layer_with_a_placement(settings):
    config = dataclasses.replace(LAYER, **settings)
    params, x = skewed_layer(config)
    mesh = CPU_FFI.mesh(data=2, expert=4)

    def run(placement):
        def loss(params, x):
            out, stats = jax_ep.sharded_moe(
                x, params, config, mesh=mesh, placement=placement
            )
            return jnp.sum(jnp.sin(3 * out)) + stats.aux_loss, (out, stats)

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (out, stats)), grads = jax.jit(grad)(params, x)
        return (out, grads), stats

    want, before = run(None)
    placement = plan_placement(before.expert_load, num_ranks=4, num_slots=12)
    got, after = run(placement)
    np.testing.assert_array_equal(after.expert_load, before.expert_load)
    assert int(after.num_dropped.sum()) == 0
    uneven, even = (np.asarray(stats.num_recv) for stats in (before, after))
    assert even.max() / even.mean() < 1.15 < uneven.max() / uneven.mean()
    for (path, g), w in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True
    ):
        scale = np.abs(w).max() + 1e-30
        np.testing.assert_allclose(
            g / scale, w / scale, atol=1e-5, err_msg=jax.tree_util.keystr(path)
        )


def test_flax_layers_take_a_placement():
    flax = pytest.importorskip("flax", reason='needs the extra "flax"')
    from jax_ep import linen, nnx

    params, x = skewed_layer(LAYER)
    mesh = CPU_FFI.mesh(expert=4)
    want, stats = jax_ep.sharded_moe(x, params, LAYER, mesh=mesh)
    placement = plan_placement(stats.expert_load, num_ranks=4, num_slots=12)
    values = {name: value for name, value in vars(params).items() if value is not None}
    layer = nnx.MoE(LAYER, mesh=mesh, rngs=flax.nnx.Rngs(0))
    for name, value in values.items():
        getattr(layer, name).set_value(value)
    got = layer(x, placement=placement)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    got = linen.MoE(LAYER, mesh=mesh).apply(dict(params=values), x, placement=placement)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_replicas_of_the_own_domain_keep_rows_in_it():
    """Every expert has a replica in each of two domains: no row need leave its own."""
    experts = np.arange(8, dtype=np.int32)
    placement = jax_ep.Placement(
        np.tile(experts, 2),
        np.stack([experts, experts + 8], 1),
        np.full(8, 2, np.int32),
    )
    ids = np.random.default_rng(0).integers(0, 8, (8 * 32, 2)).astype(np.int32)
    spec = P("expert")

    def crossings(size):
        place = jax.jit(
            jax.shard_map(
                lambda ids: place_topk(ids, placement, domain_size=size),
                mesh=CPU_FFI.mesh(expert=8),
                in_specs=spec,
                out_specs=spec,
            )
        )
        slots = np.asarray(place(ids))
        np.testing.assert_array_equal(np.asarray(placement.phys_to_log)[slots], ids)
        source = np.arange(8).repeat(32)[:, None] // 4
        away = slots // 8 != source
        return int(away.any(axis=1).sum()), np.bincount(slots.ravel(), minlength=16)

    without, _ = crossings(None)
    within, shares = crossings(4)
    assert within == 0 < without
    # And each replica still has its share of its domain's rows.
    for domain in range(2):
        mine = ids[domain * 128 : domain * 128 + 128].ravel()
        of_domain = np.asarray(placement.phys_to_log)[domain * 8 : domain * 8 + 8]
        for slot, expert in enumerate(of_domain):
            assert shares[domain * 8 + slot] == (mine == expert).sum()
