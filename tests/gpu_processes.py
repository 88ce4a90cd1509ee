"""Starts processes of `gpu_launch.py` and collects what they print."""

import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

PLATFORM = os.environ.get("JAX_EP_GPU_TESTS_PLATFORM", "gpu")
SCRIPT = pathlib.Path(__file__).parent / "gpu_launch.py"
LIMIT_S = 150  # for a process: start, compilation, scenarios


@dataclasses.dataclass
class Line:
    """A line that a process printed, and when it came."""

    text: str
    seconds: float  # of time.time()

    def words(self) -> dict:
        """What its JSON says; empty if it is none."""
        if not self.text.startswith("{"):
            return {}
        return json.loads(self.text)


class Process:
    """A running `gpu_launch.py`, its output read as it comes."""

    def __init__(self, command: list[str], flags: str, env: dict[str, str]):
        self.flags = flags
        self.popen = subprocess.Popen(
            command,
            env=env,
            start_new_session=True,  # ends together with what it started
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[Line] = []
        self.err: list[Line] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.popen.stdout, self.out), (self.popen.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        for text in stream:
            with self._changed:
                lines.append(Line(text.rstrip("\n"), time.time()))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def tell(self, text: str) -> None:
        """A line for its standard input."""
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def await_event(self, event: str, limit_s: float = LIMIT_S) -> dict:
        """The first line of that event."""

        def found():
            return [w for line in self.out if (w := line.words()).get("event") == event]

        with self._changed:
            there = self._changed.wait_for(
                lambda: found() or not self._readers[0].is_alive(), limit_s
            )
        assert there and found(), f"no {event!r} within {limit_s} s\n{self.log()}"
        return found()[0]

    def finish(self, limit_s: float = LIMIT_S) -> dict[str, object]:
        """Each scenario's result, once it has ended well; itself ended in any case."""
        try:
            code = self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"none within {limit_s} s"
        finally:
            self.end()
        scenarios = [w for line in self.out if "scenario" in (w := line.words())]
        errors = [f"{w['scenario']}: {w['error']}" for w in scenarios if "error" in w]
        assert code == 0, "\n".join(
            [f"exit code {code}, XLA_FLAGS={self.flags!r}", *errors, self.log()]
        )
        return {w["scenario"]: w["result"] for w in scenarios}

    def end(self) -> None:
        """Ends this process, if it still runs."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        for reader in self._readers:
            reader.join(5)
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            stream.close()

    def log(self) -> str:
        """The ends of what it printed."""
        out = [line.text[:500] for line in self.out[-10:]]
        err = [line.text[:500] for line in self.err[-40:]]
        return "\n".join(["stdout:", *out, "stderr:", *err])


def start(
    scenarios: list[str],
    *,
    devices: int,
    flags: str = "",
    processes: int = 1,
    under: tuple[str, ...] = (),
) -> list[Process]:
    """Processes of `devices` devices each, which run the scenarios together.

    `under` is a command that runs the process.
    """
    env = dict(os.environ)
    # Not the starter's own number of CPU devices.
    env["XLA_FLAGS"] = flags
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several share a GPU
    if PLATFORM == "cpu":
        env["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
        env["JAX_PLATFORMS"] = "cpu"
    together = ["--devices", str(devices)]
    if processes > 1:
        together += ["--coordinator", f"localhost:{_free_port()}"]
        together += ["--processes", str(processes)]
    started = []
    for process in range(processes):
        arguments = [*together, "--process", str(process), *scenarios]
        command = [*under, sys.executable, str(SCRIPT), *arguments]
        started.append(Process(command, flags, env))
    return started


def finish(processes: list[Process], limit_s: float = LIMIT_S) -> dict[str, dict]:
    """The results of processes that ran together, their digests joined."""
    try:
        results = [process.finish(limit_s) for process in processes]
    finally:
        for process in processes:
            process.end()
    joined: dict[str, dict] = {}
    for result in results:
        for scenario, words in result.items():
            for name, value in words.items():
                known = joined.setdefault(scenario, {}).setdefault(name, value)
                assert known == value, f"{scenario}: processes differ in {name}"
    return joined


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
