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
import os
import sys
import time
from pathlib import Path

CPU_DEVICES = 8
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = f"--xla_force_host_platform_device_count={CPU_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

import command_line as command  # noqa: E402
import jax  # noqa: E402
import manual_text  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from sharded_model import CONTEXT, Model, Settings  # noqa: E402

SEQUENCES, LENGTH = 16, 64  # Guesses in a batch.
OUT = Path("runs/sharded_experiment")
STEPS_PER_CHECKPOINT = 25
# Of the loss: float32 sums in another order. Sooner or later that flips a near tie of
# some token's experts, and from then on two runs are two samples of one experiment.
TOLERANCE, TOLERANCE_AFTER_FLIP = 1e-5, 0.05


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
    parser = command_line()
    given = vars(parser.parse_args())
    name, values = given.pop("sweep", SWEEP)
    out, resume = given.pop("out", OUT), given.pop("resume", False)
    base = Settings(**given)
    runs = {
        f"{name}={value}": dataclasses.replace(base, **{name: value})
        for value in values
    }
    with parser.refusals():
        try:
            for settings in runs.values():  # Before anything is written.
                settings.check()
            check_folder(out, base, name, resume)
        except ValueError as error:
            parser.error(str(error))
        experiment(runs, name, out)


def experiment(runs: dict[str, Settings], name: str, out: Path) -> None:
    """Trains each, and shows them side by side."""
    text, held_out = manual_text.train_and_held_out()
    held_out = manual_text.random_windows(
        held_out, 4 * SEQUENCES, CONTEXT + LENGTH, seed=0, step=0
    )
    console = Console()
    results = {}
    try:
        for label, settings in runs.items():
            results[label] = run(settings, out / label, text, held_out)
            loss = results[label]["held_out"]
            console.print(f"{label}: held-out loss {loss:.4f}")
    except KeyboardInterrupt:
        console.print("Stopped. The same command with --resume goes on.")
        sys.exit(130)
    write_table(results, out / "results.csv", console)
    draw(results, out / "sweep.png")
    console.print(f"Table: {out / 'results.csv'}", soft_wrap=True)
    console.print(f"Picture: {out / 'sweep.png'}", soft_wrap=True)
    if name == "expert" and settings.capacity_factor is None:
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
    if resume:
        before = command.saved_settings(path, set(now))
        for key in now:
            if key not in ("steps", sweep) and before.get(key) != now[key]:
                raise ValueError(
                    f"--resume: {key} was {before.get(key)} in {out}, and is {now[key]}"
                )
        if before["steps"] > now["steps"]:
            raise ValueError(
                f"--steps must be at least {before['steps']}, as in {out}, and is "
                f"{now['steps']}"
            )
    elif path.exists():
        raise ValueError(f"{out} has results: --resume goes on, or change --out")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now, indent=2) + "\n")


SWEEPS = dict(
    seed=command.whole(0),
    capacity_factor=command.factor,
    expert=command.whole(1, command.MOST_DEVICES),
)
SWEEP = ("expert", [1, 2, 4, 8])


def sweep(text: str) -> tuple[str, list]:
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEEPS or not values:
        names = ", ".join(command.flag(name)[2:] for name in SWEEPS)
        raise argparse.ArgumentTypeError(
            f"must be one of {names}, =, and values: seed=0,1,2"
        )
    found = [SWEEPS[name](value) for value in values.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"must not repeat a value, and is {text!r}")
    return name, found


def command_line() -> command.Parser:
    parser = command.Parser(
        __doc__,
        """\
  sharded_experiment.py                                      EP degrees 1, 2, 4, 8
  sharded_experiment.py --sweep capacity-factor=none,1.5,1,0.75
  sharded_experiment.py --sweep capacity-factor=none,0.5 --dropless-fallback
  sharded_experiment.py --sweep seed=0,1,2 --expert 2 --fsdp 4""",
    )
    command.add(parser, **dataclasses.asdict(Settings()))
    parser.add_argument(
        "--sweep",
        type=sweep,
        metavar="NAME=V,V,...",
        help="what differs between runs: "
        f"{', '.join(command.flag(name)[2:] for name in SWEEPS)} [expert=1,2,4,8]",
    )
    command.add(parser, out=OUT, resume=False)
    return parser


if __name__ == "__main__":
    main()
