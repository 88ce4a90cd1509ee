"""Replicas for hot experts: the busiest rank before and after, on a skewed load.

A skewed router is measured on one batch, a placement planned from what was seen, and
the next batch sent through the exchange with and without the plan: the rows that each
rank receives are counted by the layout itself. Then one training step of a layer shows
that the plan changes neither its loss nor its gradients.
"""

import dataclasses
import os
import sys
from pathlib import Path

RANKS = 8
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = f"--xla_force_host_platform_device_count={RANKS}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

import command_line as command  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import jax_ep  # noqa: E402

HIDDEN = 32
MOST_SLOTS = 2048  # Of a layer.
MOST_LIKINGS = 2**21  # Numbers of a rank's tokens for its experts: 16 MiB.


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line sets."""

    experts: int = 64
    topk: int = 4
    tokens: int = 1024
    replicas: int = 16
    skew: float = 1.0
    seed: int = 0
    out: Path = Path("runs/expert_placement")

    def check(self, ranks: int) -> None:
        """Raises ValueError where there can be no such run."""
        command.check_layer(
            experts=self.experts, topk=self.topk, expert=None, capacity_factor=None
        )
        if self.experts % ranks:
            raise ValueError(
                f"--experts must be divisible by the {ranks} devices, and is "
                f"{self.experts}"
            )
        most = min(self.experts * (ranks - 1), MOST_SLOTS - self.experts)
        most = most // ranks * ranks  # Each rank has as many slots.
        if self.replicas > most:
            raise ValueError(
                f"--replicas must be at most {most} with --experts {self.experts} on "
                f"{ranks} devices, and is {self.replicas}"
            )
        most = MOST_LIKINGS // self.experts
        if self.tokens > most:
            raise ValueError(
                f"--tokens must be at most {most} with --experts {self.experts}: a "
                f"number is drawn for each pair; and is {self.tokens}"
            )


def command_line() -> command.Parser:
    parser = command.Parser(
        __doc__,
        """\
  expert_placement.py                             the default
  expert_placement.py --skew 1.5 --replicas 64    hotter experts, more replicas""",
    )
    default = Settings()
    command.add(
        parser, experts=default.experts, topk=default.topk, tokens=default.tokens
    )
    parser.add_argument(
        "--replicas",
        type=command.whole(0),
        metavar="N",
        help=f"slots beyond one for each expert [{default.replicas}]",
    )
    parser.add_argument(
        "--skew",
        type=command.number(-100, 100, "a number from -100 to 100"),
        metavar="X",
        help=f"exponent of the experts' popularity [{default.skew:g}]",
    )
    command.add(parser, seed=default.seed, out=default.out)
    return parser


def main() -> None:
    parser = command_line()
    options = Settings(**vars(parser.parse_args()))
    ranks = min(RANKS, len(jax.devices()))
    with parser.refusals():
        try:
            options.check(ranks)
        except ValueError as error:
            parser.error(str(error))
        options.out.mkdir(parents=True, exist_ok=True)
        experiment(options, ranks)


def experiment(options: Settings, ranks: int) -> None:
    """Plans, counts, trains a step, draws."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("expert",))
    random = np.random.default_rng(options.seed)
    popularity = np.log(np.arange(1, options.experts + 1)) * -options.skew
    popularity = random.permutation(popularity)

    def batch() -> np.ndarray:
        """`[R*T, K]` expert ids: the top k of popularity and each token's own taste."""
        shape = (ranks * options.tokens, options.experts)
        logits = popularity + random.gumbel(size=shape)
        return np.argsort(-logits)[:, : options.topk].astype(np.int32)

    seen = np.bincount(batch().reshape(-1), minlength=options.experts)
    per_rank = options.experts // ranks
    extra = -(-options.replicas // ranks)
    plans = {
        "contiguous": jax_ep.identity_placement(options.experts),
        "moved": jax_ep.plan_placement(seen, num_ranks=ranks),
        "with replicas": jax_ep.plan_placement(
            seen, num_ranks=ranks, num_slots=ranks * (per_rank + extra)
        ),
    }
    new_batch = batch()
    received = {}
    print(f"{options.experts} experts, top {options.topk}, over {ranks} ranks")
    print(f"{'placement':15}{'slots':>6}{'most rows':>11}{'mean':>8}{'imbalance':>11}")
    for name, plan in plans.items():
        rows = received[name] = rows_of_ranks(mesh, new_batch, plan)
        print(
            f"{name:15}{plan.num_slots:6}{rows.max():11}{rows.mean():8.0f}"
            f"{rows.max() / rows.mean():11.3f}"
        )
    path = options.out / "expert_placement.png"
    draw(path, received, seen, ranks)
    print(f"Picture: {path}")

    before, after = (
        step(mesh, new_batch, plans[name], options.seed)
        for name in ("contiguous", "with replicas")
    )
    worst = max(
        float(np.abs(a - b).max() / np.abs(a).max())
        for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)
    )
    print(f"Loss and gradients with replicas differ by {worst:.1e} of the largest.")
    if worst > 1e-5:
        sys.exit("That is more than float32 explains.")


