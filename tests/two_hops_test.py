"""Several NVLink domains: rows by two hops, against one domain and a literal loop.

Of the custom calls, `two_hops_property_test.py` has more shapes and any routing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from conftest import CPU_FFI, CPU_XLA
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import two_hops

RANKS = 8
DOMAINS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # G, D

pytestmark = pytest.mark.filterwarnings("ignore:jax_ep.dispatch_layout. every token")


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int = 12
    topk: int = 3
    experts: int = 16
    width: int = 5
    capacity: int | None = None
    alignment: int = 1
    dtype: str = "float32"
    wire: str | None = None
    factor: float | None = None

    def __str__(self):
        told = dataclasses.asdict(self)
        return "-".join(
            f"{name}{value}"
            for name, value in told.items()
            if value != getattr(Case(), name)
        )

    def arrays(self, integers: bool, seed: int = 0):
        random = np.random.default_rng(seed)
        share = random.permutation((1.0 + np.arange(self.experts)) ** -0.7)
        shape = (RANKS, self.tokens, self.topk)
        ids = random.choice(self.experts, size=shape, p=share / share.sum())
        ids = ids.astype(np.int32)
        ids[random.random(shape) < 0.15] = -1
        ids[random.random(shape) < 0.05] = self.experts + 2
        ids[3] = -1
        rows = (RANKS, self.tokens, self.width)
        if integers:
            x, bias = random.integers(-8, 9, (2, *rows))
            weights = random.integers(1, 5, shape)
        else:
            x, bias = random.standard_normal((2, *rows))
            weights = random.random(shape)
        dtype = jnp.dtype(self.dtype)
        return x.astype(dtype), ids, weights.astype(np.float32), bias.astype(dtype)


def run(case, domain_size, arrays, backend=CPU_FFI):
    """Handle, rows, output and gradients, with the ranks' axis in front."""

    def body(x, ids, weights, bias):
        def total(x, weights, bias):
            handle = jax_ep.dispatch_layout(
                ids,
                num_experts=case.experts,
                domain_size=domain_size,
                network_capacity_factor=case.factor,
                capacity=case.capacity,
                expert_alignment=case.alignment,
                implementation=backend.implementation,
                wire=case.wire,
                grad_wire=case.wire,
            )
            rows, recv = jax_ep.dispatch(x, handle, weights)
            y = (rows.astype(jnp.float32) * recv[:, None]).astype(x.dtype)
            out = jax_ep.combine(y, handle, bias=bias)
            scale = jnp.arange(1, case.width + 1, dtype=jnp.float32)[None]
            return (out.astype(jnp.float32) * scale).sum(), (handle, rows, recv, out)

        (_, results), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(
            x, weights, bias
        )
        return results, gradients

    mesh = backend.mesh(expert=RANKS)
    spec = P("expert")
    call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    flat = [a.reshape(-1, a.shape[-1]) for a in arrays]
    results = call(*flat)
    return jax.tree.map(
        lambda a: np.asarray(a).reshape(RANKS, a.shape[0] // RANKS, *a.shape[1:]),
        results,
    )


def same(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


CASES = [
    Case(capacity=24, alignment=4, topk=2),
    Case(tokens=1, topk=1),
    Case(dtype="bfloat16", alignment=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size, num", DOMAINS)
def test_integers_equal_one_domains(case, size, num):
    """Rows in another order, and everything that a token sees the same bits."""
    arrays = case.arrays(integers=True)
    (flat, rows, recv, out), gradients = run(case, None, arrays)
    (handle, got_rows, got_recv, got), got_gradients = run(case, size, arrays)
    for name in ("slot_rank", "num_recv", "num_dropped", "num_invalid"):
        same(getattr(handle, name), getattr(flat, name))
    for name in ("group_sizes", "group_counts", "group_offsets"):
        same(getattr(handle, name), getattr(flat, name))
    kept = handle.slot >= 0
    if case.capacity is None:
        same(kept, flat.slot >= 0)
        same((got, got_gradients), (out, gradients))
    same(kept.sum(), (flat.slot >= 0).sum())
    assert (handle.hop is None) == (num == 1)
    del rows, recv, got_rows, got_recv


def two_hop_order(ids, case, size):
    """A literal layout whose sources are the R ranks in the order of the second hop.

    The sources of an expert are (rail, source domain): rank d*G + g is number g*D + d.
    """
    order = np.array(
        [d * size + g for g in range(size) for d in range(RANKS // size)], np.int32
    )
    found = literal.layout(ids[order], case.experts, case.capacity, case.alignment)
    slot, slot_rank = np.empty_like(found.slot), np.empty_like(found.slot_rank)
    slot[order], slot_rank[order] = found.slot, found.slot_rank
    recv_slot = np.empty_like(found.recv_slot)
    recv_slot[:, order] = found.recv_slot
    return dataclasses.replace(
        found, slot=slot, slot_rank=slot_rank, recv_slot=recv_slot
    )


def two_hop_combine(y, layout, bias, size, wire):
    """Partials by rank, sums by domain, both in order, as a loop."""
    num_tokens = layout.slot.shape[1]
    out = np.zeros((RANKS, num_tokens, y.shape[2]), y.dtype)
    wire = np.dtype(wire or y.dtype)
    for source, token in np.ndindex(RANKS, num_tokens):
        owners, rows = layout.slot_rank[source, token], layout.slot[source, token]
        slots = list(zip(owners, rows, strict=True))
        total = np.zeros(y.shape[2], np.float32)
        for domain in range(RANKS // size):
            of_domain = np.zeros(y.shape[2], np.float32)
            for rank in range(domain * size, domain * size + size):
                partial = np.zeros(y.shape[2], np.float32)
                for owner, row in slots:
                    if owner == rank and row >= 0:
                        partial = partial + y[rank, row].astype(np.float32)
                of_domain = of_domain + partial.astype(wire).astype(np.float32)
            total = total + of_domain.astype(wire).astype(np.float32)
        total = total + bias[source, token].astype(np.float32)
        out[source, token] = total.astype(y.dtype)
    return out


@pytest.mark.parametrize("size", [4, 1])
def test_rows_and_sums_of_the_reference_are_the_literal_ones(size):
    case = Case(dtype="bfloat16", capacity=20, alignment=4)
    arrays = case.arrays(integers=False)
    x, ids, weights, bias = arrays
    (handle, rows, recv, out), (dx, dw, db) = run(case, size, arrays, CPU_XLA)
    want = two_hop_order(ids, case, size)
    for name in ("slot", "slot_rank", "group_sizes", "group_counts", "group_offsets"):
        same(getattr(handle, name), getattr(want, name))
    same(handle.num_dropped, want.num_dropped)
    same(rows, literal.dispatch(x, want))
    same(recv, literal.dispatch_weights(weights, want))
    y = (rows.astype(np.float32) * recv[..., None]).astype(x.dtype)
    same(out, two_hop_combine(y, want, bias, size, case.wire))
    scale = np.arange(1, case.width + 1, dtype=np.float32)
    d_out = np.broadcast_to(scale, x.shape).astype(x.dtype)
    d_rows = literal.dispatch(d_out, want).astype(np.float32)
    d_recv_x = (d_rows * recv[..., None]).astype(x.dtype)
    same(dx, two_hop_combine(d_recv_x, want, np.zeros_like(bias), size, case.wire))
    same(db, d_out)
    d_recv = (rows.astype(np.float32) * d_rows).sum(-1)
    expected = np.zeros_like(dw)
    for source, token, k, owner, row in want.kept_slots():
        expected[source, token, k] = d_recv[owner, row]
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor, room", [(0.25, 2), (1.0, 6), (10.0, 12)])
def test_tokens_without_room_between_domains_are_dropped_and_counted(factor, room):
    """Two domains, 12 tokens, one expert each: 6 of 12 expected to go to a domain."""
    case = Case(topk=1, factor=factor)
    arrays = case.arrays(integers=True)
    _, ids, _, bias = arrays
    (handle, _, _, out), _ = run(case, 4, arrays)
    exchange = jax_ep.Exchange(
        num_experts=16, domain_size=4, network_capacity_factor=factor
    )
    assert two_hops.places(exchange, RANKS, 12, 1) == room
    ids = ids[..., 0]
    valid = (ids >= 0) & (ids < 16)
    has_room = np.zeros_like(valid)
    for rank, domain in np.ndindex(RANKS, 2):
        tokens = np.flatnonzero(valid[rank] & (ids[rank] // 8 == domain))
        has_room[rank, tokens[:room]] = True
    same(handle.slot[..., 0] >= 0, has_room)
    lost = np.bincount(ids[valid & ~has_room] // 2, minlength=RANKS)
    same(handle.num_dropped, np.broadcast_to(lost, (RANKS, RANKS)))
    assert lost.any() == (room < 12)
    same(out[~has_room], bias[~has_room])


def test_rounds_deliver_what_had_no_room():
    case = Case(topk=2, factor=0.3, capacity=8)
    x, ids, weights, _ = case.arrays(integers=True)

    def body(x, ids, weights):
        def layer(params, x, weights, handle, bias):
            del params
            rows, recv = jax_ep.dispatch(x, handle, weights)
            return jax_ep.combine(rows * recv[:, None], handle, bias=bias)

        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=16,
            domain_size=2,
            network_capacity_factor=case.factor,
            capacity=case.capacity,
        )
        out, rounds = jax_ep.in_rounds(layer, (), x, ids, weights, handle)
        return out, rounds.num_dropped, rounds.num_rounds

    spec = P("expert")
    call = jax.jit(
        jax.shard_map(
            body, mesh=CPU_FFI.mesh(expert=RANKS), in_specs=spec, out_specs=spec
        )
    )
    flat = [a.reshape(-1, a.shape[-1]) for a in (x, ids, weights)]
    out, dropped, rounds = call(*flat)
    valid = (ids >= 0) & (ids < 16)
    expected = x * np.where(valid, weights, 0).sum(-1, keepdims=True)
    same(out, expected.reshape(-1, case.width))
    assert not np.asarray(dropped).any() and rounds[0] > 2


def test_a_layer_with_and_without_domains():
    config = jax_ep.MoEConfig(
        num_experts=16,
        num_experts_per_tok=3,
        hidden_size=8,
        moe_intermediate_size=4,
        load_balance_loss_weight=0.1,
    )
    params = jax_ep.init_params(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (16, 4, 8))

    def loss(params, x, config, mesh):
        out, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh)
        return (out**2).mean() + stats.aux_loss

    flat = jax.value_and_grad(loss)(params, x, config, CPU_FFI.mesh(expert=8))
    hops = dataclasses.replace(config, domain_size=2)
    for mesh in (CPU_FFI.mesh(expert=8), CPU_FFI.mesh(data=2, expert=4)):
        found = jax.value_and_grad(loss)(params, x, hops, mesh)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(flat), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_transformations():
    """Under vmap, scan, remat with its names, and a tuple of axes."""
    x = jnp.asarray(Case().arrays(integers=True)[0])
    ids = jnp.asarray(Case().arrays(integers=True)[1])
    mesh = CPU_FFI.mesh(dcn=2, ici=4)

    def exchange(x, ids, size):
        handle = jax_ep.dispatch_layout(
            ids, num_experts=16, axis_name=("dcn", "ici"), domain_size=size
        )
        return jax_ep.combine(jax_ep.dispatch(x, handle)[0], handle)

    def body(x, ids, size):
        def twice(x):
            return jax.vmap(lambda x: exchange(x, ids, size))(jnp.stack([x, 2 * x]))

        def scanned(x):
            policy = jax.checkpoint_policies.save_only_these_names("jax_ep_handle")
            step = jax.checkpoint(
                lambda x, _: (exchange(x, ids, size), None), policy=policy
            )
            return jax.lax.scan(step, x, None, length=2)[0]

        gradient = jax.grad(lambda x: scanned(x).sum())(x)
        return twice(x).sum(0), scanned(x), gradient

    spec = P(("dcn", "ici"))
    flat = x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1])
    results = [
        jax.jit(
            jax.shard_map(
                lambda x, ids, s=size: body(x, ids, s),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
            )
        )(*flat)
        for size in (None, 4)
    ]
    same(*results)


@pytest.mark.parametrize("slots, experts", [(1, 1), (31, 4), (64, 2), (1000, 40)])
def test_slots_are_numbered_without_a_sort(slots, experts):
    """Which number a slot is of its expert, the last being no expert; by a loop."""
    expert = np.random.default_rng(slots).integers(experts + 1, size=(3, slots))
    call = jax.jit(
        jax.vmap(lambda e: two_hops.count_and_number(e, num_experts=experts))
    )
    counts, numbers = call(expert.astype(np.int32))
    for row, count, number in zip(expert, counts, numbers, strict=True):
        seen = [0] * (experts + 1)
        for slot, of in enumerate(row):
            assert number[slot] == seen[of]
            seen[of] += 1
        same(count, np.array(seen[:-1]))
    text = call.lower(expert.astype(np.int32)).compile().as_text()
    assert " sort(" not in text


@pytest.mark.parametrize(
    "told, message",
    [
        (
            dict(domain_size=3),
            "jax_ep.dispatch_layout: domain_size (=3) must divide the 8 ranks of axis "
            '"expert".',
        ),
        (
            dict(domain_size=0),
            "jax_ep.dispatch_layout: domain_size (=0) must be at least 1.",
        ),
        (
            dict(domain_size=4, network_capacity_factor=-1.0),
            "jax_ep.dispatch_layout: network_capacity_factor (=-1.0) must be positive "
            "and finite.",
        ),
        (
            dict(domain_size=4, network_capacity_factor=0.1),
            "jax_ep.dispatch_layout: network_capacity_factor (=0.1) must leave room "
            "for a token: at least 0.5 with 4 tokens.",
        ),
    ],
)
def test_refusals(told, message):
    def body(ids):
        return jax_ep.dispatch_layout(ids, num_experts=16, **told).slot

    mesh = CPU_FFI.mesh(expert=RANKS)
    call = jax.shard_map(body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(call, jax.ShapeDtypeStruct((32, 1), jnp.int32))
    assert str(raised.value) == message


def test_many_domains_with_room_for_all_are_worth_a_warning():
    two_hops.warn_of_many_domains.cache_clear()
    with pytest.warns(UserWarning, match="every token has room in each of 8 domains"):
        run(Case(tokens=1), 1, Case(tokens=1).arrays(integers=True))


def test_placed_parameters_all_arrive_whatever_has_room_for_tokens():
    """Eight experts, two to a domain, and a second slot of each in the next domain."""
    order = np.roll(np.arange(8), -2)
    placement = jax_ep.Placement(
        np.concatenate([[e, order[e]] for e in range(8)]).astype(np.int32),
        np.stack(
            [sorted((2 * e, 2 * list(order).index(e) + 1)) for e in range(8)]
        ).astype(np.int32),
        np.full(8, 2, np.int32),
    )
    exchange = jax_ep.Exchange(
        num_experts=16, domain_size=2, network_capacity_factor=0.01
    )

    def body(params):
        return jax_ep.place_params(params, placement, exchange=exchange)

    params = np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    mesh, spec = CPU_FFI.mesh(expert=RANKS), P("expert")
    call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    same(call(params), params[placement.phys_to_log])


@pytest.mark.parametrize("tokens, factor", [(1, 8), (1024, 1.06)])
def test_layers_with_rounds_have_little_room_between_many_domains(tokens, factor):
    """One expert a domain and K = 1: an eighth of the tokens go to each."""
    told = jax_ep.Exchange(num_experts=8, domain_size=1)
    got = two_hops.for_rounds(told, RANKS, tokens, 1)
    assert got.network_capacity_factor == pytest.approx(factor)
    places = {1: 1, 1024: 136}  # 1.06 * 128 = 135.7
    assert two_hops.places(got, RANKS, tokens, 1) == places[tokens]
    few = dataclasses.replace(told, domain_size=2)
    assert two_hops.for_rounds(few, RANKS, tokens, 1) is few
