"""The doctor: its command, and a real exchange in a process of its own."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import rich.console
import typer
from conftest import CPU_FFI
from typer.testing import CliRunner

from jax_ep import _ffi
from jax_ep.tools import console, doctor
from jax_ep.tools.checks import exchange, round_trip
from jax_ep.tools.checks.outcome import Outcome


def line(outcomes: list[Outcome], name: str) -> tuple[str, str, str | None]:
    """State, what was found and the remedy of one check."""
    (outcome,) = [outcome for outcome in outcomes if outcome.name == name]
    return outcome.state, outcome.found, outcome.remedy


def problems(outcomes: list[Outcome]) -> list[str]:
    return [outcome.name for outcome in outcomes if outcome.state == "problem"]


def pretend(tmp_path, program: str, timeout_s: float = 30.0) -> Outcome:
    """What is made of an exchange that is this program."""
    path = tmp_path / "program.py"
    path.write_text(program)
    return round_trip.check("cpu", os.environ, timeout_s, arguments=[str(path)])


def test_a_round_trip_that_fails(tmp_path):
    found = pretend(
        tmp_path,
        "import sys\n"
        """print('{"stage": "compiling", "devices": 2, "kind": "cpu"}')\n"""
        """print('{"error": "RuntimeError: rank 1 stayed away"}')\n"""
        "sys.exit(1)\n",
    )
    assert (found.state, found.found, found.remedy) == (
        "problem",
        'at "compiling": RuntimeError: rank 1 stayed away',
        "Report it with the output of: jax_ep doctor --json",
    )


def test_a_round_trip_that_hangs(tmp_path):
    """It is ended, and so is the process that it has started itself."""
    start = time.monotonic()
    found = pretend(
        tmp_path,
        "import subprocess, sys, time\n"
        """print('{"stage": "the first exchange"}', flush=True)\n"""
        "child = subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n",
        timeout_s=3,
    )
    assert time.monotonic() - start < 20
    assert (found.state, found.found) == (
        "problem",
        'no end after 3 s, at "the first exchange"',
    )
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # Whoever adopts the orphan reaps it.
        if not running(child):
            break
        time.sleep(0.05)
    assert not running(child)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_round_trip_that_crashes(tmp_path):
    found = pretend(
        tmp_path,
        "import os, sys\n"
        """print('{"stage": "the first exchange"}', flush=True)\n"""
        "print('no line of ours', flush=True)\n"
        "print('a\\nlast words', file=sys.stderr, flush=True)\n"
        "os.abort()\n",
    )
    assert (found.state, found.found) == (
        "problem",
        'ended with status -6 at "the first exchange": last words',
    )


def test_a_round_trip_without_jax_ep(tmp_path):
    found = pretend(tmp_path, "import jax_ep.none\n")
    assert found.found == (
        'ended with status 1 at "starting Python": ModuleNotFoundError: No module '
        "named 'jax_ep.none'"
    )


def test_environment_of_an_exchange():
    """The user's flags stay, and so does their number of devices."""
    given = {"XLA_FLAGS": "--xla_dump_to=x", "HOME": "/home"}
    assert round_trip.environment_of("cpu", given) == {
        "XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "HOME": "/home",
    }
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert round_trip.environment_of("cpu", given)["XLA_FLAGS"] == given["XLA_FLAGS"]
    assert round_trip.environment_of("cuda", given) == given | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
    }


def test_a_wrong_bit_is_found(capsys, monkeypatch):
    """The exchange in this process, with a reference that is wrong in one array."""
    sound = exchange.program

    def unsound(mesh, implementation):
        if implementation == "ffi":
            return sound(mesh, implementation)

        def everything(*arguments):
            found = sound(mesh, implementation)(*arguments)
            found["d_x"]["narrow"] = -found["d_x"]["narrow"]
            return found

        return jax.jit(everything)

    monkeypatch.setattr(exchange, "program", unsound)
    assert exchange.main("cpu") == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {
        "error": "RuntimeError: not the bits of implementation='xla': d_x.narrow"
    }


