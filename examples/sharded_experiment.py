"""An experiment on a sharded MoE model: a sweep, a table, a picture, and resumption.

The model reads the last eight bytes of the Python manual and guesses the next, through
MoE blocks. Everything is one `jax.jit` over a mesh (data, fsdp, expert): batches are
split over all three axes, experts over "expert", and weights also over "fsdp".

The default sweep trains the same model on the same data with its experts on 1, 2, 4 and
8 ranks: the loss curve must not change, to float32, up to the step where rounding first
sends a token to another of two experts that it likes equally. Ctrl-C stops; --resume
goes on from the last checkpoints.
"""

import argparse
import csv
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

CPU_DEVICES = 8
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = f"--xla_force_host_platform_device_count={CPU_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import manual_text  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from jax_ep import MoEConfig, init_params, param_specs, sharded_moe  # noqa: E402

CONTEXT, EMBED = 8, 16  # Bytes that a guess sees, and the width of each.
SEQUENCES, LENGTH = 16, 64  # Guesses in a batch.
LEARNING_RATE = 3e-3
STEPS_PER_CHECKPOINT = 25
BATCH = P(("data", "fsdp", "expert"))
# Of the loss: float32 sums in another order. Sooner or later that flips a near tie of
# some token's experts, and from then on two runs are two samples of one experiment.
TOLERANCE, TOLERANCE_AFTER_FLIP = 1e-5, 0.05


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. A sweep gives one of the last three another value in each."""

    experts: int = 8
    topk: int = 2
    hidden: int = 64
    layers: int = 2
    steps: int = 50
    fsdp: int = 2
    dropless_fallback: bool = False
    seed: int = 0
    capacity_factor: float | None = None
    expert: int = 4

    def mesh(self) -> Mesh:
        """(data, fsdp, expert) over all devices; fsdp shrinks where it must."""
        devices = np.array(jax.devices())
        num_others, rest = divmod(devices.size, self.expert)
        if rest:
            raise SystemExit(
                f"--expert {self.expert} must divide the {devices.size} devices."
            )
        fsdp = math.gcd(num_others, self.fsdp)
        return Mesh(devices.reshape(-1, fsdp, self.expert), ("data", "fsdp", "expert"))

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


def run(settings: Settings, folder: Path, text: np.ndarray, held_out: np.ndarray):
    """Trains, from the last checkpoint if there is one; returns the run's history."""
    model = Model(settings)
    history: dict[str, list] = dict(loss=[], dropped=[], load=[], seconds=[])
    with ocp.CheckpointManager(folder.absolute()) as checkpoints:
        done = checkpoints.latest_step()
        if done is None:
            state = model.init(jax.random.key(settings.seed))
        else:
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(model.state_like),
                history=ocp.args.JsonRestore(),
            )
            saved = checkpoints.restore(done, args=args)
            state, history = saved["state"], saved["history"]
        for step in range(done or 0, settings.steps):
            tokens = model.put(
                manual_text.random_windows(
                    text, SEQUENCES, CONTEXT + LENGTH, seed=settings.seed, step=step
                )
            )
            start = time.perf_counter()
            state, metrics = model.train_step(state, tokens)
            # Waits: before jax 0.12, CPU devices bear no more than 32 steps in flight.
            loss, dropped, load = jax.device_get(metrics)
            history["loss"].append(float(loss))
            history["dropped"].append(float(dropped))
            history["load"].append(load.tolist())
            history["seconds"].append(time.perf_counter() - start)
            if (step + 1) % STEPS_PER_CHECKPOINT == 0 or step + 1 == settings.steps:
                args = ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    history=ocp.args.JsonSave(history),
                )
                checkpoints.save(step + 1, args=args)
                checkpoints.wait_until_finished()
        final = float(model.held_out_loss(state["params"], model.put(held_out)))
    return history | dict(held_out=final, mesh=dict(model.mesh.shape))


def main() -> None:
    options = command_line().parse_args()
    name, values = options.sweep
    base = Settings(
        **{
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(Settings)
        }
    )
    runs = {
        f"{name}={value}": dataclasses.replace(base, **{name: value})
        for value in values
    }
    for settings in runs.values():  # Refuses, before anything is written.
        settings.mesh(), settings.moe()
    check_folder(options.out, base, name, options.resume)
    text, held_out = manual_text.train_and_held_out()
    held_out = manual_text.random_windows(
        held_out, 4 * SEQUENCES, CONTEXT + LENGTH, seed=0, step=0
    )
    console = Console()
    results = {}
    try:
        for label, settings in runs.items():
            results[label] = run(settings, options.out / label, text, held_out)
            loss = results[label]["held_out"]
            console.print(f"{label}: held-out loss {loss:.4f}")
    except KeyboardInterrupt:
        console.print("Stopped. The same command with --resume goes on.")
        sys.exit(130)
    write_table(results, options.out / "results.csv", console)
    draw(results, options.out / "sweep.png")
    console.print(f"Table: {options.out / 'results.csv'}", soft_wrap=True)
    console.print(f"Picture: {options.out / 'sweep.png'}", soft_wrap=True)
    if name == "expert" and base.capacity_factor is None:
        check_curves(results, console)


