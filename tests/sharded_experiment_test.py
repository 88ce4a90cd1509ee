"""examples/sharded_experiment.py as a user runs it, smaller."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "sharded_experiment.py"
SMALL = ["--hidden", "32", "--layers", "1"]


def run(*options, code=0) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, *SMALL, *options],
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder: Path, step: int) -> list[float]:
    return json.loads((folder / str(step) / "history" / "metadata").read_text())["loss"]


@pytest.mark.timeout(240)
def test_ep_degree_does_not_change_the_loss(tmp_path):
    out = tmp_path / "out"
    text = run("--sweep", "expert=1,2,4,8", "--steps", "4", "--out", out)
    for ranks in (2, 4, 8):
        assert f"expert={ranks} has the loss of expert=1 to " in text
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mesh"] for row in rows] == [
        "4, 2, 1",
        "2, 2, 2",
        "1, 2, 4",
        "1, 1, 8",
    ]
    assert len({row["held out"] for row in rows}) == 1
    assert (out / "sweep.png").stat().st_size > 10_000


@pytest.mark.timeout(240)
def test_resumes_on_the_same_curve(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sweep = ["--sweep", "capacity-factor=0.75", "--expert", "2"]
    run(*sweep, "--steps", "4", "--out", whole)
    run(*sweep, "--steps", "2", "--out", parts)
    assert "has results" in run(*sweep, "--out", parts, code=1)
    refused = run(*sweep, "--fsdp", "4", "--resume", "--out", parts, code=1)
    assert "--resume: fsdp was 2 in" in refused
    text = run(*sweep, "--steps", "4", "--resume", "--out", parts)
    name = "capacity_factor=0.75"
    assert losses(parts / name, 4) == losses(whole / name, 4)
    assert f"{name}: held-out loss" in text
    with (parts / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["dropped"] != "0.00%"


@pytest.mark.timeout(240)
def test_further_rounds_give_the_dropless_loss(tmp_path):
    sweep = ["--sweep", "capacity-factor=none,0.5", "--dropless-fallback"]
    run(*sweep, "--steps", "3", "--out", tmp_path / "out")
    with (tmp_path / "out" / "results.csv").open() as file:
        dropless, in_rounds = csv.DictReader(file)
    assert in_rounds["dropped"] == "0.00%"
    assert in_rounds["held out"] == dropless["held out"]
