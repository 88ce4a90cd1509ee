"""The doctor on GPUs, the kernels' compiler and NCCL, told by stand-ins."""

import errno
import os
import types
from pathlib import Path

import pytest
from doctor_test import line, problems

from jax_ep import grouped_matmul
from jax_ep.installed import pip_install
from jax_ep.tools import doctor
from jax_ep.tools.checks import driver, experts, gpus, kernels, nccl

DEV = ["/dev/nvidia0", "/dev/nvidia1"]
KINDS = ["NVIDIA H200"] * 2


def two_gpus(capability=(9, 0), has_access=True, has_atomics=True, gib=140):
    gpu = driver.Gpu("NVIDIA H200", capability, gib * 2**30)
    links = [driver.Link(a, b, has_access, has_atomics) for a, b in ((0, 1), (1, 0))]
    return driver.Driver("13.0", (gpu, gpu), tuple(links))


def look(environment=None, system=DEV, seen=KINDS, why="", found=None):
    found = two_gpus() if found is None else found
    return gpus.check(system, seen, why, found, environment or {})


def test_gpus_in_order():
    outcomes = look()
    assert problems(outcomes) == []
    assert {outcome.name: outcome.found for outcome in outcomes} == {
        "JAX sees": "2: NVIDIA H200",
        "capability": "9.0; driver for CUDA 13.0",
        "peer access": "all 2 ordered pairs, all with native atomics, as over NVLink",
        "domains": "1 of 2 here: an axis over several such machines takes "
        "domain_size=2, unless NVLink joins the machines too",
        "memory": "140 GiB each; XLA takes 75%, 35.0 GiB stay for a workspace of "
        "81 MiB, CUDA and NCCL",
    }


def test_no_gpus():
    outcomes = look(system=[], seen=[])
    assert {(o.state, o.found) for o in outcomes} == {
        ("not applicable", "no CUDA devices")
    }


def test_gpus_that_jax_does_not_see():
    state, found, remedy = line(look(seen=[], why="no plugin"), "JAX sees")
    assert (state, found) == (
        "problem",
        "none of the 2 GPUs of this machine (/dev/nvidia0, ...): no plugin",
    )
    assert remedy == (
        f"Python 3.12 or later with {pip_install('cuda13', '-U')}; the NVIDIA driver "
        "must be one for CUDA 13 (nvidia-smi shows it)."
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_PLATFORMS", "cpu"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
    ],
)
def test_gpus_that_the_user_hides(variable, value):
    shown = f"{variable}={value or '(empty)'}"
    outcomes = look({variable: value}, seen=[])
    assert {(o.state, o.found) for o in outcomes} == {
        ("not applicable", f"{shown} leaves the GPUs out")
    }
    # Without GPUs, JAX_PLATFORMS=cpu is what one would write.
    outcomes = look({variable: value}, system=[], seen=[])
    more = f" found, and {shown} would leave them out" if variable[0] == "C" else ""
    assert {o.found for o in outcomes} == {f"no CUDA devices{more}"}


def test_gpus_of_which_some_are_hidden():
    outcomes = look({"CUDA_VISIBLE_DEVICES": "0"}, seen=KINDS[:1])
    assert line(outcomes, "JAX sees")[1] == (
        "1 of 2 (CUDA_VISIBLE_DEVICES=0): NVIDIA H200"
    )


NO_LIBRARY = "Unable to load cuPTI. Is it installed?"


@pytest.mark.parametrize(
    ("system", "failure", "is_problem"),
    [
        (DEV, NO_LIBRARY, True),
        ([], NO_LIBRARY, True),
        (DEV, "cuInit failed: CUDA_ERROR_NO_DEVICE", True),
        ([], "cuInit failed: CUDA_ERROR_NO_DEVICE", False),
    ],
)
def test_a_plugin_that_does_not_start(system, failure, is_problem):
    outcomes = gpus.check(system, [], "Unknown backend", None, {}, [failure])
    plugin = [outcome for outcome in outcomes if outcome.name == "CUDA plugin"]
    assert [outcome.state for outcome in plugin] == ["problem"] * is_problem
    for outcome in plugin:
        assert outcome.found == f"did not start: {failure}"
        assert pip_install("cuda13", "-U") in outcome.remedy


