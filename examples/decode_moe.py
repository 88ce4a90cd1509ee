"""Generates text from the checkpoint of train_moe.py, its experts over all devices.

One step takes the last byte of every sequence through the model: attention reads a
cache of keys and values, which the step gets donated and returns, and jax_ep moves the
few tokens to their experts and back. A loop of steps is one program (`lax.scan`). Any
batch will do, also fewer sequences than devices.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import command_line as command
import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.text import Text
from train_moe import OUT, device_mesh
from training import Run, Settings, readable

from jax_ep.tools import profile
from jax_ep.tools.console import UserError

PROFILED_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Wish:
    """What to generate; `decode_moe.py --help` explains it."""

    batch: int = 8
    length: int = 300
    temperature: float = 0.7
    seed: int = 0
    prompt: str | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Between two steps.

    Attributes:
      past: keys and values of every layer, `[B, WINDOW, heads, D]` each, see
        `language_model.Attention`.
      length: `[]` int32, positions in them so far.
      last: `[B]` int32, the byte after these.
    """

    past: list[tuple[jax.Array, jax.Array]]
    length: jax.Array
    last: jax.Array


class Decoder:
    """The jitted programs of a model, for a batch of one size."""

    def __init__(self, model: lm.LanguageModel, batch: int, temperature: float):
        self.graph, self.params = nnx.split(model)
        self.temperature = temperature
        self.axes = axes_for(jax.sharding.get_abstract_mesh(), batch)
        self.prefill = jax.jit(self._prefill)
        self.step = jax.jit(self._step, donate_argnums=1)
        self.steps = jax.jit(self._steps, donate_argnums=1)

    def _prefill(self, params, context: jax.Array, key: jax.Array) -> State:
        """Reads `[B, P]` bytes, at most `WINDOW`, and chooses the next."""
        model = nnx.merge(self.graph, params)
        logits, _, past = model.with_past(context)
        room = lm.WINDOW - context.shape[1]
        past = jax.tree.map(
            lambda now: jnp.pad(now, [(0, 0), (0, room), (0, 0), (0, 0)]), past
        )
        length = jnp.int32(context.shape[1])
        return self._placed(State(past, length, self._choose(logits[:, -1], key)))

    def _step(self, params, state: State, key: jax.Array) -> State:
        """One byte more for every sequence."""
        model = nnx.merge(self.graph, params)
        logits, _, past = model.with_past(state.last[:, None], state.past, state.length)
        last = self._choose(logits[:, -1], key)
        return self._placed(State(past, state.length + 1, last))

    def _steps(self, params, state: State, keys: jax.Array):
        """A step for each key. Returns the state and the bytes `[B, N]`."""

        def body(state, key):
            state = self._step(params, state, key)
            return state, state.last

        state, new = jax.lax.scan(body, state, keys)
        return state, new.T

    def _choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        if not self.temperature:
            return logits.argmax(-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / self.temperature).astype(jnp.int32)

    def _placed(self, state: State) -> State:
        """Sequences over the devices, so that a donated cache stays where it is."""
        past, last = jax.lax.with_sharding_constraint(
            (state.past, state.last), P(self.axes)
        )
        return State(past, state.length, last)


def axes_for(mesh: Any, batch: int) -> tuple[str, ...]:
    """The most of "data" and "expert" that a batch can be split over evenly.

    Attention is computed on every device for what is left; the MoE layers pad.
    """
    for axes in (("data", "expert"), ("expert",), ("data",)):
        if batch % np.prod([mesh.shape[name] for name in axes]) == 0:
            return axes
    return ()


def main() -> None:
    parser = command_line()
    given = vars(parser.parse_args())
    folder = given.pop("run", OUT)
    wish = Wish(
        **{
            field.name: given.pop(field.name)
            for field in dataclasses.fields(Wish)
            if field.name in given
        }
    )
    names = {field.name for field in dataclasses.fields(Settings)}
    # Every device axis is this command's, and no token is dropped.
    fresh = dict(data=None, expert=None, tensor=1, capacity_factor=None)
    with parser.refusals():
        try:
            saved = command.saved_settings(folder / "settings.json", names, "--run")
            settings = Settings(**(saved | fresh | dict(domain_size=None) | given))
            check(settings)
            mesh = device_mesh(settings)
            path = (folder / "checkpoints").absolute()
            checkpoints = ocp.CheckpointManager(path) if path.is_dir() else None
            if checkpoints is None or checkpoints.latest_step() is None:
                raise ValueError(f"--run: there is no checkpoint in {folder} yet")
        except ValueError as error:
            parser.error(str(error))
        decode(wish, settings, mesh, checkpoints)


