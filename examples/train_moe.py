"""Trains a small Mixture-of-Experts language model on eight CPU devices, or on GPUs.

The text is the part of the Python manual that every Python carries, read byte by byte.
Batches are split over the mesh axes "data" and "expert". Each transformer block ends in
a MoE layer: its experts are spread over "expert", and jax_ep moves the tokens there and
back. Ctrl-C saves a checkpoint and stops; --resume goes on from it.
"""

import contextlib
import dataclasses
import json
import math
import os
import shlex
import sys
from pathlib import Path

import command_line as command
import jax
import language_model as lm
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text
from training import WIRES, Run, Settings

from jax_ep.record import Recorder

CPU_DEVICES = 8
OUT = Path("runs/train_moe")
RECORD_EVERY = 10
# What a checkpoint fixes: its arrays' shapes, and the order of its batches.
FIXED = (
    *("layers", "hidden", "experts", "topk", "shared_experts", "selection_bias_rate"),
    "seed",
)


def main() -> int:
    parser = command_line()
    given = vars(parser.parse_args())
    resume, out = given.pop("resume", False), given.pop("out", OUT)
    record, every = given.pop("record", None), given.pop("record_every", RECORD_EVERY)
    with parser.refusals():
        try:
            settings = choose_settings(given, out / "settings.json", resume)
            mesh = device_mesh(settings)
            out.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            checkpoints = ocp.CheckpointManager(
                (out / "checkpoints").absolute(), options=options
            )
            check_checkpoint(checkpoints.latest_step(), settings, out, resume)
        except ValueError as error:
            parser.error(str(error))
        recorder = open_recorder(record, every, settings, mesh) if record else None
        text = json.dumps(dataclasses.asdict(settings), indent=2)
        (out / "settings.json").write_text(text + "\n")
        return train(settings, mesh, checkpoints, recorder, resume, out)


def train(
    settings: Settings,
    mesh: Mesh,
    checkpoints: ocp.CheckpointManager,
    recorder: Recorder | None,
    resume: bool,
    out: Path,
) -> int:
    """The run, and its exit status."""
    console = Console()
    platform = mesh.devices.flat[0].platform
    console.print(
        f"mesh {dict(mesh.shape)} of {platform} devices; files in {out}", soft_wrap=True
    )
    try:
        with jax.set_mesh(mesh), checkpoints, recorder or contextlib.nullcontext():
            run = Run(settings, checkpoints, recorder)
            if resume:
                run.restore()
            is_done = run.train(console)
            if run.step:
                run.draw(out / "training.png")
            if is_done:
                report(run, out, console)
    except KeyboardInterrupt:
        console.print("Stopped; at most what came after the last checkpoint is lost.")
        return 130
    if not is_done:
        again = shlex.join([sys.argv[0], "--resume", "--out", str(out)])
        console.print(
            f"Stopped at step {run.step}. To go on: python {again}", soft_wrap=True
        )
        return 130
    return 0


def open_recorder(path: Path, every: int, settings: Settings, mesh: Mesh) -> Recorder:
    model = f"train_moe.py, {settings.layers} layers of {settings.hidden} features"
    return Recorder(
        path,
        num_experts=settings.experts,
        shares={name: mesh.shape[name] for name in ("data", "expert")},
        model=model,
        every=every,
    )


def report(run: Run, out: Path, console: Console) -> None:
    """A sample of text, and the model beside the bigram model."""
    prompt, new = run.sample()
    (out / "sample.txt").write_text(prompt + new + "\n", encoding="utf-8")
    console.print(
        Text.assemble("\n", (prompt, "dim"), (new, "bold"), "\n"), soft_wrap=True
    )
    loss = run.evaluate()
    console.print(
        f"held-out loss {loss:.3f} nats per byte; bigram model {run.bigram:.3f}: "
        + ("below it" if loss < run.bigram else "not below it yet"),
        soft_wrap=True,
    )
    console.print(
        f"loss curve and expert loads: {out / 'training.png'}", soft_wrap=True
    )


