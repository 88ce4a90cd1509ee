"""examples/expert_placement.py as a user runs it, smaller."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "expert_placement.py"


def test_replicas_even_out_the_ranks(tmp_path):
    options = ["--experts", "16", "--tokens", "128", "--topk", "2", "--replicas", "8"]
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, *options, "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    imbalance = [
        float(re.search(rf"^{name}.* ([\d.]+)$", done.stdout, re.MULTILINE)[1])
        for name in ("contiguous", "moved", "with replicas")
    ]
    before, moved, after = imbalance
    assert before > 1.5 and after < 1.2 and after < moved
    assert "differ by" in done.stdout
    assert (tmp_path / "expert_placement.png").stat().st_size > 10_000
