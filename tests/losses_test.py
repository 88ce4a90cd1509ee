"""Losses and statistics: values, ranks, masks, gradients."""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI, CPU_XLA
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.losses import (
    expert_counts,
    load_balance_loss,
    router_z_loss,
    selection_bias_update,
    sequence_load_balance_loss,
)

SEQUENCES, LENGTH, EXPERTS, TOPK = 8, 6, 8, 2


@pytest.fixture(scope="module")
def batch():
    """Logits, probabilities and ids of eight sequences."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((SEQUENCES, LENGTH, EXPERTS)).astype(np.float32)
    probs = dense.softmax(np, logits)
    ids = np.argsort(-probs, axis=2)[:, :, :TOPK].astype(np.int32)
    return logits, probs, ids


def flat(values):
    return values.reshape(-1, values.shape[-1])


def test_balanced_is_one():
    ids = np.arange(16, dtype=np.int32).reshape(8, 2) % EXPERTS
    probs = np.full((8, EXPERTS), 1 / EXPERTS, np.float32)
    assert load_balance_loss(probs, ids) == pytest.approx(1)


def test_one_expert_is_e():
    ids = np.zeros((5, 1), np.int32)
    probs = np.eye(EXPERTS, dtype=np.float32)[ids[:, 0]]
    assert load_balance_loss(probs, ids) == pytest.approx(EXPERTS)


def test_switch_equation_four(batch):
    # E * sum_e (fraction of tokens with argmax e) * (mean probability of e).
    _, probs, ids = batch
    probs, top1 = flat(probs), flat(ids)[:, :1]
    fraction = np.bincount(top1[:, 0], minlength=EXPERTS) / len(top1)
    expected = EXPERTS * (fraction * probs.mean(0)).sum()
    assert load_balance_loss(probs, top1) == pytest.approx(expected, rel=1e-5)


def test_values(batch):
    logits, probs, ids = batch
    expected = dense.balance_loss(flat(probs), flat(ids), EXPERTS)
    assert load_balance_loss(probs, ids) == pytest.approx(expected, rel=1e-5)
    by_sequence = [
        dense.balance_loss(p, i, EXPERTS) for p, i in zip(probs, ids, strict=True)
    ]
    assert sequence_load_balance_loss(probs, ids) == pytest.approx(
        np.mean(by_sequence), rel=1e-5
    )
    expected = dense.z_loss(np, flat(logits))
    assert router_z_loss(logits) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_over_ranks(batch, check_vma):
    """Same values and gradients when the sequences are split over two mesh axes."""
    logits, probs, ids = batch
    axes = ("data", "expert")

    def losses(logits, probs, ids, axis_name=()):
        return jnp.stack(
            [
                load_balance_loss(probs, ids, axis_name=axis_name),
                sequence_load_balance_loss(probs, ids, axis_name=axis_name),
                router_z_loss(logits, ids, axis_name=axis_name),
            ]
        )

    split = jax.shard_map(
        lambda *args: losses(*args, axis_name=axes),
        mesh=CPU_XLA.mesh(data=2, expert=4),
        in_specs=P(axes),
        out_specs=P(),
        check_vma=check_vma,
    )
    factors = jnp.array([1.0, 2.0, 3.0])

    def total(function, logits, probs):
        values = function(logits, probs, ids)
        return (factors * values).sum(), values

    def run(function):
        def loss(logits, probs):
            return total(function, logits, probs)

        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, values), gradients = jax.jit(gradient)(logits, probs)
        return values, gradients

    for one, two in zip(
        jax.tree.leaves(run(split)), jax.tree.leaves(run(losses)), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_masked_tokens_do_not_count(batch):
    logits, probs, ids = batch
    mask = np.arange(LENGTH) < np.arange(SEQUENCES)[:, None]  # One sequence is empty.
    masked_ids = np.where(mask[..., None], ids, -1)
    bad_probs = np.where(mask[..., None], probs, np.nan).astype(np.float32)
    bad_logits = np.where(mask[..., None], logits, np.nan).astype(np.float32)

    expected = dense.balance_loss(probs[mask], ids[mask], EXPERTS)
    assert load_balance_loss(bad_probs, masked_ids) == pytest.approx(expected, rel=1e-5)
    by_sequence = [
        dense.balance_loss(p[m], i[m], EXPERTS)
        for p, i, m in zip(probs, ids, mask, strict=True)
        if m.any()
    ]
    assert sequence_load_balance_loss(bad_probs, masked_ids) == pytest.approx(
        np.mean(by_sequence), rel=1e-5
    )
    expected = dense.z_loss(np, logits[mask])
    assert router_z_loss(bad_logits, masked_ids) == pytest.approx(expected, rel=1e-5)
    gradients = jax.grad(
        lambda logits, probs: (
            load_balance_loss(probs, masked_ids)
            + sequence_load_balance_loss(probs, masked_ids)
            + router_z_loss(logits, masked_ids)
        ),
        argnums=(0, 1),
    )(bad_logits, bad_probs)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[~mask].any()


def test_no_tokens_at_all():
    empty = np.zeros((0, EXPERTS), np.float32)
    assert load_balance_loss(empty, np.zeros((0, 2), np.int32)) == 0
    assert router_z_loss(empty) == 0


def test_counts():
    ids = np.array([[0, 3], [3, -1], [7, 8]], np.int32)
    assert expert_counts(ids, 8).tolist() == [1, 0, 0, 2, 0, 0, 0, 1]


def test_selection_bias_update():
    load = np.array([4, 0, 2, 2], np.int32)
    bias = np.array([0.5, 0.0, -0.5, 0.0], np.float32)
    np.testing.assert_allclose(
        selection_bias_update(bias, load, 0.01), [0.49, 0.01, -0.5, 0.0], rtol=1e-6
    )


def test_counts_beyond_int32():
    """2**29 rows at each of eight ranks, and as many layers."""
    config = jax_ep.MoEConfig(
        num_experts=8, num_experts_per_tok=2, hidden_size=4, moe_intermediate_size=4
    )

    def local(logits, ids):
        routing = jax_ep.topk_routing(logits, num_experts_per_tok=2)
        handle = jax_ep.dispatch_layout(ids, num_experts=8)
        handle = dataclasses.replace(
            handle,
            num_recv=0 * handle.num_recv + 2**29,
            num_dropped=0 * handle.num_dropped + 2**27,
        )
        return jax_ep.moe_stats(routing, handle, config, axis_name=("expert",))

    stats = jax.shard_map(
        local, mesh=CPU_FFI.mesh(expert=8), in_specs=P("expert"), out_specs=P()
    )(np.zeros((16, 8), np.float32), np.zeros((16, 2), np.int32))
    assert stats.num_recv.tolist() == [2**29] * 8
    assert stats.num_dropped.tolist() == [2**27] * 8
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), stats)
    assert layers.dropped_fraction == 0.25
