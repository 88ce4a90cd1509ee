"""examples/flax_import.py as a user runs it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "flax_import.py"
MISSING = [
    name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None
]


def run(*options):
    return subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=110
    )


@pytest.mark.skipif(
    bool(MISSING) and not os.environ.get("JAX_EP_REQUIRE_HF"),
    reason=f'needs the extra "hf-test": {", ".join(MISSING)} not installed',
)
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_outputs_agree(model_type):
    done = run("--model-type", model_type)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{model_type}, layer 1, experts on " in done.stdout
    assert "outputs differ by " in done.stdout


@pytest.mark.skipif(not MISSING, reason="the extra hf-test is installed")
def test_says_what_is_missing():
    done = run()
    assert done.returncode == 1
    assert done.stderr == (
        'flax_import.py needs the extra "hf-test": pip install ".[hf-test]" '
        f"(No module named '{MISSING[0]}')\n"
    )


def test_help_needs_nothing():
    done = run("--help")
    assert done.returncode == 0 and "--checkpoint" in done.stdout, done.stderr
