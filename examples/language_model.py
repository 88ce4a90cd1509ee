"""A byte-level transformer whose feed-forward layers are mixtures of experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_ep import MoEConfig, MoEStats
from jax_ep.nnx import MoE

HEAD_WIDTH = 32
WINDOW = 128  # Bytes that a byte sees, itself included.


class Attention(nnx.Module):
    """Causal self-attention over the last `WINDOW` bytes, with rotary positions."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        heads = (hidden // HEAD_WIDTH, HEAD_WIDTH)
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query, self.key, self.value = (linear(hidden, heads) for _ in range(3))
        self.out = linear(heads, hidden, axis=(-2, -1))

    def __call__(self, x: jax.Array, past: tuple | None = None, length: Any = 0):
        """`[B, S, H]` like x, and its keys and values.

        Args:
          x: `[B, S, H]`; S is 1 where there is a past.
          past: keys and values `[B, WINDOW, heads, D]`, of position p at p % WINDOW.
            The new ones then come back in their place among them.
          length: positions before x.
        """
        size = x.shape[1]
        positions = length + jnp.arange(size)
        query, key = (rotate(f(x), positions) for f in (self.query, self.key))
        now = key, self.value(x)
        if past is None:
            window = (WINDOW - 1, 0) if size > WINDOW else None
            y = jax.nn.dot_product_attention(
                query, *now, is_causal=True, local_window_size=window
            )
            return self.out(y), now
        place = length % WINDOW
        now = tuple(
            old.at[:, place].set(new[:, 0]) for old, new in zip(past, now, strict=True)
        )
        is_filled = jnp.arange(WINDOW)[None, None, None] <= length
        y = jax.nn.dot_product_attention(query, *now, mask=is_filled)
        return self.out(y), now


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turns pairs of features of `x` `[B, S, heads, D]` by angles that grow with S."""
    a, b = jnp.split(x, 2, axis=-1)
    frequency = 1e4 ** -jnp.linspace(0, 1, a.shape[-1], endpoint=False)
    angle = positions[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """Attention, then a MoE layer; each adds to what came in."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs, **static: Any):
        self.attention_norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.attention = Attention(config.hidden_size, rngs)
        self.moe_norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        # Statistics are returned, so that generation changes no state.
        self.moe = MoE(config, record_stats=False, rngs=rngs, **static)

    def __call__(self, x: jax.Array, deterministic: bool, *past: Any):
        y, keys_and_values = self.attention(self.attention_norm(x), *past)
        x = x + y
        y, stats = self.moe(
            self.moe_norm(x), deterministic=deterministic, return_stats=True
        )
        return x + y, stats, keys_and_values


class LanguageModel(nnx.Module):
    """Bytes `[B, S]` to the logits `[B, S, 256]` of the bytes after them.

    The statistics of its MoE layers come with them, stacked. What else is given goes to
    these layers.
    """

    def __init__(
        self,
        config: MoEConfig,
        num_layers: int,
        rngs: nnx.Rngs,
        **static: Any,
    ):
        small, hidden = nnx.initializers.normal(0.02), config.hidden_size
        self.embed = nnx.Embed(256, hidden, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config, rngs, **static) for _ in range(num_layers)]
        )
        self.norm = nnx.RMSNorm(hidden, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, deterministic: bool = False
    ) -> tuple[jax.Array, MoEStats]:
        logits, stats, _ = self.with_past(tokens, deterministic=deterministic)
        return logits, stats

    def with_past(
        self,
        tokens: jax.Array,
        past: Any = None,
        length: Any = 0,
        *,
        deterministic: bool = True,
    ):
        """Logits, statistics, and every block's keys and values; see `Attention`."""
        x = self.embed(tokens)
        each, now = [], []
        for n, block in enumerate(self.blocks):
            mine = None if past is None else past[n]
            x, stats, keys_and_values = block(x, deterministic, mine, length)
            each.append(stats)
            now.append(keys_and_values)
        logits = self.embed.attend(self.norm(x))
        return logits, jax.tree.map(lambda *layers: jnp.stack(layers), *each), now


def loss_and_stats(model: LanguageModel, windows: jax.Array, **static: bool):
    """Nats per byte on all but each window's first byte, and the statistics."""
    logits, stats = model(windows[:, :-1], **static)
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
    return loss_and_stats(model, windows, deterministic=True)[0]


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
        logits, _ = model(context, deterministic=True)
        byte = jax.random.categorical(key, logits[:, -1] / temperature)
        byte = byte.astype(context.dtype)
        return jnp.append(context[:, 1:], byte[:, None], axis=1), byte

    return jax.lax.scan(next_byte, context, jax.random.split(key, length))[1].T
