"""examples/integrations, on small stand-ins of the interfaces they were written for.

A stand-in has the names and shapes of the other program's module, and computes what its
documentation says, one token at a time.
"""

import importlib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

FOLDER = Path(__file__).parents[1] / "examples" / "integrations"
B, S, H, F, E, K = 4, 6, 8, 16, 4, 2
MIXTRAL = dict(decoder_block="mixtral", model_name="mixtral-8x7b")
DEEPSEEK = dict(
    decoder_block="deepseek",
    model_name="deepseek3-671b",
    routed_bias=True,
    routed_score_func="sigmoid",
    routed_scaling_factor=2.5,
    routed_bias_update_rate=0.01,
)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


class RoutedMoE(nnx.Module):
    """MaxText's, as far as its callers and its checkpoints know it."""

    def __init__(self, config, mesh, num_experts, num_experts_per_tok, width, quant):
        self.config, self.mesh, self.quant = config, mesh, quant
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.intermediate_dim, self.dtype = width, jnp.float32
        self.rngs = nnx.Rngs(0)
        bias = nnx.Param(jnp.asarray(normal(4, E))) if config.routed_bias else None
        self.gate = nnx.Dict(kernel=nnx.Param(jnp.asarray(normal(0, H, E))), bias=bias)
        wide = NamedSharding(mesh, P("expert", "fsdp", "tensor"))
        back = NamedSharding(mesh, P("expert", "tensor", "fsdp"))
        self.wi_0 = nnx.Param(jax.device_put(normal(1, E, H, F), wide))
        self.wi_1 = nnx.Param(jax.device_put(normal(2, E, H, F), wide))
        self.wo = nnx.Param(jax.device_put(normal(3, E, F, H), back))
        self.wi_0_bias = self.wi_1_bias = self.wo_bias = None

    def __call__(self, inputs, out_sharding=None):
        raise AssertionError("the subclass computes")


def experts(x, ids, weights, gate, up, down):
    """`[n, H]`: each token through its experts, all of which see all tokens."""
    hidden = jnp.einsum("nh,ehf->nef", x, gate)
    hidden = hidden * jax.nn.sigmoid(hidden) * jnp.einsum("nh,ehf->nef", x, up)
    y = jnp.einsum("nef,efh->neh", hidden, down)
    return sum(
        weights[:, k, None] * y[np.arange(len(x)), ids[:, k]]
        for k in range(ids.shape[1])
    )


def chosen_of(x, kernel, bias) -> np.ndarray:
    logits = x.reshape(-1, H) @ kernel
    choice = logits if bias is None else 1 / (1 + np.exp(-logits)) + bias
    return np.argsort(-choice, axis=1)[:, :K]


def maxtext_layer(x, kernel, bias, ids, gate, up, down, weight):
    """What MaxText's config means: output, balance loss, and the update of a bias."""
    tokens = x.reshape(-1, H)
    logits = tokens @ kernel
    scores = logits if bias is None else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    chosen = scores[np.arange(len(tokens))[:, None], ids]
    if bias is None:
        weights = jax.nn.softmax(chosen, axis=1)
    else:
        weights = 2.5 * chosen / chosen.sum(1, keepdims=True)
    out = experts(tokens, ids, weights, gate, up, down).reshape(x.shape)
    # Of each sequence: the share of its tokens at an expert times its probability.
    share = np.eye(E)[ids].sum(1).reshape(B, S, E).mean(1).astype(np.float32)
    probs = jax.nn.softmax(choice, axis=1).reshape(B, S, E).mean(1)
    loss = weight * E * (share * probs).sum(1).mean()
    counts = np.bincount(ids.reshape(-1), minlength=E)
    update = None if bias is None else 0.01 * np.sign(len(tokens) * K / E - counts)
    return out, loss, update