def check(settings: Settings) -> None:
    """Raises ValueError where the devices do not fit the trained model."""
    command.check_layer(
        experts=settings.experts,
        topk=settings.topk,
        expert=settings.expert,
        capacity_factor=None,
    )
    command.check_tensor(settings.hidden, settings.tensor)


def command_line() -> command.Parser:
    parser = command.Parser(
        __doc__,
        """\
  decode_moe.py                                      after train_moe.py
  decode_moe.py --batch 1 --prompt "The for statement" --temperature 0
  decode_moe.py --batch 256 --length 100             for the speed""",
    )
    wish = Wish()
    text = parser.add_argument_group("text")
    text.add_argument(
        "--run", type=Path, metavar="DIR", help=f"what train_moe.py wrote [{OUT}]"
    )
    text.add_argument(
        "--prompt",
        type=prompt,
        metavar="TEXT",
        help=f"its last {lm.WINDOW} bytes, for every sequence [held-out text, another "
        "for each]",
    )
    command.add(
        text,
        batch=wish.batch,
        length=wish.length,
        temperature=wish.temperature,
        seed=wish.seed,
    )
    devices = parser.add_argument_group("devices", "All that there are.")
    command.add(devices, data=None, expert=None, tensor=1, implementation=None)
    return parser


def prompt(text: str) -> str:
    # What the shell gave need not be UTF-8.
    if not text.encode(errors="surrogateescape"):
        raise command.Wrong("must not be empty")
    return text


def contexts(wish: Wish, run: Run) -> np.ndarray:
    """`[B, P]` int32: what each sequence begins with."""
    if wish.prompt is not None:
        given = wish.prompt.encode(errors="surrogateescape")[-lm.WINDOW :]
        return np.tile(np.frombuffer(given, np.uint8), (wish.batch, 1)).astype(np.int32)
    windows = run.held_out[:, :, 1:].reshape(-1, lm.WINDOW)
    return windows[np.arange(wish.batch) % len(windows)]


def decode(
    wish: Wish, settings: Settings, mesh: Mesh, checkpoints: ocp.CheckpointManager
) -> None:
    """Generates, shows the first text, and what it took."""
    console = Console()
    with jax.set_mesh(mesh), checkpoints:
        run = Run(settings, checkpoints)
        run.restore()
        decoder = Decoder(run.model, wish.batch, wish.temperature)
        context = contexts(wish, run)
        first, *keys = jax.random.split(jax.random.key(wish.seed), wish.length)
        state = decoder.prefill(decoder.params, context, first)
        start = np.asarray(state.last)[:, None]
        new, seconds = start, 0.0
        if keys:
            keys = jnp.stack(keys)
            args = decoder.params, state, keys
            program = decoder.steps.lower(*args).compile()
            began = time.perf_counter()
            _, rest = program(*args)
            new = np.concatenate([start, np.asarray(rest)], axis=1)
            seconds = time.perf_counter() - began
        share = exchange_share(decoder, context, first)
    console.print(
        f"step {run.step} of {dict(mesh.shape)} {mesh.devices.flat[0].platform} "
        f"devices, {wish.batch} sequences\n",
        highlight=False,
    )
    shown = Text.assemble((readable(context[0]), "dim"), (readable(new[0]), "bold"))
    console.print(shown, soft_wrap=True)
    if seconds:
        num_steps = wish.length - 1
        console.print(
            f"\n{wish.batch * num_steps / seconds:,.0f} tokens/s: "
            f"{1e3 * seconds / num_steps:.2f} ms a step, {num_steps} steps in one "
            "program",
            highlight=False,
        )
    console.print(share, highlight=False)


def exchange_share(decoder: Decoder, context: np.ndarray, key: jax.Array) -> str:
    """A sentence: of a device's busy time in single steps, how much an exchange ran."""
    state = decoder.prefill(decoder.params, context, key)
    state = jax.block_until_ready(decoder.step(decoder.params, state, key))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED_STEPS):
                state = decoder.step(decoder.params, state, key)
                jax.block_until_ready(state)
        try:
            found = profile.read(folder)
        except UserError as error:
            return f"exchange's share of a step: not known ({error})"
    shares = [
        device.communication_seconds
        / (
            device.communication_seconds
            + device.compute_seconds
            - device.overlapped_seconds
        )
        for device in found.devices
    ]
    return (
        f"exchange: {np.mean(shares):.0%} of a step, {min(shares):.0%} to "
        f"{max(shares):.0%} over {len(shares)} devices: the share of a device's busy "
        "time in which a layout, dispatch or combine is under way, its wait for the "
        f"other devices included, in a profile of {PROFILED_STEPS} steps"
    )


if __name__ == "__main__":
    main()