def test_what_jax_logs_of_a_plugin_is_found(tmp_path):
    """By a JAX that meets such a plugin, in a process of its own."""
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[jax_plugins]\nbroken = broken_plugin\n")
    (tmp_path / "broken_plugin.py").write_text(
        f"def initialize():\n  raise RuntimeError({NO_LIBRARY!r})\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(tmp_path), JAX_PLATFORMS="")
    kinds, why, failures = doctor.seen_gpus(environment)
    assert (kinds, NO_LIBRARY in failures) == ([], True), (why, failures)


def test_gpus_that_the_user_names():
    for environment in (
        {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "2,3"},
        {"JAX_PLATFORMS": "gpu"},
    ):
        assert gpus.hidden_by(environment) == ""


def test_gpus_too_old():
    assert line(look(found=two_gpus((8, 0))), "capability") == (
        "problem",
        "expected >= 9.0 (Hopper), got 8.0; driver for CUDA 13.0",
        "implementation='xla' runs on these GPUs, without our kernels.",
    )


def test_gpus_without_peer_access():
    state, found, remedy = line(look(found=two_gpus(has_access=False)), "peer access")
    assert (state, found) == ("problem", "none between the GPUs 0-1, 1-0")
    assert remedy.startswith("Choose GPUs of one NVLink domain")
    assert line(look(found=two_gpus(has_atomics=False)), "peer access") == (
        "healthy",
        "all 2 ordered pairs, 0 with native atomics: the others are not NVLink",
        None,
    )


def test_gpus_of_two_domains():
    gpu = two_gpus().gpus[0]
    near = [(a, b) for a in range(6) for b in range(6) if a != b and a // 2 == b // 2]
    links = tuple(driver.Link(a, b, True, True) for a, b in near)
    found = driver.Driver("13.0", (gpu,) * 6, links)
    assert line(look(found=found), "domains") == (
        "healthy",
        "3 of 2 here: an axis over all takes domain_size=2",
        None,
    )
    one_way = driver.Driver("13.0", (gpu,) * 6, links[:1])
    assert line(look(found=one_way), "domains")[0] == "not applicable"


def test_no_memory_for_the_workspace():
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9999"}
    assert line(look(environment), "memory") == (
        "problem",
        "140 GiB each; XLA takes 99.99%, 0.0 GiB stay for a workspace of 81 MiB, CUDA "
        "and NCCL",
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.75, or XLA_PYTHON_CLIENT_PREALLOCATE=false",
    )
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    assert line(look(environment), "memory")[0] == "healthy"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}
    assert line(look(environment), "memory") == (
        "problem",
        "XLA_PYTHON_CLIENT_MEM_FRACTION is 'most', which is no number",
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.75",
    )


def test_a_driver_that_fails():
    outcomes = look(found=driver.Driver(error="cuInit: CUDA_ERROR_NO_DEVICE"))
    assert line(outcomes, "driver") == (
        "problem",
        "cuInit: CUDA_ERROR_NO_DEVICE",
        "Install an NVIDIA driver for CUDA 12 or later.",
    )


def test_what_is_asked_of_the_driver():
    """By a stand-in for cuda-python: two Hoppers, access in one direction alone."""
    asked = {75: 9, 76: 0}
    api = types.SimpleNamespace(
        CUdevice_attribute=types.SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        ),
        CUdevice_P2PAttribute=types.SimpleNamespace(
            CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=3
        ),
        cuInit=lambda flags: (0,),
        cuDriverGetVersion=lambda: (0, 12040),
        cuDeviceGetCount=lambda: (0, 2),
        cuDeviceGet=lambda n: (0, f"device {n}"),
        cuDeviceGetName=lambda size, device: (0, device.encode() + b"\0\0"),
        cuDeviceGetAttribute=lambda which, device: (0, asked[which]),
        cuDeviceTotalMem=lambda device: (0, 2**37),
        cuDeviceCanAccessPeer=lambda a, b: (0, int(a < b)),
        cuDeviceGetP2PAttribute=lambda which, a, b: (0, int(which == 3)),
    )
    assert driver._ask(api) == driver.Driver(
        "12.4",
        tuple(driver.Gpu(f"device {n}", (9, 0), 2**37) for n in range(2)),
        (driver.Link(0, 1, True, True), driver.Link(1, 0, False, True)),
    )
    api.cuDeviceTotalMem = lambda device: (999, None)
    with pytest.raises(RuntimeError, match=r"^cuDeviceTotalMem: 999$"):
        driver._ask(api)


def usage(*_, **__):
    return [(None, None, types.SimpleNamespace(registers=80))]


def compiler(**changed):
    given = dict(
        version=lambda: (13, 5), include_folder=lambda: Path("/cuda"), report=usage
    )
    return kernels.check(True, ("sm_90a",), **(given | changed))