def rows_of_ranks(mesh, topk_idx, plan: jax_ep.Placement) -> np.ndarray:
    """`[R]`, rows that each rank receives, as the layout counts them."""

    def count(topk_idx, plan):
        slots = jax_ep.place_topk(topk_idx, plan)
        handle = jax_ep.dispatch_layout(slots, num_experts=plan.num_slots)
        return handle.num_recv

    run = jax.shard_map(
        count, mesh=mesh, in_specs=(P("expert"), P()), out_specs=P("expert")
    )
    # Every rank knows all ranks' counts: the first one's are enough.
    return np.asarray(jax.jit(run)(topk_idx, plan))[: mesh.size]


def step(mesh, topk_idx, plan: jax_ep.Placement, seed: int):
    """Loss and gradients of a layer whose experts are placed as planned.

    The parameters are those of the logical experts, each stored once, on its rank.
    """
    random = np.random.default_rng(seed)
    num_experts = plan.num_experts

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    x = normal(len(topk_idx), HIDDEN)
    weights = random.random(topk_idx.shape).astype(np.float32)
    params = dict(
        up=normal(num_experts, HIDDEN, HIDDEN) / HIDDEN**0.5,
        down=normal(num_experts, HIDDEN, HIDDEN) / HIDDEN**0.5,
    )

    def layer(params, x, topk_idx, weights, plan):
        params = jax_ep.place_params(params, plan)
        handle = jax_ep.dispatch_layout(
            jax_ep.place_topk(topk_idx, plan), num_experts=plan.num_slots
        )
        recv_x, recv_weights = jax_ep.dispatch(x, handle, weights)
        hidden = jax.lax.ragged_dot(recv_x, params["up"], handle.group_sizes)
        hidden = jax.nn.silu(hidden) * recv_weights[:, None]
        y = jax.lax.ragged_dot(hidden, params["down"], handle.group_sizes)
        return jax_ep.combine(y, handle)

    run = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(*[P("expert")] * 4, P()),
        out_specs=P("expert"),
    )

    def loss(params, x):
        return jnp.mean(run(params, x, topk_idx, weights, plan) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)


def draw(path: Path, received: dict[str, np.ndarray], seen, ranks: int) -> None:
    """Rows of each rank under each plan, and the imbalance for more and more slots."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    bars, curve = figure.subplots(1, 2)
    width = 0.8 / len(received)
    for index, (name, rows) in enumerate(received.items()):
        at = np.arange(ranks) + (index - (len(received) - 1) / 2) * width
        label = f"{name}: {rows.max() / rows.mean():.2f}"
        bars.bar(at, rows, width, label=label)
    bars.axhline(rows.mean(), color="0.3", ls="--", lw=1)
    bars.set(xlabel="rank", ylabel="rows received", title="A new batch")
    bars.legend(title="busiest rank over the mean")

    num_experts = len(seen)
    least = num_experts // ranks
    most = min(2 * least, num_experts)  # One replica on each rank.
    slots = ranks * np.arange(least, most + 1)
    imbalance = []
    for num_slots in slots:
        plan = jax_ep.plan_placement(seen, num_ranks=ranks, num_slots=int(num_slots))
        load = jax_ep.rank_loads(seen, plan, num_ranks=ranks)
        imbalance.append(load.max() / load.mean())
    curve.plot(slots - num_experts, imbalance, "o-")
    curve.axhline(1, color="0.3", ls="--", lw=1)
    curve.set(
        xlabel="slots for replicas",
        ylabel="busiest rank over the mean",
        title="What replicas buy, as planned",
    )
    curve.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
