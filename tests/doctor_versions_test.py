"""The doctor on versions and on the compiled module."""

import types

import pytest
from doctor_test import line, problems

from jax_ep.installed import pip_install
from jax_ep.tools.checks import module, versions

PYTHON_311, PYTHON_312 = (3, 11, 7), (3, 12, 1)
PACKAGES = {"jax": "0.11.2", "jaxlib": "0.11.2", "numpy": "2.4.6", "flax": "0.12.12"}
CUDA_PACKAGES = PACKAGES | {
    "jax-cuda13-plugin": "0.11.2",
    "jax-cuda13-pjrt": "0.11.2",
    "cuda-python": "13.4.4",
}
CUDA12_PACKAGES = PACKAGES | {
    "jax-cuda12-plugin": "0.11.2",
    "jax-cuda12-pjrt": "0.11.2",
    "cuda-python": "12.9.10",
}


@pytest.mark.parametrize(
    ("python", "packages", "has_gpus"),
    [
        (PYTHON_311, PACKAGES | {"jax": "0.10.2", "jaxlib": "0.10.2"}, False),
        (PYTHON_312, PACKAGES, False),
        (PYTHON_312, CUDA_PACKAGES, True),
        (PYTHON_312, CUDA_PACKAGES, False),
        (PYTHON_312, CUDA12_PACKAGES, True),
        # Kernels are compiled for others' GPUs, too.
        (PYTHON_312, PACKAGES | {"cuda-python": "12.9.10"}, False),
    ],
)
def test_versions_that_go_together(python, packages, has_gpus):
    assert problems(versions.check(python, packages, has_gpus)) == []


@pytest.mark.parametrize(
    ("python", "changed", "has_gpus", "name", "expected"),
    [
        (
            (3, 10, 9),
            {},
            False,
            "Python",
            ("expected >= 3.11, got 3.10.9", "Use Python 3.12."),
        ),
        (
            PYTHON_311,
            {},
            True,
            "Python",
            (
                "3.11.7, on which jax_ep runs on CPU devices only, and there are GPUs",
                "Use Python 3.12 or later for CUDA.",
            ),
        ),
        (
            PYTHON_312,
            {"jax": "0.10.2"},
            False,
            "jax",
            ("expected >= 0.11.2, got 0.10.2", "pip install -U 'jax>=0.11.2'"),
        ),
        (
            PYTHON_312,
            {"jaxlib": "0.11.1"},
            False,
            "jax and jaxlib",
            (
                "expected one release, got jax 0.11.2 and jaxlib 0.11.1",
                "pip install -U 'jax==0.11.2' 'jaxlib==0.11.2'",
            ),
        ),
        (
            PYTHON_312,
            {"numpy": "1.26.4"},
            False,
            "numpy",
            ("expected >= 2.0, got 1.26.4", "pip install -U 'numpy>=2.0'"),
        ),
        (
            PYTHON_312,
            {"flax": "0.11.0"},
            False,
            "flax",
            ("expected >= 0.12, got 0.11.0", "pip install -U 'flax>=0.12'"),
        ),
        (
            PYTHON_312,
            {},
            True,
            "CUDA plugin",
            (
                "not installed, and there are GPUs",
                pip_install("cuda13", "-U"),
            ),
        ),
        (
            PYTHON_312,
            {"jax-cuda13-plugin": "0.12.0"},
            True,
            "CUDA plugin",
            (
                "expected that of jaxlib 0.11.2, got jax-cuda13-plugin 0.12.0",
                pip_install("cuda13", "-U"),
            ),
        ),
        (
            PYTHON_312,
            {"jax-cuda12-plugin": "0.12.0"},
            True,
            "CUDA plugin",
            (
                "expected that of jaxlib 0.11.2, got jax-cuda12-plugin 0.12.0",
                pip_install("cuda12", "-U"),
            ),
        ),
        (
            PYTHON_312,
            {"jax-cuda12-plugin": "0.11.2", "jax-cuda13-plugin": "0.11.2"},
            True,
            "CUDA plugin",
            (
                "expected one, got jax-cuda13-plugin 0.11.2, jax-cuda12-plugin 0.11.2",
                "pip uninstall the one whose CUDA is not the driver's (nvidia-smi).",
            ),
        ),
        (
            PYTHON_312,
            CUDA12_PACKAGES | {"cuda-python": "13.4.4"},
            True,
            "cuda-python",
            (
                "expected 12, as the CUDA plugin's CUDA, got 13.4.4",
                pip_install("cuda12", "-U"),
            ),
        ),
    ],
)
def test_versions_that_do_not(python, changed, has_gpus, name, expected):
    outcomes = versions.check(python, PACKAGES | changed, has_gpus)
    assert line(outcomes, name) == ("problem", *expected)


def test_versions_that_are_not_there():
    packages = {
        name: v for name, v in PACKAGES.items() if name not in ("numpy", "flax")
    }
    outcomes = versions.check(PYTHON_312, packages, False)
    assert line(outcomes, "numpy") == (
        "problem",
        "not installed",
        "pip install 'numpy'",
    )
    assert line(outcomes, "flax") == (
        "not applicable",
        "not installed; only jax_ep.nnx and jax_ep.linen need it",
        None,
    )


def test_versions_later_than_those_tested_are_no_problem():
    outcomes = versions.check(
        PYTHON_312, PACKAGES | {"jax": "0.13.0", "jaxlib": "0.13.0"}, False
    )
    found = "0.13.0, later than 0.12, the latest that was tested"
    assert line(outcomes, "jax") == ("healthy", found, None)
    assert problems(outcomes) == []


def test_release():
    assert versions.release("0.12.0.1") == (0, 12, 0, 1)
    assert versions.release("0.11.2.dev20260101") == (0, 11, 2)
    assert versions.release("") == ()


def compiled(has_cuda: bool = True, version=(0, 4)):
    return types.SimpleNamespace(
        abi_version=4,
        api_version=lambda: version,
        has_cuda=has_cuda,
        registrations=lambda: {"cpu": {"jax_ep_layout": {}, "jax_ep_combine": {}}},
    )


def test_a_module_in_order():
    outcomes = module.check(compiled(), (0, 5), True, True)
    assert problems(outcomes) == []
    assert line(outcomes, "custom calls")[1] == (
        "cpu: jax_ep_combine, jax_ep_layout (ABI 4)"
    )
    assert line(outcomes, "interface")[1] == "built for XLA FFI 0.4, jaxlib offers 0.5"


@pytest.mark.parametrize("runtime", [(0, 3), (1, 4)])
def test_a_module_for_another_jaxlib(runtime):
    state, found, remedy = line(
        module.check(compiled(), runtime, True, True), "interface"
    )
    offered = f"{runtime[0]}.{runtime[1]}"
    assert (state, found) == (
        "problem",
        f"built for XLA FFI 0.4, jaxlib offers {offered}",
    )
    assert remedy.startswith("Install a newer jax, or build jax_ep against this jaxlib")


def test_a_module_without_cuda():
    found = "not compiled in: built on Python 3.11, or against jaxlib < 0.11.2"
    assert line(
        module.check(compiled(False), (0, 4), False, True), "CUDA handlers"
    ) == (
        "problem",
        found,
        f"On Python 3.12 or later: {pip_install('cuda13', '-U')}",
    )
    assert line(
        module.check(compiled(False), (0, 4), False, False), "CUDA handlers"
    ) == (
        "not applicable",
        f"{found}; no GPUs need them",
        None,
    )
