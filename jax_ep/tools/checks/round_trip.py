"""Runs `exchange.py` in a process of its own, with a time limit."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax_ep.tools.checks.outcome import Outcome, Subject, one_line

SUBJECT = Subject("round trip")

CPU_DEVICES = 8

Platform = Literal["cpu", "cuda"]

_NAMES = {"cpu": "CPU devices", "cuda": "GPUs"}
_REMEDIES = {
    "cpu": "Report it with the output of: jax_ep doctor --json",
    "cuda": "NCCL_DEBUG=INFO in the environment shows what NCCL does; "
    "implementation='xla' runs without our kernels. If the problems above are solved, "
    "report it with the output of: jax_ep doctor --json",
}
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Ended:
    """What became of a process.

    Attributes:
      lines: JSON objects that it printed.
      status: its exit status, negative for a signal; None if its time was over.
      complaint: the last line of its standard error.
    """

    lines: list[dict[str, Any]]
    status: int | None
    complaint: str


def run(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> Ended:
    """Runs Python with `arguments`, and ends it and its children after `timeout_s`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            # -P: the jax_ep that is installed, wherever this was started.
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,  # A group of its own, to be ended as one.
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        errors.seek(0)
        complaints = errors.read().decode(errors="replace").strip().splitlines()
        lines = []
        for line in out.read().decode(errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # The last one, cut, or what a library printed.
                continue
    return Ended(
        [line for line in lines if isinstance(line, dict)],
        status,
        one_line(complaints[-1]) if complaints else "",
    )


def environment_of(
    platform: Platform, environment: Mapping[str, str]
) -> dict[str, str]:
    """The user's environment, with what the exchange needs of JAX."""
    changed = dict(environment)
    if platform == "cpu":
        changed["JAX_PLATFORMS"] = "cpu"
        flags = environment.get("XLA_FLAGS", "")
        if _DEVICE_FLAG not in flags:
            changed["XLA_FLAGS"] = f"{flags} {_DEVICE_FLAG}={CPU_DEVICES}".strip()
    else:
        # Beside whatever else runs on these GPUs.
        changed["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return changed


def check(
    platform: Platform,
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    arguments: Sequence[str] = ("-m", "jax_ep.tools.checks.exchange"),
) -> Outcome:
    """Makes a real exchange on this machine's devices.

    Args:
      platform: whose devices.
      environment: `os.environ`.
      timeout_s: seconds for all of it, starting JAX and compiling included.
      arguments: of Python, before the platform.
    """
    changed = environment_of(platform, environment)
    return judge(platform, run([*arguments, platform], changed, timeout_s), timeout_s)


def judge(platform: Platform, ended: Ended, timeout_s: float) -> Outcome:
    """What the process has found."""
    name, remedy = _NAMES[platform], _REMEDIES[platform]
    words: dict[str, Any] = {"stage": "starting Python"}
    for line in ended.lines:
        words |= line
    where = f'at "{words["stage"]}"'
    if ended.status is None:
        return SUBJECT.problem(name, f"no end after {timeout_s:g} s, {where}", remedy)
    if "error" in words:
        return SUBJECT.problem(name, f"{where}: {words['error']}", remedy)
    if ended.status or "seconds" not in words:
        found = f"ended with status {ended.status} {where}"
        if ended.complaint:
            found += f": {ended.complaint}"
        return SUBJECT.problem(name, found, remedy)
    return SUBJECT.healthy(
        name,
        f"{words['devices']} devices ({words['kind']}): layout, dispatch, combine and "
        "their gradients equal implementation='xla' in every bit, "
        f"{words['seconds'] * 1e3:.2f} ms",
    )