@pytest.mark.parametrize("names", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_maxtext(load, names):
    glue = load("maxtext_moe")
    # Axes that MaxText's meshes have, whatever their size.
    sizes = dict(data=1, stage=1, fsdp=2, sequence=1, tensor=2, expert=2)
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    base = dict(
        emb_dim=H,
        base_emb_dim=H,
        mlp_dim=99,
        mlp_activations=["silu", "linear"],
        mlp_activations_limit=-1.0,
        mlp_bias=False,
        norm_topk_prob=False,
        routed_bias=False,
        routed_score_func="",
        routed_scaling_factor=1.0,
        routed_bias_update_rate=0.0,
        n_routing_groups=-1,
        topk_routing_group=-1,
        shared_experts=1,
        sparse_matmul=True,
        capacity_factor=-1.0,
        ragged_buffer_factor=-1.0,
        use_random_routing=False,
        load_balance_loss_weight=0.01,
    )
    config = types.SimpleNamespace(**(base | names))
    layer = glue.with_jax_ep(RoutedMoE)(config, mesh, E, K, F, None)
    x, target = normal(5, B, S, H), normal(6, B, S, H)

    @nnx.jit
    def step(layer, x):
        def objective(layer, x):
            out, loss, update = layer(x)
            return (out * target).sum() + loss, (out, loss, update)

        return nnx.grad(objective, argnums=(0, 1), has_aux=True)(layer, x)

    (grads, dx), (out, loss, update) = step(layer, x)

    bias = layer.gate.bias
    bias = None if bias is None else np.asarray(bias[...])
    ids = chosen_of(x, normal(0, H, E), bias)

    def expected(x, kernel, gate, up, down):
        out, loss, update = maxtext_layer(x, kernel, bias, ids, gate, up, down, 0.01)
        return (out * target).sum() + loss, (out, loss, update)

    args = (x, normal(0, H, E), normal(1, E, H, F), normal(2, E, H, F))
    args += (normal(3, E, F, H),)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        want, aux = jax.grad(expected, argnums=range(5), has_aux=True)(*args)
    got = [dx, grads.gate.kernel, grads.wi_0, grads.wi_1, grads.wo]
    close = dict(rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(out, aux[0], **close)
    np.testing.assert_allclose(loss, aux[1], rtol=1e-5)
    if names is DEEPSEEK:
        np.testing.assert_allclose(update, aux[2])
    else:
        assert update is None
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one[...], two, **close)


def test_maxtext_refuses_what_it_would_leave_out(load):
    glue = load("maxtext_moe")
    mesh = jax.make_mesh((1, 1, 1), ("fsdp", "tensor", "expert"))
    config = types.SimpleNamespace(routed_bias=False)
    layer = glue.with_jax_ep(RoutedMoE)(config, mesh, E, K, F, quant="int8")
    with pytest.raises(NotImplementedError, match="quantization must be off"):
        layer(normal(5, B, S, H))


class MoELayer(nnx.Module):
    """Tunix's, as far as its callers and its checkpoints know it."""

    def __init__(self, mesh):
        self.experts_per_tok, self.num_experts = K, E
        wide, back = (
            NamedSharding(mesh, P(*spec))
            for spec in (("fsdp", None, "tp"), ("fsdp", "tp", None))
        )
        self.router = nnx.Linear(H, E, use_bias=False, rngs=nnx.Rngs(0))
        self.gate_proj = nnx.Param(jax.device_put(normal(1, E, H, F), wide))
        self.up_proj = nnx.Param(jax.device_put(normal(2, E, H, F), wide))
        self.down_proj = nnx.Param(jax.device_put(normal(3, E, F, H), back))

    def __call__(self, x):
        raise AssertionError("the subclass computes")


def test_tunix(load):
    glue = load("tunix_qwen3")
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=kinds)
    layer = glue.with_jax_ep(MoELayer, mesh)(mesh)
    x = normal(5, B, S, H)
    out = nnx.jit(lambda layer, x: layer(x))(layer, x)
    tokens = x.reshape(-1, H)
    probs = jax.nn.softmax(tokens @ layer.router.kernel[...], axis=1)
    ids = np.argsort(-np.asarray(probs), axis=1)[:, :K]
    chosen = np.take_along_axis(np.asarray(probs), ids, 1)
    weights = chosen / chosen.sum(1, keepdims=True)
    args = (normal(1, E, H, F), normal(2, E, H, F), normal(3, E, F, H))
    want = experts(tokens, ids, weights, *args).reshape(x.shape)
    np.testing.assert_allclose(out, want, rtol=2e-4, atol=2e-4)
