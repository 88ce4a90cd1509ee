"""What needs processes of its own: flags of XLA, several processes, errors, exit."""

import re
import shutil
import signal

import gpu_launch
import gpu_processes
import jax
import pytest
from gpu_test import BASE_ARRAYS, GPU, layer, num_ranks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ON_GPU = GPU.platform == "gpu"
SANITIZER = shutil.which("compute-sanitizer")

_NO_COLLECTIVES = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CONDITIONAL,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE"
)
GRAPHS = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="
FLAGS = {
    "default": "",
    "no graphs": "--xla_gpu_enable_command_buffer=",
    "all but collectives": GRAPHS + _NO_COLLECTIVES,
    "all": GRAPHS + _NO_COLLECTIVES + ",COLLECTIVES",
    "serialized": "--xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_command_buffer_scheduling_mode=SERIALIZE",
}
CONCURRENT = (
    "--xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
)
_LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler="
_OVERLAP = "--xla_gpu_experimental_parallel_collective_overlap_limit="
SCHEDULES = {
    "default": "",
    "off": _LATENCY_HIDING + "false",
    "on, overlap 1": f"{_LATENCY_HIDING}true {_OVERLAP}1",
    "on, overlap 4": f"{_LATENCY_HIDING}true {_OVERLAP}4",
}


def compare_flags(flags: dict[str, str], scenarios: list[str]) -> None:
    """Starts a process for each, all at once; all must give the same."""
    devices = num_ranks()
    started = {
        name: gpu_processes.start(scenarios, devices=devices, flags=each)
        for name, each in flags.items()
    }
    failures, found = [], {}
    for name, processes in started.items():
        try:
            found[name] = gpu_processes.finish(processes)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n\n".join(failures)
    default = found.pop("default")
    for name, results in found.items():
        for scenario, result in results.items():
            wrong = [key for key in result if result[key] != default[scenario][key]]
            assert not wrong, f"{scenario} with {name}: differs in {wrong}"
            assert result


def test_command_buffers():
    """Captured in CUDA graphs by default, never, and always: the same bits, exit 0."""
    compare_flags(FLAGS, ["base_layer", "two_dispatches"])


def test_latency_hiding_scheduler():
    """Its schedules change no bit of four layers' gradients."""
    compare_flags(SCHEDULES, ["layers"])


def test_concurrent_scheduling():
    """Two exchanges that XLA may run at once: right rows, or an error that says so."""
    processes = gpu_processes.start(
        ["two_dispatches"], devices=num_ranks(), flags=CONCURRENT
    )
    try:
        assert gpu_processes.finish(processes)["two_dispatches"]
    except AssertionError as error:
        text = str(error)
        assert "overlap of two jax_ep calls" in text and "exit code 1" in text, text


def test_beside_collectives():
    """An all-gather and a psum in flight beside dispatch and combine, 200 times."""
    times = 200 if ON_GPU else 2
    scenario = f"beside_collectives:{times}"
    result = gpu_processes.finish(gpu_processes.start([scenario], devices=num_ranks()))[
        scenario
    ]
    if ON_GPU:
        assert result["overlapped"] == ["all-gather", "all-reduce"]


LAUNCHES = [(2, 1), (4, 1), (2, 2)]