def check_curves(results: dict, console: Console) -> None:
    """The experts' ranks must not show in the loss."""
    first = next(iter(results))
    for label in results:
        apart, flip = difference(results, label)
        num_steps = len(apart) if flip is None else flip
        before, after = apart[:num_steps], apart[num_steps:]
        if label != first:
            text = f"{label} has the loss of {first} to {before.max(initial=0):.1e}"
            if flip is not None:
                text += f" until a near tie flips in step {flip + 1}"
                text += f", and to {after.max():.1e} after"
            console.print(f"{text}.", soft_wrap=True)
        too_far = before.max(initial=0) > TOLERANCE
        if too_far or after.max(initial=0) > TOLERANCE_AFTER_FLIP:
            sys.exit("That is more than float32 explains.")


def difference(results: dict, label: str) -> tuple[np.ndarray, int | None]:
    """Distance from the first run's losses, and where their routings first differ."""
    first, other = next(iter(results.values())), results[label]
    apart = np.abs(np.array(other["loss"]) - np.array(first["loss"]))
    load, first_load = np.array(other["load"]), np.array(first["load"])
    flipped = np.flatnonzero((load != first_load).any(axis=(1, 2)))
    return apart, int(flipped[0]) if flipped.size else None


def write_table(results: dict, path: Path, console: Console) -> None:
    columns = ("run", "mesh", "loss", "held out", "dropped", "ms/step")
    rows = [
        (
            label,
            ", ".join(str(size) for size in result["mesh"].values()),
            f"{np.mean(result['loss'][-10:]):.4f}",
            f"{result['held_out']:.4f}",
            f"{np.mean(result['dropped']):.2%}",
            f"{1e3 * np.median(result['seconds']):.1f}",
        )
        for label, result in results.items()
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def draw(results: dict, path: Path) -> None:
    """Losses; beside them what was dropped or, where nothing was, how far apart."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, other = figure.subplots(1, 2)
    has_drops = any(np.any(result["dropped"]) for result in results.values())
    for index, (label, result) in enumerate(results.items()):
        step = np.arange(1, len(result["loss"]) + 1)
        # Wide below narrow, so that equal curves all show.
        width = 1 + 1.5 * (len(results) - 1 - index)
        losses.plot(step, result["loss"], lw=width, label=label)
        if has_drops:
            other.plot(step, 100 * np.array(result["dropped"]), label=label)
        elif index:
            apart, _ = difference(results, label)
            other.semilogy(step, apart + 1e-8, label=label, color=f"C{index}")
    losses.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    if has_drops:
        other.set(xlabel="step", ylabel="%", title="Rows dropped")
    else:
        other.set(xlabel="step", ylabel="nats + 1e-8", title="Distance from the first")
    for axes in (losses, other):
        axes.grid(alpha=0.3)
    losses.legend()
    figure.savefig(path, dpi=120)


def check_folder(out: Path, base: Settings, sweep: str, resume: bool) -> None:
    """Refuses to mix two experiments in one folder; only steps may grow."""
    path = out / "settings.json"
    now = dataclasses.asdict(base) | dict(sweep=sweep)
    if path.exists():
        before = json.loads(path.read_text())
        if not resume:
            raise SystemExit(f"{out} has results: --resume goes on, or change --out.")
        for key in now:
            if key not in ("steps", sweep) and before[key] != now[key]:
                raise SystemExit(
                    f"--resume: {key} was {before[key]!r} in {out}, and is now "
                    f"{now[key]!r}."
                )
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now, indent=2) + "\n")


def factor(text: str) -> float | None:
    return None if text == "none" else float(text)


SWEEPS = dict(seed=int, capacity_factor=factor, expert=int)


def sweep(text: str) -> tuple[str, list]:
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEEPS or not values:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(SWEEPS)}, =, and values: seed=0,1,2"
        )
    return name, [SWEEPS[name](value) for value in values.split(",")]


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  sharded_experiment.py                                      EP degrees 1, 2, 4, 8
  sharded_experiment.py --sweep capacity-factor=none,1.5,1,0.75
  sharded_experiment.py --sweep capacity-factor=none,0.5 --dropless-fallback
  sharded_experiment.py --sweep seed=0,1,2 --expert 2 --fsdp 4""",
    )
    add = parser.add_argument
    default = Settings()
    for field in dataclasses.fields(Settings):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type is bool:
            text = "send what exceeds the capacity in further rounds"
            add(flag, action="store_true", help=text)
        else:
            kind, value = SWEEPS.get(field.name, int), getattr(default, field.name)
            add(flag, type=kind, default=value, help="[%(default)s]")
    add(
        "--sweep",
        type=sweep,
        default="expert=1,2,4,8",
        metavar="NAME=V,V,...",
        help=f"what differs between runs: {', '.join(SWEEPS)} [%(default)s]",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/sharded_experiment"),
        help="[%(default)s]",
    )
    add("--resume", action="store_true", help="go on from the checkpoints in --out")
    return parser


if __name__ == "__main__":
    main()
