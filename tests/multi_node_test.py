"""examples/multi_node: two processes are two domains; the loss is one domain's."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "multi_node" / "train.py"
SMALL = "--tokens 8 --hidden 16 --experts 8 --topk 2 --steps 3".split()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def test_two_processes_train_as_one_domain(monkeypatch):
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, EXAMPLE, "--coordinator", address, "--processes", "2"]
            + ["--process", str(n), "--domain-size", "4", *SMALL],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import train

    assert jax.device_count() == 8
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL])
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam relies on it.
        want = train.train(train.arguments())
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 processes, 8 devices, 4 here; domains of 4" in outputs[0]
    found = [float(text) for text in re.findall(r"loss ([0-9.]+),", outputs[0])]
    np.testing.assert_allclose(found, want, rtol=1e-4)
    # Later losses follow from the gradients of earlier steps.
    assert len(set(want)) == 3
