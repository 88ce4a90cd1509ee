"""A byte-level transformer whose feed-forward layers are mixtures of experts."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_ep import MoEConfig, MoEStats
from jax_ep.nnx import MoE

HEAD_WIDTH = 32


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        heads = (hidden // HEAD_WIDTH, HEAD_WIDTH)
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query, self.key, self.value = (linear(hidden, heads) for _ in range(3))
        self.out = linear(heads, hidden, axis=(-2, -1))

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key = rotate(self.query(x)), rotate(self.key(x))
        y = jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True)
        return self.out(y)


def rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of features of `x` `[B, S, heads, D]` by angles that grow with S."""
    a, b = jnp.split(x, 2, axis=-1)
    frequency = 1e4 ** -jnp.linspace(0, 1, a.shape[-1], endpoint=False)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """Attention, then a MoE layer; each adds to what came in."""

    def __init__(self, config: MoEConfig, keep_topk_idx: bool, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.attention = Attention(config.hidden_size, rngs)
        self.moe_norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.moe = MoE(config, keep_topk_idx=keep_topk_idx, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nnx.Module):
    """Bytes `[B, S]` to the logits `[B, S, 256]` of the bytes after them."""

    def __init__(
        self,
        config: MoEConfig,
        num_layers: int,
        rngs: nnx.Rngs,
        *,
        keep_topk_idx: bool = False,
    ):
        small, hidden = nnx.initializers.normal(0.02), config.hidden_size
        self.embed = nnx.Embed(256, hidden, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config, keep_topk_idx, rngs) for _ in range(num_layers)]
        )
        self.norm = nnx.RMSNorm(hidden, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def logits_and_stats(
    model: LanguageModel, tokens: jax.Array
) -> tuple[jax.Array, MoEStats]:
    """The logits, and the statistics of all MoE layers, stacked."""
    model = nnx.clone(model)  # MoE layers leave their statistics in the copy.
    logits = model(tokens)
    stats = [block.moe.stats.get_value() for block in model.blocks]
    return logits, jax.tree.map(lambda *layers: jnp.stack(layers), *stats)


def loss_and_stats(model: LanguageModel, windows: jax.Array):
    """Nats per byte on all but each window's first byte, and the statistics."""
    logits, stats = logits_and_stats(model, windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean(), stats


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, windows: jax.Array):
    """Updates both.

    Returns loss, rows dropped and slots per expert `[layers, E]`; and where the model
    keeps them, the experts of all bytes `[layers, B, S, K]`, else None.
    """

    def objective(model):
        loss, stats = loss_and_stats(model, windows)
        metrics = loss, stats.num_dropped.sum(), stats.expert_load
        return loss + stats.aux_loss, (metrics, stats.topk_idx)

    gradient, results = nnx.grad(objective, has_aux=True)(model)
    optimizer.update(model, gradient)
    return results


@nnx.jit
def evaluation_step(model: LanguageModel, windows: jax.Array) -> jax.Array:
    return loss_and_stats(model, windows)[0]


@nnx.jit(static_argnames=("length", "temperature"))
def generate(
    model: LanguageModel,
    context: jax.Array,
    key: jax.Array,
    *,
    length: int,
    temperature: float,
) -> jax.Array:
    """`[B, length]` bytes to follow `context` `[B, S]`, which slides over them."""

    def next_byte(context, key):
        logits, _ = logits_and_stats(model, context)
        byte = jax.random.categorical(key, logits[:, -1] / temperature)
        byte = byte.astype(context.dtype)
        return jnp.append(context[:, 1:], byte[:, None], axis=1), byte

    return jax.lax.scan(next_byte, context, jax.random.split(key, length))[1].T
