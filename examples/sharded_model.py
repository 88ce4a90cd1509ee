"""The model of sharded_experiment.py, its settings, and its jitted steps."""

import dataclasses
import math

import command_line as command
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import MoEConfig, init_params, param_specs, sharded_moe

CONTEXT, EMBED = 8, 16  # Bytes that a guess sees, and the width of each.
LEARNING_RATE = 3e-3
BATCH = P(("data", "fsdp", "expert"))


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. A sweep gives one of the last three another value in each."""

    experts: int = 8
    topk: int = 2
    hidden: int = 64
    layers: int = 2
    steps: int = 50
    fsdp: int | None = None
    dropless_fallback: bool = False
    seed: int = 0
    capacity_factor: float | None = None
    expert: int = 4

    def mesh(self) -> Mesh:
        """(data, fsdp, expert) over all devices.

        Raises:
          ValueError: they cannot be split so.
        """
        devices = np.array(jax.devices())
        num_others, rest = divmod(devices.size, self.expert)
        if rest:
            raise ValueError(
                f"--expert must divide the {devices.size} devices, and is {self.expert}"
            )
        fsdp = math.gcd(num_others, 2) if self.fsdp is None else self.fsdp
        if num_others % fsdp:
            raise ValueError(
                f"--fsdp must divide the {num_others} devices that --expert "
                f"{self.expert} leaves, and is {fsdp}"
            )
        if self.hidden % fsdp:
            raise ValueError(
                f"--hidden must be divisible by --fsdp (={fsdp}), and is {self.hidden}"
            )
        return Mesh(devices.reshape(-1, fsdp, self.expert), ("data", "fsdp", "expert"))

    def check(self) -> None:
        """Raises ValueError where there can be no such run."""
        command.check_layer(
            experts=self.experts,
            topk=self.topk,
            expert=self.expert,
            capacity_factor=self.capacity_factor,
        )
        self.mesh()

    def moe(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.experts,
            num_experts_per_tok=self.topk,
            hidden_size=self.hidden,
            moe_intermediate_size=2 * self.hidden,
            capacity_factor=self.capacity_factor,
            dropless_fallback=self.dropless_fallback,
            load_balance_loss_weight=1e-2,
            router_z_loss_weight=1e-3,
        )


class Model:
    """Parameters, their shardings, and the jitted steps of one run."""

    def __init__(self, settings: Settings):
        self.settings, self.config = settings, settings.moe()
        self.mesh = settings.mesh()
        self.adam = optax.adam(LEARNING_RATE)
        shapes = jax.eval_shape(self._initial_state, jax.random.key(0))
        self.shardings = self._shardings(shapes)
        self.state_like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            shapes,
            self.shardings,
        )
        self.init = jax.jit(self._initial_state, out_shardings=self.shardings)
        everywhere = NamedSharding(self.mesh, P())
        self.train_step = jax.jit(
            self._train_step,
            donate_argnums=0,
            out_shardings=(self.shardings, everywhere),
        )
        self.held_out_loss = jax.jit(
            lambda params, tokens: self._loss(params, tokens)[0]
        )

    def put(self, tokens: np.ndarray) -> jax.Array:
        return jax.device_put(tokens, NamedSharding(self.mesh, BATCH))

    def _initial_state(self, key: jax.Array):
        keys = iter(jax.random.split(key, 3 + self.settings.layers))
        hidden = self.settings.hidden

        def normal(*shape):
            return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

        params = dict(
            embed=jax.random.normal(next(keys), (256, EMBED)),
            first=normal(CONTEXT * EMBED, hidden),
            last=normal(hidden, 256),
            blocks=[
                dict(scale=jnp.ones(hidden), moe=init_params(next(keys), self.config))
                for _ in range(self.settings.layers)
            ],
        )
        return dict(params=params, adam=self.adam.init(params))

    def _shardings(self, state):
        """Every leaf's; Adam's moments are where their parameter is."""
        specs = dict(
            embed=P(),
            first=P(None, "fsdp"),
            last=P("fsdp"),
            blocks=[
                dict(
                    scale=P(),
                    moe=param_specs(self.config, expert="expert", hidden="fsdp"),
                )
                for _ in range(self.settings.layers)
            ],
        )
        params = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        adam = optax.tree_map_params(
            self.adam,
            lambda _, sharding: sharding,
            state["adam"],
            params,
            transform_non_params=lambda _: NamedSharding(self.mesh, P()),
        )
        return dict(params=params, adam=adam)

    def _loss(self, params, tokens: jax.Array):
        """Nats per byte of `[B, CONTEXT + S]` bytes, and the layers' statistics."""
        vectors = params["embed"][tokens[:, :-1]]
        length = tokens.shape[1] - CONTEXT
        seen = [vectors[:, first : first + length] for first in range(CONTEXT)]
        x = jnp.concatenate(seen, axis=2) @ params["first"]
        all_stats = []
        for block in params["blocks"]:
            size = jnp.sqrt(jnp.mean(x * x, axis=2, keepdims=True) + 1e-6)
            y, stats = sharded_moe(
                x / size * block["scale"],
                block["moe"],
                self.config,
                mesh=self.mesh,
                specs=param_specs(self.config, expert="expert", hidden="fsdp"),
            )
            x = x + y
            all_stats.append(stats)
        logits = x @ params["last"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, CONTEXT:]
        )
        return losses.mean(), jax.tree.map(lambda *each: jnp.stack(each), *all_stats)

    def _train_step(self, state, tokens: jax.Array):
        def objective(params):
            loss, stats = self._loss(params, tokens)
            metrics = loss, stats.dropped_fraction, stats.expert_load
            return loss + stats.aux_loss, metrics

        gradients, metrics = jax.grad(objective, has_aux=True)(state["params"])
        updates, adam = self.adam.update(gradients, state["adam"])
        params = optax.apply_updates(state["params"], updates)
        return dict(params=params, adam=adam), metrics