def test_differences_are_of_bits():
    """Zeros of two signs differ, NaNs of one pattern do not."""
    got = dict(a=np.float32([np.nan]), b=np.float32([0]), c=np.float16([1, 2]))
    want = dict(a=np.float32([np.nan]), b=np.float32([-0.0]), c=np.float16([1, 2]))
    assert exchange.differences(got, want) == ["b"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_some_rows_of_the_exchange_are_dropped(num_ranks):
    """Or capacity would be untried."""
    mesh = CPU_FFI.mesh(expert=num_ranks)
    handle = exchange.program(mesh, "ffi")(*exchange.make_arguments(mesh))["handle"]
    assert np.asarray(handle.num_dropped)[0] > 0


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-m", "jax_ep", "doctor", *arguments],
        env=dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", COLUMNS="120"),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.jax_version
def test_this_machine_is_healthy():
    """The whole command, exchange included, on CPU devices."""
    result = command("--json")
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["format"] == "jax_ep doctor 1" and document["healthy"]
    found = {(c["subject"], c["name"]): c for c in document["checks"]}
    assert found["versions", "jax"]["found"].startswith(jax.__version__)
    calls = found["compiled module", "custom calls"]["found"]
    assert f"ABI {_ffi.abi_version}" in calls
    exchanged = found["round trip", "CPU devices"]["found"]
    assert exchanged.startswith("8 devices (cpu): layout, dispatch, combine and their")


def run_on(monkeypatch, outcomes: list[Outcome], *arguments: str, width: int = 100):
    """The command on a machine with these outcomes, in a terminal of that width."""
    monkeypatch.setattr(doctor, "examine", lambda timeout_s, say: iter(outcomes))
    monkeypatch.setattr(console, "console", rich.console.Console(width=width))
    app = typer.Typer()
    app.command()(doctor.doctor)
    return CliRunner().invoke(app, arguments)


HEALTHY = Outcome("versions", "Python", "healthy", "3.12.1")
PROBLEM = Outcome("NCCL", "library", "problem", "got [2.27]", "pip install it")
ABSENT = [Outcome("GPUs", n, "not applicable", "no CUDA devices") for n in "ab"]


def test_problems_are_the_exit_status(monkeypatch):
    result = run_on(monkeypatch, [HEALTHY, PROBLEM])
    assert result.exit_code == 1
    lines = [" ".join(text.split()) for text in result.stdout.splitlines()]
    assert [text for text in lines if text] == [
        "versions Python healthy 3.12.1",
        "NCCL library problem got [2.27]",
        "what to do: pip install it",
        "1 problem, 1 healthy.",
    ]


@pytest.mark.parametrize("width", [30, 50, 79, 80])
def test_narrow_terminals_lose_nothing(monkeypatch, width):
    problem = dataclasses.replace(PROBLEM, remedy="pip install " + "x" * 90)
    result = run_on(monkeypatch, [HEALTHY, problem, *ABSENT], width=width)
    assert max(map(len, result.stdout.splitlines())) <= width
    text = "".join(result.stdout.split())
    for words in ("3.12.1", "got[2.27]", "pipinstall" + "x" * 90, "noCUDAdevices"):
        assert words in text


def test_health_is_exit_status_0(monkeypatch):
    result = run_on(monkeypatch, [HEALTHY, *ABSENT])
    assert result.exit_code == 0
    lines = [" ".join(text.split()) for text in result.stdout.splitlines()]
    assert [text for text in lines if text] == [
        "versions Python healthy 3.12.1",
        "GPUs not applicable no CUDA devices",
        "Healthy: 1 check.",
    ]


def test_problems_for_machines(monkeypatch):
    result = run_on(monkeypatch, [PROBLEM], "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "format": "jax_ep doctor 1",
        "healthy": False,
        "checks": [
            {
                "subject": "NCCL",
                "name": "library",
                "state": "problem",
                "found": "got [2.27]",
                "remedy": "pip install it",
            }
        ],
    }


def test_a_time_limit_that_is_none(monkeypatch):
    result = run_on(monkeypatch, [], "--timeout", "0")
    assert isinstance(result.exception, console.UserError)
    assert str(result.exception) == "--timeout (=0) must be positive."
