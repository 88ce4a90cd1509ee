"""What recording costs a training step: with and without, in turn, on CPU devices.

Trains the language model of `train_moe.py` in blocks of steps, one block without a
recorder, the next with one that records every step. The devices are waited for at the
end of a block, as training does. Prints medians over the blocks, the host time of
`add`, and the bytes that a step takes in the file.
"""

import argparse
import platform
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))
import language_model as lm  # noqa: E402

from jax_ep import MoEConfig  # noqa: E402
from jax_ep.record import Recorder  # noqa: E402

BLOCK_STEPS = 4
CONTEXT, EXPERTS, TOPK = 128, 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=16)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("expert",))
    sharding = NamedSharding(mesh, P("expert"))
    windows = np.random.default_rng(0).integers(
        0, 256, (args.sequences, CONTEXT + 1), np.uint8
    )
    windows = jax.device_put(windows, sharding)

    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.routing"
        steps = {keeps: training(args, keeps) for keeps in (False, True)}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        add_seconds = []
        with Recorder(path, num_experts=EXPERTS, shares={"expert": 4}) as recorder:
            for step in steps.values():  # compiles
                jax.block_until_ready(step(windows))
            for block in range(2 * args.blocks):
                # Off, on, on, off, ...: a drift is shared by both.
                keeps = block % 4 in (1, 2)
                start = time.perf_counter()
                for n in range(BLOCK_STEPS):
                    metrics, ids = steps[keeps](windows)
                    if keeps:
                        began = time.perf_counter()
                        recorder.add(block * BLOCK_STEPS + n, ids)
                        add_seconds.append(time.perf_counter() - began)
                jax.block_until_ready(metrics)
                seconds[keeps].append((time.perf_counter() - start) / BLOCK_STEPS)
        size = path.stat().st_size / len(add_seconds)
    print(
        f"jax {jax.__version__}, Python {platform.python_version()}, 4 CPU devices, "
        f"{args.layers} layers, {args.sequences * CONTEXT} tokens, top-{TOPK} of "
        f"{EXPERTS}, {args.blocks} blocks of {BLOCK_STEPS} steps of each kind"
    )
    for keeps, name in ((False, "not recorded"), (True, "recorded")):
        print(f"{name:13} {summary(seconds[keeps])} a step")
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    print(f"recorded over not: {middle:.3f} (quartiles {low:.3f}, {high:.3f})")
    print(f"add           {summary(add_seconds)}")
    ids_bytes = args.layers * args.sequences * CONTEXT * TOPK
    print(f"file          {size:.0f} bytes a step for {ids_bytes} ids")


def training(args, keep_topk_idx: bool):
    """A step of a model of its own."""
    config = MoEConfig(
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        hidden_size=args.hidden,
        moe_intermediate_size=args.hidden,
        capacity_factor=2.0,
        load_balance_loss_weight=0.01,
    )
    model = lm.LanguageModel(
        config, args.layers, nnx.Rngs(0), keep_topk_idx=keep_topk_idx
    )
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return lambda windows: lm.train_step(model, optimizer, windows)


def summary(seconds: list[float]) -> str:
    low, middle, high = np.percentile(seconds, (25, 50, 75)) * 1e3
    return f"{middle:.3f} ms (quartiles {low:.3f}, {high:.3f})"


if __name__ == "__main__":
    main()
