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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fsdp", "3"], "--fsdp must divide the 8 devices that --expert 1 leaves"),
        (
            ["--sweep", "expert=4", "--fsdp", "4"],
            "--fsdp must divide the 2 devices that --expert 4 leaves, and is 4",
        ),
        (
            ["--hidden", "33"],
            "--hidden must be divisible by --fsdp (=2), and is 33",
        ),
        (["--experts", "6"], "--expert must divide --experts (=6), and is 4"),
        (["--topk", "9"], "--topk must be at most --experts (=8), and is 9"),
        (["--resume"], "--resume: there is no run in OUT"),
    ],
)
def test_what_no_run_can_be(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import sharded_experiment

    out = tmp_path / "none"
    monkeypatch.setattr(sys, "argv", ["x", *flags, "--out", str(out)])
    with pytest.raises(SystemExit) as raised:
        sharded_experiment.main()
    assert raised.value.code == 2 and not out.exists()
    assert message.replace("OUT", str(out)) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_resumes_and_further_rounds(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["--dropless-fallback", "--expert", "2"]
    run(*options, "--sweep", "capacity-factor=none,0.5", "--steps", "3", "--out", whole)
    with (whole / "results.csv").open() as file:
        dropless, in_rounds = csv.DictReader(file)
    assert in_rounds["dropped"] == "0.00%"
    assert in_rounds["held out"] == dropless["held out"]

    run("--sweep", "expert=3", "--out", parts, code=2)
    assert not parts.exists()
    options += ["--sweep", "capacity-factor=0.5", "--out", parts]
    run(*options, "--steps", "2")
    assert "has results" in run(*options, code=2)
    refused = run(*options, "--fsdp", "4", "--resume", code=2)
    assert "--resume: fsdp was None in" in refused
    text = run(*options, "--steps", "3", "--resume")
    name = "capacity_factor=0.5"
    assert losses(parts / name, 3) == losses(whole / name, 3)
    assert f"{name}: held-out loss" in text