def raises(error: Exception):
    def call(*_, **__):
        raise error

    return call


def test_a_compiler_in_order():
    outcomes = compiler()
    assert [outcome.state for outcome in outcomes] == ["healthy"] * 3
    assert line(outcomes, "NVRTC")[1] == "13.5"
    assert line(outcomes, "headers")[1] == "/cuda"
    found = line(outcomes, "compilation")[1]
    assert found.startswith("layout for sm_90a in ")
    assert found.endswith(" s, 80 registers a thread")


def test_a_compiler_that_is_not_needed():
    outcomes = kernels.check(False, ("sm_90a",), version=raises(AssertionError()))
    assert {(o.state, o.found) for o in outcomes} == {
        ("not applicable", "no CUDA devices")
    }


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("NVRTC", dict(version=raises(ImportError("no\nNVRTC")))),
        ("headers", dict(include_folder=raises(ImportError("no\nheaders")))),
    ],
)
def test_a_missing_part_of_the_compiler(name, changed):
    outcomes = compiler(report=raises(AssertionError("compiled")), **changed)
    assert line(outcomes, name) == (
        "problem",
        f"no {name}",
        f"On Python 3.12 or later: {pip_install('cuda13', '-U')}",
    )
    assert line(outcomes, "compilation") == (
        "not applicable",
        "needs NVRTC and the headers",
        None,
    )


def test_a_compiler_that_fails():
    state, found, remedy = line(
        compiler(report=raises(RuntimeError("jax_ep: NVRTC failed.\nline 1"))),
        "compilation",
    )
    assert (state, found) == ("problem", "jax_ep: NVRTC failed. line 1")
    assert remedy.startswith("NVRTC and the headers must be of one CUDA release.")


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_EP_CACHE_DIR", raising=False)
    folder = tmp_path / "new" / "cache"
    found = kernels.check_cache(True, folder)
    assert (found.state, found.found) == ("healthy", f"{folder}, 0 kernels")
    assert list(folder.iterdir()) == []
    assert kernels.check_cache(False, tmp_path / "other").state == "not applicable"
    assert not (tmp_path / "other").exists()
    none = kernels.check_cache(True, None)
    assert (none.state, none.found) == (
        "problem",
        "none: no home folder, so every process compiles its own kernels",
    )


def test_a_cache_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    """Also where nobody needs it, if the user has named it."""
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("JAX_EP_CACHE_DIR", str(file / "cache"))
    found = kernels.check_cache(False, file / "cache")
    assert (found.state, found.found, found.remedy) == (
        "problem",
        f"{file / 'cache'} cannot be written to (Not a directory): every process "
        "compiles its own kernels",
        "JAX_EP_CACHE_DIR may name a folder that can be written to.",
    )


def test_a_cache_folder_that_others_may_write_to(tmp_path):
    """What the compiler refuses to use is no healthy cache."""
    tmp_path.chmod(0o777)
    found = kernels.check_cache(True, tmp_path)
    assert found.state == "problem"
    assert found.found.startswith(f"{tmp_path} is not used: ")
    assert "write" in found.found


def test_a_read_only_cache_folder(tmp_path, monkeypatch):
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))
    monkeypatch.setattr(kernels.tempfile, "NamedTemporaryFile", raises(error))
    found = kernels.check_cache(True, tmp_path)
    assert found.found == (
        f"{tmp_path} cannot be written to (Read-only file system): every process "
        "compiles its own kernels"
    )


def library(version: int, *names: str):
    """A stand-in for the shared library."""

    def get_version(pointer):
        pointer._obj.value = version
        return 0

    functions = dict.fromkeys(names, lambda: 0)
    return lambda path: types.SimpleNamespace(ncclGetVersion=get_version, **functions)


WINDOWS = ("ncclMemAlloc", "ncclCommWindowRegister", "ncclTeamLsa")
POINTER = "ncclGetLsaDevicePointer"
UPGRADE = "pip install -U 'nvidia-nccl-cu13>=2.29'"


@pytest.mark.parametrize(
    ("version", "names", "how"),
    [
        (22809, WINDOWS, "the window's layout of 2.28"),
        (23203, (*WINDOWS, POINTER), POINTER),
    ],
)
def test_nccl_in_order(version, names, how):
    outcomes = nccl.check(
        True,
        "libnccl.so.2",
        {},
        jax_version=(0, 11, 2),
        load=library(version, *names),
    )
    assert problems(outcomes) == []
    text = {22809: "2.28.9", 23203: "2.32.3"}[version]
    assert line(outcomes, "library")[1] == f"{text}, libnccl.so.2"
    found = f"ncclCommWindowRegister; peers' addresses by {how}"
    assert line(outcomes, "symmetric windows")[1] == found


