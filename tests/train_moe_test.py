"""examples/train_moe.py: trains, stops at Ctrl-C, and goes on as if it never had."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jax_ep.record import read

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_moe.py"
STEPS = 200
SMALL = f"--layers 1 --hidden 32 --experts 4 --expert 2 --data 1 --steps {STEPS}"


def start(out: Path, *more: str | Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", EXAMPLE, *SMALL.split(), "--out", out, *more],
        env=dict(os.environ, JAX_PLATFORMS="cpu"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


def last_checkpoint(out: Path):
    with ocp.CheckpointManager(out / "checkpoints") as checkpoints:
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(), history=ocp.args.JsonRestore()
        )
        step = checkpoints.latest_step()
        saved = checkpoints.restore(step, args=args)
    arrays = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(saved["state"])
    }
    return step, arrays, saved["history"]


@pytest.mark.slow
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path):
    recorded = tmp_path / "whole.routing"
    whole = start(tmp_path / "whole", "--record", recorded, "--record-every", "50")
    stopped = start(tmp_path / "stopped")
    with whole, stopped:
        for line in stopped.stdout:
            if line.startswith("step 50:"):
                break
        stopped.send_signal(signal.SIGINT)
        rest, _ = stopped.communicate(timeout=200)
        assert stopped.returncode == 130, rest
        assert f"To go on: python {EXAMPLE} --resume" in rest
        step, _, history = last_checkpoint(tmp_path / "stopped")
        assert 50 <= step < STEPS
        assert len(history["loss"]) == step
        with start(tmp_path / "stopped", "--resume") as resumed:
            output = finish(resumed)
        finish(whole)

    assert "held-out loss" in output and "bigram model" in output
    for name in ("whole", "stopped"):
        picture = (tmp_path / name / "training.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len((tmp_path / name / "sample.txt").read_text(encoding="utf-8")) > 100
    step, arrays, history = last_checkpoint(tmp_path / "stopped")
    expected_step, expected_arrays, expected_history = last_checkpoint(
        tmp_path / "whole"
    )
    assert step == expected_step == STEPS
    assert history == expected_history
    assert history["loss"][-1] < history["loss"][0] - 2
    assert arrays.keys() == expected_arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected_arrays[name], err_msg=name)

    recording = read(recorded)
    assert recording.is_complete and recording.steps == (0, 50, 100, 150)
    assert recording.metadata.shares == {"data": 1, "expert": 2}
    for step, (ids,) in zip(recording.steps, layers(recording), strict=True):
        assert ids.shape == (16, 128, 2)
        load = [(ids == expert).sum() for expert in range(4)]
        assert [load] == history["load"][step]


def layers(recording):
    return [list(record.topk_idx.values()) for record in recording]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--steps 0",
            "argument --steps: must be a whole number from 1 to 2147483647, and is '0'",
        ),
        ("--step 5", "unrecognized arguments: --step 5"),
        ("--hidden 100", "--hidden must be a multiple of 32, and is 100"),
        ("--topk 9", "--topk must be at most --experts (=8), and is 9"),
        ("--expert 3", "--expert must divide --experts (=8), and is 3"),
        (
            "--data 1 --expert 8 --domain-size 3",
            "--domain-size must divide the size of the expert axis (=8), and is 3",
        ),
        ("--tensor 3", "--tensor must divide --hidden (=128), and is 3"),
        (
            "--data 2 --expert 4 --tensor 2",
            "--data 2 times --expert 4 times --tensor 2 must be at most the 8 cpu "
            "devices here",
        ),
        (
            "--capacity-factor 0.1",
            "--capacity-factor must be at least 1 / --topk (=0.5), and is 0.1",
        ),
        (
            "--chunks 2 --wire mxfp8",
            "--chunks (=2) exchanges rows as they are: not with --wire mxfp8",
        ),
        ("--resume --out OUT", "--resume: there is no run in OUT"),
        (
            "--out OUT --record OUT/no/run",
            "OUT/no/run.partial: No such file or directory",
        ),
    ],
)
def test_bad_arguments_give_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import train_moe

    out = str(tmp_path / "none")
    arguments, message = (text.replace("OUT", out) for text in (arguments, message))
    monkeypatch.setattr(sys, "argv", ["train_moe.py", *arguments.split()])
    with pytest.raises(SystemExit) as exit_info:
        train_moe.main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"train_moe.py: error: {message}\n"
    # Settings of a run that never was would change the next one's.
    assert not list(tmp_path.rglob("settings.json"))


def test_tensor_axis_and_chunks_do_not_change_the_losses(monkeypatch):
    """Each expert over two devices, beside one that sees every token; in chunks."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import train_moe
    import training

    def losses(tensor, chunks=None):
        settings = training.Settings(
            layers=1,
            hidden=32,
            experts=4,
            shared_experts=1,
            chunks=chunks,
            capacity_factor=None,
            data=1,
            expert=2,
            tensor=tensor,
            steps=2,
        )
        mesh = train_moe.device_mesh(settings)
        assert dict(mesh.shape).get("tensor", 1) == tensor
        with jax.set_mesh(mesh):
            run = training.Run(settings, None)
            gate = run.model.blocks[0].moe.gate_up_proj.get_value()
            run.advance(2)
        # What a device has of an expert.
        width = gate.sharding.shard_shape(gate.shape)[2]
        return run.history["loss"], gate.shape[2] / width

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        (whole, one), (split, two) = losses(1), losses(2)
        parts, _ = losses(1, chunks=2)
    assert (one, two) == (1, 2)
    assert whole[0] != whole[1]
    np.testing.assert_allclose(split, whole, rtol=1e-5)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
