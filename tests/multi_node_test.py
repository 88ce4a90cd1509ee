"""examples/multi_node: two processes are two domains; the loss is one domain's."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "multi_node"
SMALL = "--tokens 8 --hidden 16 --experts 8 --topk 2 --steps 3".split()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


@pytest.fixture
def tools(tmp_path) -> Path:
    """Stand-ins for a node's GPUs and for Slurm, and this Python."""

    def program(name: str, *lines: str) -> None:
        (tmp_path / name).write_text("\n".join(["#!/usr/bin/env bash", *lines]))
        (tmp_path / name).chmod(0o755)

    program("python", f'exec "{sys.executable}" "$@"')
    program("nvidia-smi", "for n in 0 1 2 3; do echo GPU $n; done")
    # A task a node, as `sbatch` of two nodes would start them, numbered by us.
    program(
        "srun",
        "export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_LOCALID=0",
        'echo "devices $JAX_LOCAL_DEVICE_IDS"',
        # `python train.py --domain-size 8 ...`: here a node has four CPU devices.
        '[ "$3 $4" = "--domain-size 8" ] && exec "$1" "$2" "$3" 4 "${@:5}"',
    )
    return tmp_path


def start(tools: Path, *command, **environment) -> subprocess.Popen:
    given = dict(
        os.environ,
        PATH=f"{tools}:{os.environ['PATH']}",
        JAX_PLATFORMS="cpu",
        JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        **environment,
    )
    return subprocess.Popen(
        command,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def by_hand(tools: Path, *told) -> list[subprocess.Popen]:
    address = f"localhost:{free_port()}"
    launch = FOLDER / "launch.sh"
    return [start(tools, launch, address, "2", str(n), *told) for n in range(2)]


def by_slurm(tools: Path, *told) -> list[subprocess.Popen]:
    job = str(free_port())  # JAX takes the coordinator's port from it.
    return [
        start(
            tools,
            "bash",
            FOLDER / "train.sbatch",
            *told,
            SLURM_SUBMIT_DIR=str(FOLDER),
            SLURM_JOB_ID=job,
            SLURM_PROCID=str(n),
        )
        for n in range(2)
    ]


@pytest.mark.parametrize(
    "launch", [by_hand, pytest.param(by_slurm, marks=pytest.mark.slow)]
)
def test_two_processes_train_as_one_domain(monkeypatch, tools, launch):
    processes = launch(tools, *SMALL)
    monkeypatch.syspath_prepend(FOLDER)
    import train

    assert jax.device_count() == 8
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL])
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam relies on it.
        want = train.train(train.arguments())
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 processes, 8 devices, 4 here; domains of 4" in outputs[0]
    assert launch == by_hand or "devices 0,1,2,3,4,5,6,7\n" in outputs[1]
    found = [float(text) for text in re.findall(r"loss ([0-9.]+),", outputs[0])]
    np.testing.assert_allclose(found, want, rtol=1e-4)
    # Later losses follow from the gradients of earlier steps.
    assert len(set(want)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_ends_the_others(tools, signalled):
    """By the collective's error or jax.distributed's heartbeats; never a hang."""
    told = [*SMALL[:-1], "100000", "--heartbeat-seconds", "10"]
    first, second = by_hand(tools, *told)
    with first, second:
        try:
            assert first.stdout is not None
            for line in first.stdout:
                if line.startswith("step 2:"):
                    break
            second.send_signal(signalled)
            output = first.communicate(timeout=90)[0]
        finally:
            first.kill()
            second.kill()
    assert first.returncode not in (0, None)
    assert "heartbeat" in output or "Gloo" in output, output