@pytest.mark.parametrize("shape", LAUNCHES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_several_processes(shape):
    """As many processes with so many GPUs each: the values of one process."""
    processes, devices = shape
    GPU.devices(processes * devices)
    scenarios = ["base_layer", "two_dispatches", "large"]
    one = gpu_processes.start(scenarios, devices=processes * devices)
    many = gpu_processes.start(scenarios, devices=devices, processes=processes)
    try:
        want = gpu_processes.finish(one)
        got = gpu_processes.finish(many)
    finally:
        for process in (*one, *many):
            process.end()
    assert set(want) == set(got) == set(scenarios)
    for scenario in scenarios:
        assert set(got[scenario]) == set(want[scenario]), scenario
        wrong = [k for k, v in want[scenario].items() if got[scenario][k] != v]
        assert not wrong, f"{scenario}: differs in {wrong}"


def test_export(tmp_path):
    """Exported for CUDA here, run in a process that knows only the file."""
    devices = num_ranks()
    mesh = GPU.mesh(expert=devices)
    function = layer(mesh)

    def loss(x, ids, weights, scales):
        out = function(x, ids, weights, scales)
        return out.sum(), out

    def step(*args):
        gradients, out = jax.grad(loss, argnums=(0, 2, 3), has_aux=True)(*args)
        return out, gradients

    sharding = NamedSharding(mesh, P("expert"))
    args = [jax.device_put(array, sharding) for array in BASE_ARRAYS]
    allowed = [
        jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_ep.CUSTOM_CALLS
    ]
    platform = "cuda" if ON_GPU else "cpu"
    program = jax.export.export(
        jax.jit(step), platforms=[platform], disabled_checks=allowed
    )(*args)
    path = tmp_path / "program"
    path.write_bytes(program.serialize())
    scenario = f"exported:{path}"
    result = gpu_processes.finish(gpu_processes.start([scenario], devices=devices))
    assert result[scenario] == gpu_launch.digest(jax.jit(step)(*args))


STAGES = {"layout": "layout, ", "dispatch": "dispatch, ", "combine": "combine, "}


def check_message(text: str, phase: str, late: int) -> None:
    """Who waited for whom, where, and what for."""
    assert re.search(
        r'jax_ep: rank \d+ of the \d+ ranks of axis "expert" gave up after '
        rf"{gpu_launch.TIMEOUT_S:.0f}\.\d s waiting for rank {late}, "
        rf"which has not begun this call; phase: {phase}"
        r".*; expected: \d+; seen: \d+",
        text,
    ), text


def log_delay(process: gpu_processes.Process, launched: float) -> float:
    """Seconds from the launch to the first line that our watcher wrote."""
    times = [line.seconds for line in process.err if "gave up" in line.text]
    assert times, process.log()
    return min(times) - launched


@pytest.mark.parametrize("stage", STAGES)
def test_a_late_rank(stage):
    """The limit passes: a log line, worthless outputs, and errors from then on."""
    devices = num_ranks()
    scenario = f"stall:{stage}"
    (process,) = gpu_processes.start([scenario], devices=devices)
    try:
        launched = process.await_event("launched")["time"]
        result = process.finish()[scenario]  # exit code 0, too
    finally:
        process.end()
    if not ON_GPU:
        assert f"jax_ep.{stage.replace('layout', 'dispatch_layout')}" in result["call"]
        return
    assert result["call"] == "" and result["poisoned"]
    for text in (result["check"], result["next"]):
        check_message(text, STAGES[stage], late=devices - 1)
    delay = log_delay(process, launched)
    assert gpu_launch.TIMEOUT_S <= delay <= gpu_launch.TIMEOUT_S + 1, delay


@pytest.mark.skipif(not ON_GPU, reason="CPU processes run the reference")
def test_a_stopped_process():
    """One of two processes is stopped; the other names it, and both exit cleanly."""
    GPU.devices(2)
    running, late = gpu_processes.start(["stopped"], devices=1, processes=2)
    try:
        for process in (running, late):
            process.await_event("ready")
        late.popen.send_signal(signal.SIGSTOP)
        running.tell("go")
        launched = running.await_event("launched")["time"]
        failed = running.await_event("failed", limit_s=20)
        late.popen.send_signal(signal.SIGCONT)
        late.tell("go")
        late_failed = late.await_event("failed", limit_s=20)
        for process in (running, late):
            process.tell("exit")
        for process in (running, late):
            process.finish(60)  # exit code 0
    finally:
        late.popen.send_signal(signal.SIGCONT)
        for process in (running, late):
            process.end()
    assert failed["poisoned"] and late_failed["poisoned"]
    for result in (failed, late_failed):
        for text in (result["check"], result["next"]):
            check_message(text, "layout, ", late=1)
    delay = log_delay(running, launched)
    assert gpu_launch.TIMEOUT_S <= delay <= gpu_launch.TIMEOUT_S + 1, delay


@pytest.mark.timeout(400)
@pytest.mark.skipif(not SANITIZER and ON_GPU, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool):
    """Two processes, since it runs the kernels of one process one after another."""
    GPU.devices(2)
    scenarios = ["base_layer:2", "two_dispatches:2"]
    under = ("env",)  # where the tests are tested
    if ON_GPU:
        # Only our kernels: NCCL tries calls that may fail, and kernels for other GPUs.
        under = (SANITIZER, "--tool", tool, "--error-exitcode", "9")
        under += ("--report-api-errors", "no")
        under += ("--kernel-name", "kernel_substring=jax_ep")
        if tool == "synccheck":  # it has room for few barriers of ours, and then fails
            under += ("--num-cuda-barriers", "4096")
    processes = gpu_processes.start(scenarios, devices=1, processes=2, under=under)
    assert set(gpu_processes.finish(processes, 350)) == set(scenarios)
    if ON_GPU:
        for process in processes:
            lines = [line.text for line in (*process.out, *process.err)]
            summary = [text for text in lines if "SUMMARY" in text]
            assert summary and all(" 0 " in text for text in summary), process.log()
