"""The host side of the CUDA handlers, on stand-ins for the driver and for NCCL.

The tests themselves are C++, `tests/cuda/*_test.cc`: each runs in a process of its own.
Needs a C++ compiler and jaxlib >= 0.11.2's headers, and no GPU.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = pathlib.Path(__file__).parent / "cuda"
HEADERS = pathlib.Path(jax.ffi.include_dir())
COMPILER = os.environ.get("CXX", "g++")
TESTS = [
    name
    for path in sorted(SOURCES.glob("*_test.cc"))
    for name in re.findall(r"^TEST\((\w+)\)", path.read_text(), re.M)
]

pytestmark = [
    pytest.mark.jax_version,
    pytest.mark.skipif(
        not (HEADERS / "xla" / "ffi" / "api" / "collectives_c_api.h").exists(),
        reason="needs the collectives extension's header (jaxlib >= 0.11.2)",
    ),
    pytest.mark.skipif(
        shutil.which(COMPILER) is None, reason=f"needs a C++ compiler ({COMPILER})"
    ),
]

# What a test asks of the stand-ins (standin_cuda.cc, standin_nccl.cc).
ENVIRONMENT = {
    "old_driver": {"STANDIN_LACKS": "cuLibraryLoadData"},
    "old_nccl": {"STANDIN_NCCL_VERSION": "22707"},
    "two_domains": {"STANDIN_LSA_RANKS": "1"},
    "no_symmetric_memory": {"STANDIN_NO_SYMMETRIC": "1"},
}
# NCCL 2.28 has no function for peer addresses; later versions have.
NCCL_BUILDS = {"2.28": [], "2.29": ["-DSTANDIN_LSA_POINTER"]}


def build(output: pathlib.Path, *arguments: str) -> None:
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}"]
    flags += ["-DJAX_EP_POISON_OUTPUTS=0", "-ffp-contract=off"]
    flags += ["-isystem", str(HEADERS), "-o", str(output)]
    output.parent.mkdir(exist_ok=True)
    subprocess.run([COMPILER, *flags, *arguments], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    """A folder with host_test, and the stand-ins in a folder per NCCL version."""
    folder = tmp_path_factory.mktemp("standin")
    host = (ROOT / "ffi" / "host").glob("*.cc")
    sources = [path for path in host if not path.stem.endswith("_test")]
    sources += [*(ROOT / "ffi" / "cuda").glob("*.cc"), *SOURCES.glob("*_test.cc")]
    objects = [folder / f"{i}.o" for i in range(len(sources))]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(build, to, "-c", str(path))
            for to, path in zip(objects, sources, strict=True)
        ]:
            done.result()
    build(folder / "host_test", *map(str, objects), "-ldl", "-pthread")
    for version, macros in NCCL_BUILDS.items():
        for name in ("cuda", "nccl"):
            soname = {"cuda": "libcuda.so.1", "nccl": "libnccl.so.2"}[name]
            build(
                folder / version / soname,
                *["-fPIC", "-shared", f"-Wl,-soname,{soname}", *macros],
                *[str(SOURCES / f"standin_{name}.cc"), "-ldl"],
            )
    return folder


def run(built: pathlib.Path, name: str, nccl: str) -> subprocess.CompletedProcess:
    libraries = built / ("none" if name == "no_driver" else nccl)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    return subprocess.run(
        [built / "host_test", name],
        env={**environment, **ENVIRONMENT.get(name, {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def cases():
    for name in TESTS:
        for nccl in NCCL_BUILDS:
            # The stand-in shows only what 2.28 does without peer access.
            if (name, nccl) != ("no_symmetric_memory", "2.29"):
                yield name, nccl


@pytest.mark.parametrize("name, nccl", list(cases()))
def test_host(built, name, nccl):
    done = run(built, name, nccl)
    assert done.returncode == 0, done.stderr


def test_a_recorded_error_is_printed_at_once(built):
    # host_test prints "-- later" 0.7 s after the kernel's record.
    lines = run(built, "timeout", "2.28").stderr.splitlines()
    assert lines[1:] == ["-- later"]
    for part in (
        'jax_ep: rank 0 of the 2 ranks of axis "expert" gave up after 2.6 s',
        "waiting for rank 1",
        "phase: combine, rows of the peer",
        "expected: 17",
        "seen: 16",
    ):
        assert part in lines[0]


def test_a_rank_that_fails_alone_says_so_at_once(built):
    # Its peers may wait for it inside NCCL, so an error that JAX raises is not enough.
    assert "ncclMemAlloc" in run(built, "out_of_memory", "2.28").stderr
