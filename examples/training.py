"""Training: steps, held-out loss, checkpoints, picture, sample."""

import contextlib
import dataclasses
import signal
import time
from pathlib import Path

import jax
import language_model as lm
import manual_text
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich import progress
from rich.console import Console

from jax_ep import MoEConfig
from jax_ep.nnx import SelectionBias
from jax_ep.record import Recorder

CONTEXT = lm.WINDOW
SEQUENCES = 16  # In a batch, over all devices.
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
BALANCE_LOSS, ROUTER_Z_LOSS = 1e-2, 1e-3
# After these the loss is looked at, which waits for the devices. Before jax 0.12, more
# than 32 steps in flight would hang the collectives of CPU devices.
STEPS_IN_FLIGHT = 10
STEPS_PER_CHECKPOINT = 50  # Each with a held-out loss.
# By --wire: how tokens travel to experts, and, in the backward, gradients.
WIRES = {None: None, "float8": "float8_e4m3fn", "mxfp8": "mxfp8"}
GRAD_WIRES = {None: None, "float8": "float8_e5m2", "mxfp8": "mxfp8_e5m2"}
PROMPT_BYTES, SAMPLE_BYTES, TEMPERATURE = 60, 300, 0.7


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line sets; `train_moe.py --help` explains it."""

    layers: int = 3
    hidden: int = 128
    experts: int = 8
    topk: int = 2
    shared_experts: int = 0
    chunks: int | None = None
    capacity_factor: float | None = 1.5
    wire: str | None = None
    selection_bias_rate: float = 0.0
    data: int | None = None
    expert: int | None = None
    tensor: int = 1
    domain_size: int | None = None
    implementation: str | None = None
    steps: int = 400
    seed: int = 0


def make_model(settings: Settings, *, keep_topk_idx: bool = False) -> lm.LanguageModel:
    """The model, with its parameters, over the mesh of the context."""
    has_bias = settings.selection_bias_rate > 0
    config = MoEConfig(
        num_experts=settings.experts,
        num_experts_per_tok=settings.topk,
        hidden_size=settings.hidden,
        moe_intermediate_size=2 * settings.hidden,
        num_shared_experts=settings.shared_experts,
        num_chunks=settings.chunks,
        capacity_factor=settings.capacity_factor,
        # Experts are balanced by the bias, where there is one, or by the loss.
        selection_bias=has_bias,
        selection_bias_update_rate=settings.selection_bias_rate,
        load_balance_loss_weight=0.0 if has_bias else BALANCE_LOSS,
        router_z_loss_weight=ROUTER_Z_LOSS,
        domain_size=settings.domain_size,
        implementation=settings.implementation,
        wire=WIRES[settings.wire],
        grad_wire=GRAD_WIRES[settings.wire],
    )
    return lm.LanguageModel(
        config,
        settings.layers,
        nnx.Rngs(settings.seed),
        keep_topk_idx=keep_topk_idx,
        tensor_axis="tensor" if settings.tensor > 1 else (),
    )


class Run:
    """A model in training, with its text, its history and its checkpoints."""

    def __init__(
        self,
        settings: Settings,
        checkpoints: ocp.CheckpointManager,
        recorder: Recorder | None = None,
    ):
        self.settings, self.checkpoints = settings, checkpoints
        self.recorder = recorder
        self.mesh = jax.sharding.get_mesh()
        self.sharding = NamedSharding(self.mesh, P(("data", "expert")))
        # Devices of a tensor axis have the same sequences.
        self.num_shares = self.mesh.size // settings.tensor
        self.num_sequences = max(1, SEQUENCES // self.num_shares) * self.num_shares
        self.text, held_out = manual_text.train_and_held_out()
        self.held_out = manual_text.all_windows(
            held_out, self.num_sequences, CONTEXT + 1
        )
        self.bigram = manual_text.bigram_loss(self.text, self.held_out)
        self.model = make_model(settings, keep_topk_idx=recorder is not None)
        warmup = min(WARMUP_STEPS, settings.steps // 2)
        rate = optax.warmup_cosine_decay_schedule(
            0, LEARNING_RATE, warmup, settings.steps, LEARNING_RATE / 10
        )
        adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))
        self.optimizer = nnx.Optimizer(self.model, adam, wrt=nnx.Param)
        # Per step: loss, rows dropped, slots of each expert `[layers, E]`.
        self.history: dict[str, list] = dict(loss=[], dropped=[], load=[], held_out=[])

    @property
    def step(self) -> int:
        """Steps that are done and looked at."""
        return len(self.history["loss"])

    def state(self) -> dict[str, nnx.State]:
        model = nnx.state(self.model, (nnx.Param, SelectionBias))
        return dict(model=model, optimizer=nnx.state(self.optimizer))

    def save(self) -> None:
        """Begins a checkpoint; it appears when it is complete."""
        if self.step == self.checkpoints.latest_step():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(self.state()),
            history=ocp.args.JsonSave(self.history),
        )
        self.checkpoints.save(self.step, args=args)

    def restore(self) -> None:
        """Goes back to the last checkpoint; the mesh may be another."""
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state())
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(like), history=ocp.args.JsonRestore()
        )
        saved = self.checkpoints.restore(self.checkpoints.latest_step(), args=args)
        nnx.update(self.model, saved["state"]["model"])
        nnx.update(self.optimizer, saved["state"]["optimizer"])
        self.history = saved["history"]

    def train(self, console: Console) -> bool:
        """Goes to the last step, or to Ctrl-C; returns whether that was the last step.

        What comes out is the same whether or not a checkpoint came in between.
        """
        total = self.settings.steps
        with progress_bar(console) as bar, first_interrupt(console) as interrupts:
            task = bar.add_task("compiling", total=total, completed=self.step)
            num_steps = 1  # The first compiles, and says nothing about speed.
            while self.step < total and not interrupts:
                start = time.perf_counter()
                self.advance(num_steps)
                seconds = time.perf_counter() - start
                status = self.status()
                if num_steps > 1:
                    rate = num_steps * self.num_sequences * CONTEXT / seconds
                    status += f" {rate:,.0f} tokens/s"
                bar.update(task, completed=self.step, description=status)
                num_steps = STEPS_IN_FLIGHT - self.step % STEPS_IN_FLIGHT
                num_steps = min(num_steps, total - self.step)
                if self.step % STEPS_PER_CHECKPOINT == 0 or self.step == total:
                    held_out = self.evaluate()
                    line = f"step {self.step}: held-out {held_out:.3f} {status}"
                    console.print(line, soft_wrap=True)
                    self.save()
            self.save()
            self.checkpoints.wait_until_finished()
        return self.step == total

    def advance(self, num_steps: int) -> None:
        launched = []
        for step in range(self.step, self.step + num_steps):
            seed, length = self.settings.seed, CONTEXT + 1
            windows = manual_text.random_windows(
                self.text, self.num_sequences, length, seed=seed, step=step
            )
            windows = jax.device_put(windows, self.sharding)
            metrics, ids = lm.train_step(self.model, self.optimizer, windows)
            launched.append(metrics)
            if self.recorder is not None:
                self.recorder.add(step, ids)
        for loss, dropped, load in jax.device_get(launched):
            self.history["loss"].append(float(loss))
            self.history["dropped"].append(int(dropped))
            self.history["load"].append(load.tolist())

    def evaluate(self) -> float:
        """The held-out loss of this step, in nats per byte; noted in the history."""
        known = self.history["held_out"]
        if not known or known[-1][0] != self.step:
            batches = (jax.device_put(batch, self.sharding) for batch in self.held_out)
            losses = [float(lm.evaluation_step(self.model, batch)) for batch in batches]
            known.append((self.step, float(np.mean(losses))))
        return known[-1][1]

    def status(self) -> str:
        """Of the last steps: loss, busiest expert over the mean, share dropped."""
        loss, dropped, load = (
            np.array(self.history[name][-STEPS_IN_FLIGHT:])
            for name in ("loss", "dropped", "load")
        )
        imbalance = (load.max(axis=2) / load.mean(axis=2)).mean()
        return (
            f"loss {loss.mean():.3f} imbalance {imbalance:.2f} "
            f"dropped {dropped.sum() / load.sum():.1%}"
        )

    def sample(self) -> tuple[str, str]:
        """Held-out text that the model has read, and how it goes on."""
        # One text per device; the first is shown.
        context = self.held_out[0, : self.num_shares, 1:]
        new = lm.generate(
            self.model,
            jax.device_put(context, self.sharding),
            jax.random.key(self.settings.seed),
            length=SAMPLE_BYTES,
            temperature=TEMPERATURE,
        )
        return readable(context[0, -PROMPT_BYTES:]), readable(np.asarray(new)[0])

    def draw(self, path: Path) -> None:
        """The loss curve, and each expert's share of the last steps' slots."""
        load = np.array(self.history["load"][-STEPS_PER_CHECKPOINT:]).sum(axis=0)
        load = load / load.mean(axis=1, keepdims=True)  # [layers, E]
        figure = Figure(figsize=(12, 4.5), layout="constrained")
        losses, loads = figure.subplots(1, 2, width_ratios=(3, 2))
        step = np.arange(1, self.step + 1)
        losses.plot(step, self.history["loss"], lw=1, alpha=0.6, label="training")
        if self.history["held_out"]:
            losses.plot(
                *zip(*self.history["held_out"], strict=True), "o-", label="held out"
            )
        losses.axhline(
            self.bigram, color="0.4", ls="--", label="bigram model, held out"
        )
        losses.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss")
        losses.legend()
        losses.grid(alpha=0.3)
        image = loads.imshow(load, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
        for (layer, expert), share in np.ndenumerate(load):
            if load.size <= 128:
                loads.text(expert, layer, f"{share:.2f}", ha="center", va="center")
        loads.set(xlabel="expert", ylabel="layer", yticks=range(len(load)))
        loads.set_title("Load of the experts in the last steps (1 = equal share)")
        figure.colorbar(image, ax=loads)
        figure.savefig(path, dpi=120)


def readable(text: np.ndarray) -> str:
    """Bytes as a string without control characters, which terminals obey."""
    characters = text.astype(np.uint8).tobytes().decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in characters)


def progress_bar(console: Console) -> progress.Progress:
    return progress.Progress(
        progress.BarColumn(8),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
        console=console,
    )


@contextlib.contextmanager
def first_interrupt(console: Console):
    """A list that the first Ctrl-C makes non-empty; the second is Python's own."""
    received: list[int] = []

    def receive(number, _):
        received.append(number)
        signal.signal(signal.SIGINT, before)
        console.print("Stopping after the steps in flight. (Again: at once.)")

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