def command_line() -> command.Parser:
    parser = command.Parser(
        __doc__,
        """\
  train_moe.py                           two or three minutes on two CPU cores
  train_moe.py --experts 32 --topk 4     more and smaller choices
  train_moe.py --data 1 --expert 8       experts spread over all eight devices
  train_moe.py --tensor 2 --shared-experts 1         each expert over two devices
  train_moe.py --chunks 2 --shared-experts 1         exchanges beside products, on GPUs
  train_moe.py --wire float8             half the bytes between devices
  train_moe.py --data 1 --expert 8 --domain-size 4   as two NVLink domains of four
  train_moe.py --resume --steps 1000     longer, from the last checkpoint
  train_moe.py --record run.routing      and record where the bytes went""",
    )
    default = Settings()
    model = parser.add_argument_group(
        "model", f"Features are a multiple of {lm.HEAD_WIDTH}."
    )
    command.add(
        model,
        layers=default.layers,
        hidden=default.hidden,
        experts=default.experts,
        topk=default.topk,
        shared_experts=default.shared_experts,
        capacity_factor=default.capacity_factor,
    )
    model.add_argument(
        "--wire",
        choices=[name for name in WIRES if name],
        help="tokens travel to experts, and gradients to them, as FP8 with a scale for "
        "128 or, mxfp8, 32 numbers: half of bfloat16's bytes [as they are]",
    )
    model.add_argument(
        "--selection-bias-rate",
        type=command.number(0, 1, "a number from 0 to 1"),
        metavar="X",
        help="balances experts by a bias on their choice, moved by X after each step, "
        f"in place of a loss (1e-3 in DeepSeek-V3) [{default.selection_bias_rate:g}]",
    )
    model.add_argument(
        "--chunks",
        type=command.whole(1, 64),
        metavar="N",
        help="exchange a device's tokens in N parts, each beside another's experts, "
        "and shared experts beside both [one exchange after the other]",
    )
    devices = parser.add_argument_group(
        "devices",
        f"All GPUs or, without any, {CPU_DEVICES} CPU devices; up to 4 share experts.",
    )
    command.add(devices, data=None, expert=None, tensor=default.tensor)
    devices.add_argument(
        "--domain-size",
        type=command.whole(1, command.MOST_DEVICES),
        metavar="N",
        help="devices of --expert that NVLink joins; rows go to other domains first, "
        "then on inside each [all of --expert]",
    )
    command.add(devices, implementation=None)
    training = parser.add_argument_group("training")
    command.add(training, steps=default.steps, seed=default.seed, out=OUT, resume=False)
    training.add_argument(
        "--record",
        type=command.file,
        metavar="FILE",
        help="writes the experts of every byte, for `jax_ep bench --routing FILE`",
    )
    training.add_argument(
        "--record-every",
        type=command.whole(1),
        metavar="N",
        help=f"of every Nth step [{RECORD_EVERY}]",
    )
    return parser


def choose_settings(given: dict, path: Path, resume: bool) -> Settings:
    """The given settings, after those of the run to resume, after the defaults.

    Raises:
      ValueError: they make no sense, or not for the run to resume.
    """
    names = {field.name for field in dataclasses.fields(Settings)}
    saved = command.saved_settings(path, names) if resume else {}
    settings = Settings(**(saved | given))
    for name in FIXED if resume else ():
        began = getattr(Settings(**saved), name)
        if getattr(settings, name) != began:
            raise ValueError(
                f"--{name.replace('_', '-')} must stay {began}, with which "
                f"{path.parent} began, and is {given[name]}"
            )
    if settings.hidden % lm.HEAD_WIDTH:
        raise ValueError(
            f"--hidden must be a multiple of {lm.HEAD_WIDTH}, and is {settings.hidden}"
        )
    command.check_tensor(settings.hidden, settings.tensor)
    command.check_layer(
        experts=settings.experts,
        topk=settings.topk,
        expert=settings.expert,
        capacity_factor=settings.capacity_factor,
    )
    return settings


def check_checkpoint(
    step: int | None, settings: Settings, out: Path, resume: bool
) -> None:
    if resume and step is None:
        raise ValueError(f"--resume: there is no checkpoint in {out} yet")
    if step is not None and not resume:
        raise ValueError(
            f"{out} has a checkpoint of step {step}: go on from it with --resume, or "
            "choose another --out"
        )
    if step is not None and step > settings.steps:
        raise ValueError(
            f"--steps must be at least {step}, where {out} is, and is {settings.steps}"
        )


def device_mesh(settings: Settings) -> Mesh:
    """All GPUs, or CPU devices; as many as the settings ask for, if they do."""
    tensor = settings.tensor
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        wanted = (settings.data or 1) * (settings.expert or 1) * tensor
        wanted = min(max(CPU_DEVICES, wanted), command.MOST_DEVICES)
        jax.config.update("jax_num_cpu_devices", wanted)
    devices = jax.devices()
    expert = settings.expert
    if expert is None:
        left = len(devices) // ((settings.data or 1) * tensor)
        expert = math.gcd(left, settings.experts, 4)
    data = settings.data or max(len(devices) // (expert * tensor), 1)
    if data * expert * tensor > len(devices):
        times = f" times --tensor {tensor}" if tensor > 1 else ""
        raise ValueError(
            f"--data {data} times --expert {expert}{times} must be at most the "
            f"{len(devices)} {devices[0].platform} devices here"
        )
    if settings.chunks and settings.wire:
        raise ValueError(
            f"--chunks (={settings.chunks}) exchanges rows as they are: not with "
            f"--wire {settings.wire}"
        )
    if settings.domain_size and expert % settings.domain_size:
        raise ValueError(
            f"--domain-size must divide the size of the expert axis (={expert}), and "
            f"is {settings.domain_size}"
        )
    sizes = dict(data=data, expert=expert) | (dict(tensor=tensor) if tensor > 1 else {})
    devices = np.array(devices[: math.prod(sizes.values())])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


if __name__ == "__main__":
    sys.exit(main())
