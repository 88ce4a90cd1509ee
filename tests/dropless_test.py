"""Dropless rounds: the layer with enough capacity, at the memory of a small one."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI, CPU_XLA, Backend
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import ffi
from jax_ep.dropless import in_rounds


@dataclasses.dataclass(frozen=True)
class Case:
    ranks: int = 4
    tokens: int = 8
    topk: int = 2
    experts: int = 8
    hidden: int = 3
    alignment: int = 1

    def arrays(self, seed: int = 0):
        random = np.random.default_rng(seed)
        n, h = self.ranks * self.tokens, self.hidden

        def normal(*shape):
            return random.normal(size=shape).astype(np.float32)

        ids = random.zipf(1.5, (n, self.topk)).clip(max=self.experts) - 1
        ids[random.random(ids.shape) < 0.1] = -1
        return dict(
            params=dict(
                kernel=normal(self.experts, h, h), rows=normal(self.experts, h)
            ),
            x=normal(n, h),
            weights=random.random((n, self.topk)).astype(np.float32),
            bias=normal(n, h),
            ids=ids.astype(np.int32),
        )


def linear_experts(params, x, weights, handle, bias):
    recv_x, recv_weights = jax_ep.dispatch(x, handle, weights)
    y = jax.lax.ragged_dot(recv_x, params["kernel"], handle.group_sizes)
    rows = jnp.repeat(
        params["rows"], handle.group_sizes, axis=0, total_repeat_length=y.shape[0]
    )
    y = jnp.tanh(y + rows)
    if recv_weights is not None:
        y *= recv_weights[:, None]
    return jax_ep.combine(y, handle, bias=bias)


def make(
    case: Case,
    backend: Backend,
    capacity: int | None,
    *,
    layer=linear_experts,
    check_vma=True,
    wrap=lambda function: function,
    rounds=True,
    max_rounds=None,
):
    """Jitted loss, (out, handle, rounds) and gradients of one layer on all ranks."""

    def local(params, x, weights, bias, ids):
        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=case.experts,
            capacity=capacity,
            expert_alignment=case.alignment,
            implementation=backend.implementation,
        )
        if not rounds:
            return layer(params, x, weights, handle, bias), handle, None
        out, info = in_rounds(
            layer, params, x, ids, weights, handle, bias=bias, max_rounds=max_rounds
        )
        return out, handle, info

    run = jax.shard_map(
        wrap(local),
        mesh=backend.mesh(expert=case.ranks),
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=check_vma,
    )

    def loss(params, x, weights, bias, ids):
        out, handle, info = run(params, x, weights, bias, ids)
        return jnp.sum(jnp.sin(3 * out)), (out, handle, info)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


def assert_close(got, want):
    for (path, g), w in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            g, w, rtol=2e-5, atol=2e-5, err_msg=jax.tree_util.keystr(path)
        )


WRAPS = {
    "plain": lambda function: function,
    "remat": jax.checkpoint,
    "remat names": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names(
            "jax_ep_handle", "jax_ep_recv", "jax_ep_out"
        ),
    ),
}


@pytest.mark.jax_version
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_equals_the_dropless_layer(check_vma, wrap):
    case = Case()
    arrays = case.arrays()
    options = dict(check_vma=check_vma, wrap=WRAPS[wrap])
    (_, want), want_grads = make(case, CPU_FFI, None, rounds=False)(*arrays.values())
    (_, got), grads = make(case, CPU_FFI, 6, **options)(*arrays.values())
    assert np.asarray(got[1].num_dropped)[:4].max() > 6
    assert (np.asarray(got[2].num_dropped) == 0).all()
    demand = np.asarray(want[1].num_recv)[:4].max()
    assert (np.asarray(got[2].num_rounds) == -(-demand // 6)).all()
    assert_close(got[0], want[0])
    assert_close(grads, want_grads)


@pytest.mark.parametrize("backend", [CPU_FFI, CPU_XLA], ids=["ffi", "xla"])
@pytest.mark.parametrize("capacity", [4, 8, 20])
def test_alignment(backend, capacity):
    case = Case(alignment=4)
    arrays = case.arrays(1)
    (_, want), want_grads = make(case, backend, None, rounds=False)(*arrays.values())
    (_, got), grads = make(case, backend, capacity)(*arrays.values())
    assert np.asarray(got[1].num_dropped).max() > 0
    assert (np.asarray(got[2].num_dropped) == 0).all()
    assert_close(got[0], want[0])
    assert_close(grads, want_grads)


def test_worst_case_bound_is_enough():
    # All of its rounds are needed where every slot goes to one expert, and no routing
    # needs more.
    case = Case(tokens=5, alignment=4)
    run = make(case, CPU_XLA, 12)
    arrays = case.arrays()
    most = -(-(case.ranks * case.tokens * case.topk + 2 * 3) // 12)
    for seed in range(12):
        random = np.random.default_rng(seed)
        arrays["ids"] = random.choice(
            random.integers(0, 8, 1 + seed % 4), arrays["ids"].shape
        ).astype(np.int32)
        (_, (_, _, info)), _ = run(*arrays.values())
        assert (np.asarray(info.num_dropped) == 0).all()
        assert np.asarray(info.num_rounds).max() <= most
    arrays["ids"][:] = 3
    (_, (_, _, info)), _ = run(*arrays.values())
    assert (np.asarray(info.num_dropped) == 0).all()
    assert (np.asarray(info.num_rounds) == most).all()


def test_what_the_last_round_drops_is_counted():
    case = Case()
    arrays = case.arrays()
    arrays["ids"][:] = 0  # 64 rows for rank 0.
    (_, (out, handle, info)), grads = make(case, CPU_FFI, 6, max_rounds=3)(
        *arrays.values()
    )
    np.testing.assert_array_equal(handle.num_dropped[:4], [58, 0, 0, 0])
    np.testing.assert_array_equal(info.num_dropped.reshape(4, 4), [[46, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(info.num_rounds, [3] * 4)
    # Tokens that no round took have their bias, and no gradient.
    (_, (want, _, _)), _ = make(case, CPU_FFI, None, rounds=False)(*arrays.values())
    untouched = (np.asarray(out) == arrays["bias"]).all(axis=1)
    whole = np.isclose(out, want, rtol=1e-5, atol=1e-5).all(axis=1)
    # 18 slots, 3 rounds of 6 rows each, the first (token, k) of the sources first.
    assert whole.sum() >= 6 and untouched.sum() >= 18
    assert (np.asarray(grads[1])[untouched] == 0).all()
    assert (np.asarray(grads[2])[untouched] == 0).all()


def counted(layer, counter):
    def call(params, x, weights, handle, bias):
        jax.debug.callback(lambda _: counter.update(["round"]), handle.num_invalid)
        return layer(params, x, weights, handle, bias)

    return call


def test_a_step_without_overflow_runs_one_round():
    case = Case()
    arrays = case.arrays()
    for capacity, num_rounds in ((64, 1), (20, 2)):
        counter = collections.Counter()
        run = make(case, CPU_FFI, capacity, layer=counted(linear_experts, counter))
        (_, (_, _, info)), _ = jax.block_until_ready(run(*arrays.values()))
        jax.effects_barrier()
        np.testing.assert_array_equal(info.num_rounds, [num_rounds] * 4)
        # Forward once a round; the backward computes every round but the first again.
        assert counter["round"] == case.ranks * (2 * num_rounds - 1)


@pytest.mark.jax_version
def test_what_each_round_exchanges():
    run = make(Case(), CPU_FFI, 6)
    text = run.lower(*Case().arrays().values()).compile().as_text()
    calls = {
        target: text.count(f'custom_call_target="{target}"') for target in ffi.TARGETS
    }
    assert calls == {
        # The handle's own, and one in each of the two loops.
        "jax_ep_layout": 3,
        # First round: forward, and d_out. Loops: forward; forward and d_out.
        "jax_ep_dispatch": 5,
        # The same, without a forward in the backward's loop: nobody reads it.
        "jax_ep_combine": 4,
    }


@pytest.mark.jax_version
def test_remat_by_names_repeats_no_exchange():
    text = make(Case(), CPU_FFI, 6, wrap=WRAPS["remat names"])
    text = text.lower(*Case().arrays().values()).compile().as_text()
    assert text.count('custom_call_target="jax_ep_layout"') == 3
    assert text.count('custom_call_target="jax_ep_dispatch"') == 5
    assert text.count('custom_call_target="jax_ep_combine"') == 4


def test_memory_is_that_of_the_capacity():
    case = Case(tokens=256, hidden=256)
    arrays = case.arrays()

    def temp_bytes(capacity, rounds):
        run = (
            make(case, CPU_FFI, capacity, rounds=rounds)
            .lower(*arrays.values())
            .compile()
        )
        return run.memory_analysis().temp_size_in_bytes

    dropless = temp_bytes(None, False)  # 2048 rows.
    dropping = temp_bytes(256, False)
    in_rounds = temp_bytes(256, True)
    assert in_rounds < dropless / 2
    # A further round's rows come beside the first's, while nothing of those is left in
    # the backward but its sums.
    assert in_rounds < 2 * dropping


def test_groups_may_need_different_numbers_of_rounds():
    # Each data group decides by itself, unless the layer communicates over that axis.
    mesh = CPU_FFI.mesh(data=2, expert=4)
    arrays = Case(ranks=8).arrays()
    arrays["ids"][:32] = np.arange(64).reshape(32, 2) % 8
    batch = P(("data", "expert"))

    def gathered(params, x, weights, handle, bias):
        params = jax.lax.all_gather(params, "data", axis=1, tiled=True)
        return linear_experts(params, x, weights, handle, bias)

    def make(layer, params_spec, other_axes, capacity):
        def local(params, x, weights, bias, ids):
            handle = jax_ep.dispatch_layout(ids, num_experts=8, capacity=capacity)
            out, info = in_rounds(
                layer,
                params,
                x,
                ids,
                weights,
                handle,
                bias=bias,
                other_axes=other_axes,
            )
            return out, info

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(params_spec, batch, batch, batch, batch),
            out_specs=batch,
        )

        def loss(params, x, weights, bias, ids):
            out, info = run(params, x, weights, bias, ids)
            return jnp.sum(jnp.sin(3 * out)), (out, info)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))

    arrays["params"] = {
        name: np.repeat(value, 2, axis=1)[:, : value.shape[1] - value.shape[1] % 2]
        for name, value in arrays["params"].items()
    }
    hidden = arrays["params"]["rows"].shape[1]
    arrays["params"]["kernel"] = arrays["params"]["kernel"][:, :hidden, :hidden]
    arrays["x"], arrays["bias"] = arrays["x"][:, :hidden], arrays["bias"][:, :hidden]
    (_, (want, _)), want_grads = make(linear_experts, P("expert"), (), 64)(
        *arrays.values()
    )
    apart = make(linear_experts, P("expert"), (), 16)
    together = make(gathered, P("expert", "data"), ("data",), 16)
    for run, rounds in ((apart, {1, 2}), (together, {2})):
        (_, (out, info)), grads = run(*arrays.values())
        per_group = np.asarray(info.num_rounds).reshape(2, 4)
        assert set(per_group.reshape(-1).tolist()) == rounds
        assert (per_group == per_group[:, :1]).all()
        assert_close(out, want)
        assert_close(grads, want_grads)


def scaled_rows(params, x, weights, handle, bias):
    """Experts that vmap can batch, which it cannot a ragged_dot."""
    recv_x, recv_weights = jax_ep.dispatch(x, handle, weights)
    rows = jnp.repeat(
        params["rows"], handle.group_sizes, axis=0, total_repeat_length=handle.capacity
    )
    y = jnp.tanh(recv_x * rows) * recv_weights[:, None]
    return jax_ep.combine(y, handle, bias=bias)


@pytest.mark.jax_version
def test_scan_and_vmap():
    case = Case()
    arrays = case.arrays()
    stacked = jax.tree.map(
        lambda leaf: np.stack([leaf, leaf[::-1], -leaf]), arrays["params"]
    )

    def one(layer, params, x, ids, weights, capacity):
        handle = jax_ep.dispatch_layout(ids, num_experts=8, capacity=capacity)
        return in_rounds(layer, params, x, ids, weights, handle)[0]

    def scanned(params, x, ids, weights, capacity):
        @jax.checkpoint
        def step(x, params):
            return x + one(linear_experts, params, x, ids, weights, capacity), None

        return jax.lax.scan(step, x, params)[0]

    def mapped(params, x, ids, weights, capacity):
        # Different routings: the lanes need different numbers of rounds.
        ids = jnp.stack([ids, jnp.zeros_like(ids), ids % 2])
        call = functools.partial(one, scaled_rows, capacity=capacity)
        return jax.vmap(call, (0, None, 0, None))(params, x, ids, weights).sum(axis=0)

    for function in (scanned, mapped):
        grads = []
        for capacity in (None, 6):
            run = jax.shard_map(
                functools.partial(function, capacity=capacity),
                mesh=CPU_FFI.mesh(expert=case.ranks),
                in_specs=(P(None, "expert"), *[P("expert")] * 3),
                out_specs=P("expert"),
            )
            loss = jax.jit(
                jax.grad(lambda *args, run=run: jnp.sum(run(*args) ** 2), (0, 1, 3))
            )
            grads.append(loss(stacked, arrays["x"], arrays["ids"], arrays["weights"]))
        assert_close(grads[1], grads[0])


def test_payloads_with_integers_and_no_weights():
    case = Case()
    arrays = case.arrays()
    mesh = CPU_FFI.mesh(expert=case.ranks)
    signs = (np.arange(len(arrays["x"])) % 3).astype(np.int8)

    def layer(params, x, weights, handle, bias):
        (rows, signs), _ = jax_ep.dispatch(x, handle, weights)
        rows *= signs.astype(jnp.float32)[:, None]
        return linear_rows(params, rows, handle, bias)

    def linear_rows(params, rows, handle, bias):
        y = jax.lax.ragged_dot(rows, params["kernel"], handle.group_sizes)
        return jax_ep.combine(y, handle, bias=bias)

    def loss(params, x, capacity):
        def local(params, x, signs, ids):
            handle = jax_ep.dispatch_layout(ids, num_experts=8, capacity=capacity)
            return in_rounds(layer, params, (x, signs), ids, None, handle)[0]

        run = jax.shard_map(
            local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
        )
        return jnp.sum(run(params, x, signs, arrays["ids"]) ** 2)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    got = grad(arrays["params"], arrays["x"], 6)
    assert_close(got, grad(arrays["params"], arrays["x"], None))


def test_the_layer_uses_it():
    """`moe` with a capacity and `dropless_fallback` is `moe` without a capacity."""
    config = jax_ep.MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        hidden_size=6,
        moe_intermediate_size=4,
        num_shared_experts=1,
        load_balance_loss_weight=0.01,
    )
    params = jax_ep.init_params(jax.random.key(0), config)
    # Most tokens like the experts of the first rank.
    kernel = params.router_kernel.at[:, :2].set(0.5)
    params = dataclasses.replace(params, router_kernel=kernel)
    x = jax.random.normal(jax.random.key(1), (4, 8, 6)) + 1
    mesh = CPU_FFI.mesh(expert=4)

    def run(**settings):
        this = dataclasses.replace(config, **settings)

        def loss(params, x):
            out, stats = jax_ep.sharded_moe(x, params, this, mesh=mesh)
            return jnp.sum(jnp.sin(3 * out)) + stats.aux_loss, (out, stats)

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (out, stats)), grads = jax.jit(grad)(params, x)
        return out, grads, stats

    want, want_grads, _ = run()
    _, _, dropping = run(capacity_factor=0.5)
    assert int(dropping.num_dropped.sum()) > 0
    out, grads, stats = run(capacity_factor=0.5, dropless_fallback=True)
    assert int(stats.num_dropped.sum()) == 0 and int(stats.num_rounds[0]) > 2
    assert_close(out, want)
    assert_close(grads, want_grads)
    _, _, two = run(capacity_factor=0.5, dropless_fallback=True, max_rounds=2)
    assert 0 < int(two.num_dropped.sum()) < int(dropping.num_dropped.sum())


def test_messages():
    case = Case()
    arrays = case.arrays()
    with pytest.raises(ValueError) as error:
        make(case, CPU_FFI, 6, max_rounds=0)(*arrays.values())
    assert str(error.value) == ("jax_ep.in_rounds: max_rounds (=0) must be at least 1.")

    def local(ids):
        handle = jax_ep.dispatch_layout(ids, num_experts=8)
        return in_rounds(linear_experts, {}, ids, ids[:, :1], None, handle)[0]

    with pytest.raises(ValueError) as error:
        jax.shard_map(
            local,
            mesh=CPU_FFI.mesh(expert=4),
            in_specs=P("expert"),
            out_specs=P("expert"),
        )(arrays["ids"])
    assert str(error.value) == (
        "jax_ep.in_rounds: topk_idx must have the handle's shape [T, K] = (8, 2), and "
        "has (8, 1)."
    )


def test_no_tokens_and_a_fallback():
    """Nor a capacity, so no further round."""
    config = jax_ep.MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        hidden_size=4,
        moe_intermediate_size=4,
        capacity_factor=1.0,
        dropless_fallback=True,
    )
    params = jax_ep.init_params(jax.random.key(0), config)
    mesh = CPU_FFI.mesh(expert=4)
    layer = jax.jit(lambda x: jax_ep.sharded_moe(x, params, config, mesh=mesh))
    out, stats = layer(np.zeros((0, 3, 4), np.float32))
    assert out.shape == (0, 3, 4)
    assert stats.num_rounds.tolist() == [1] and not stats.num_dropped.any()


@pytest.mark.parametrize("other_axes", [(), ("tensor",)])
def test_a_layer_that_adds_up_over_another_axis(other_axes):
    """Its output is the same on that axis, after rounds as after one."""
    case = Case(ranks=2)
    arrays = case.arrays()
    mesh = CPU_FFI.mesh(expert=2, tensor=2)

    def halves(params, x, weights, handle, bias):
        recv_x, recv_weights = jax_ep.dispatch(x, handle, weights)
        kernel = params["kernel"]  # Half of the columns.
        y = jax.lax.ragged_dot(recv_x, kernel, handle.group_sizes)
        first = params["first"][0] * kernel.shape[2]
        y = jax.lax.dynamic_update_slice_in_dim(
            jax.lax.pcast(jnp.zeros_like(recv_x), "tensor", to="varying"), y, first, 1
        )
        y = jax.lax.psum(y, "tensor") * recv_weights[:, None]
        return jax_ep.combine(y, handle, bias=bias)

    def run(capacity):
        def local(kernel, first, x, weights, ids):
            handle = jax_ep.dispatch_layout(
                ids, num_experts=case.experts, capacity=capacity
            )
            params = dict(kernel=kernel, first=first)
            if capacity is None:
                return halves(params, x, weights, handle, None)
            return in_rounds(
                halves, params, x, ids, weights, handle, other_axes=other_axes
            )[0]

        layer = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("expert", None, "tensor"), P("tensor"), *[P("expert")] * 3),
            out_specs=P("expert"),
        )
        kernel = np.concatenate([arrays["params"]["kernel"]] * 2, axis=2)[:, :, :4]
        x = np.concatenate([arrays["x"]] * 2, axis=1)[:, :4]
        kernel = np.concatenate([kernel] * 2, axis=1)[:, :4]

        def loss(kernel, x, weights):
            first = np.arange(2, dtype=np.int32)
            return jnp.sin(3 * layer(kernel, first, x, weights, arrays["ids"])).sum()

        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
        return jax.jit(gradient)(kernel, x, arrays["weights"])

    assert_close(run(4), run(None))