def test_nccl_too_old():
    outcomes = nccl.check(True, "libnccl.so.2", {}, load=library(22707, *WINDOWS))
    assert line(outcomes, "library") == (
        "problem",
        "expected >= 2.28, got 2.27.7",
        UPGRADE,
    )


def test_nccl_too_old_for_the_jax_that_is_installed():
    load = library(22809, *WINDOWS)
    outcomes = nccl.check(True, "libnccl.so.2", {}, jax_version=(0, 12, 0), load=load)
    assert line(outcomes, "library") == (
        "problem",
        "expected >= 2.29 for jax 0.12.0, got 2.28.9",
        UPGRADE,
    )


def test_nccl_that_lacks_functions():
    outcomes = nccl.check(True, "libnccl.so.2", {}, load=library(22901, *WINDOWS[:2]))
    assert line(outcomes, "symmetric windows") == (
        "problem",
        "2.29.1 lacks ncclTeamLsa, ncclGetLsaDevicePointer",
        UPGRADE,
    )


def test_nccl_without_symmetric_memory():
    outcomes = nccl.check(
        True, "x", {"NCCL_CUMEM_ENABLE": "0"}, load=library(23203, *WINDOWS, POINTER)
    )
    assert line(outcomes, "symmetric windows") == (
        "problem",
        "NCCL_CUMEM_ENABLE=0 turns them off",
        "Unset NCCL_CUMEM_ENABLE.",
    )


def test_remedies_are_those_of_the_cuda_that_is_installed():
    """What a machine with CUDA 12 is told, where nothing works."""
    missing = raises(ImportError("none"))
    told = [
        *gpus.check(DEV, [], "", None, {}, [NO_LIBRARY], "cuda12"),
        *kernels.check(True, ("sm_90a",), extra="cuda12", version=missing),
        *nccl.check(True, "none", {}, extra="cuda12", load=raises(OSError("none"))),
    ]
    remedies = [outcome.remedy for outcome in told if outcome.state == "problem"]
    assert len(remedies) == 4
    for remedy in remedies:
        assert "cuda12" in remedy or "cu12" in remedy
        assert "13" not in remedy


def test_no_nccl(tmp_path):
    """A library that is really looked for."""
    path = str(tmp_path / "libnccl.so.2")
    state, found, remedy = line(nccl.check(True, path, {}), "library")
    assert state == "problem" and found.startswith(f"{path}: cannot open shared object")
    assert remedy == UPGRADE
    assert line(nccl.check(False, path, {}), "library")[0] == "not applicable"


def test_gpus_of_the_system(monkeypatch, tmp_path):
    """Device files, or what nvidia-smi lists, however it ends."""
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: [])
    program = tmp_path / "nvidia-smi"
    monkeypatch.setattr(gpus.shutil, "which", lambda name: str(program))
    assert gpus.nvidia_devices() == []  # It cannot be run.
    for text, expected in (
        ("GPU 0: NVIDIA H200 (UUID: x)", ["GPU 0: NVIDIA H200 (UUID: x)"]),
        ("NVIDIA-SMI has failed because it could not reach the driver", []),
    ):
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
        assert gpus.nvidia_devices() == expected


def test_the_experts_kernels(monkeypatch):
    """A device with measured kernels wants them installed."""
    check = experts.check
    assert check([]).state == "not applicable"
    assert check([]).found == "no CUDA devices"
    other = check(["NVIDIA RTX 6000"])
    assert (other.state, other.found) == (
        "healthy",
        "jax.lax.ragged_dot; nothing else was measured on NVIDIA RTX 6000",
    )
    monkeypatch.setattr(grouped_matmul, "is_installed", lambda kernel: False)
    missing = check(["NVIDIA H200"] * 2)
    assert missing.state == "problem"
    assert missing.found == (
        "jax.lax.ragged_dot, which multiplies every row with every expert on NVIDIA "
        "H200: 40 times the time at 64 experts"
    )
    assert missing.remedy == (
        f"{pip_install('tokamax')} (tokamax, jax-triton and triton >= 3.9)."
    )
    monkeypatch.setattr(grouped_matmul, "is_installed", lambda kernel: True)
    there = check(["NVIDIA H200"])
    assert (there.state, there.found) == ("healthy", "triton of tokamax, in bfloat16")
