"""Versions, the compiled module, and what import jax_ep may cost."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

import jax_ep
from jax_ep import _ffi, ffi, registration


def run(program: str, **env: str) -> subprocess.CompletedProcess:
    """A fresh process on CPU devices."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", **env)
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_custom_calls():
    assert ffi.TARGETS == ("jax_ep_layout", "jax_ep_dispatch", "jax_ep_combine")
    in_flight = ("jax_ep_dispatch_start", "jax_ep_combine_start", "jax_ep_done")
    assert jax_ep.CUSTOM_CALLS == ffi.TARGETS + in_flight
    assert set(_ffi.registrations()["cpu"]) == set(ffi.TARGETS)


def test_state_types_differ_per_platform():
    """A type shared by two platforms crashes XLA."""
    names = [name for types in _ffi.types().values() for name in types]
    assert len(names) == len(set(names))


@pytest.mark.jax_version
def test_built_for_this_runtime():
    built, found = _ffi.api_version(), registration.runtime_api_version()
    assert built[0] == found[0] and built[1] <= found[1]
    assert all(isinstance(part, int) for part in (*built, *found))


@pytest.mark.jax_version
@pytest.mark.parametrize("older", ["minor", "major"])
def test_a_runtime_too_old_is_refused(monkeypatch, older):
    """Before anything is registered, with both versions."""
    major, minor = registration.runtime_api_version()
    built = (major, minor + 1) if older == "minor" else (major + 1, 0)
    stand_in = types.SimpleNamespace(
        api_version=lambda: built,
        types=lambda: pytest.fail("registered"),
        registrations=lambda: pytest.fail("registered"),
    )
    monkeypatch.setattr(registration, "_ffi", stand_in)
    with pytest.raises(ImportError) as error:
        registration.register()
    assert str(error.value) == (
        f"jax_ep was built for XLA FFI {built[0]}.{built[1]} and jaxlib "
        f"{jax.lib.__version__} offers {major}.{minor}: install a newer jax, or build "
        "jax_ep against this jaxlib."
    )


def test_an_incomplete_jaxlib_is_named(monkeypatch, tmp_path):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("// nothing")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(ImportError) as error:
        registration.runtime_api_version()
    assert str(error.value) == (
        f"jax_ep: XLA_FFI_API_MAJOR is not in {header}: is jaxlib complete?"
    )


def test_import_starts_no_backend_and_needs_no_flax():
    result = run(
        "import sys, jax, jax_ep\n"
        "heavy = {'flax', 'optax', 'cuda', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # refused once there is one
        "assert len(jax.devices()) == 3\n",
        XLA_FLAGS="",
    )
    assert result.returncode == 0, result.stderr


def test_import_time():
    """Under half a second of work beyond `import jax`; the best of three tries."""
    program = (
        "import jax, jax.ffi, jax.extend, time\n"
        "start = time.process_time()\n"
        "import jax_ep\n"
        "print(time.process_time() - start)\n"
    )
    assert min(float(run(program).stdout) for _ in range(3)) < 0.5


def test_the_first_operation_of_a_process(backend):
    """Nothing needs to have run before a layout; and no message at exit."""
    if backend.platform == "gpu":
        pytest.skip("a process of its own for the GPUs is tested elsewhere")
    program = f"""
import jax, numpy as np, jax_ep
from jax.sharding import PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
layout = jax.jit(jax.shard_map(
    lambda ids: jax_ep.dispatch_layout(
        ids, num_experts=4, implementation={backend.implementation!r}),
    mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
print(np.asarray(layout(np.zeros((4, 1), np.int32)).num_recv)[:4].tolist())
"""
    result = run(program)
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        "[4, 0, 0, 0]\n",
        "",
    )


def test_targets_survive_collection():
    """Nothing that XLA keeps a pointer to is Python's to collect."""
    program = """
import gc, jax, numpy as np, jax_ep
from jax.sharding import PartitionSpec as P
gc.collect()
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("expert",))
layout = jax.jit(jax.shard_map(
    lambda ids: jax_ep.dispatch_layout(ids, num_experts=4, implementation="ffi"),
    mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
for n in range(20):
    gc.collect()
    got = np.asarray(layout(np.full((2, 1), n % 4, np.int32)).group_counts)
    assert got.tolist() == [2 * (e == n % 4) for e in range(4)]
"""
    result = run(program)
    assert (result.returncode, result.stderr) == (0, "")


def test_primitives_are_named_after_their_targets():
    assert ffi.TARGETS == (ffi.LAYOUT, ffi.DISPATCH, ffi.COMBINE)


@pytest.mark.skipif(
    Path(_ffi.__file__).parent != Path(jax_ep.__file__).parent,
    reason="an editable install finds its compiled module from everywhere",
)
@pytest.mark.parametrize(
    "command", [["-c", "import jax_ep"], ["-m", "jax_ep", "doctor"]]
)
def test_without_the_compiled_module(tmp_path, command):
    """As in a checkout after `pip install .`: the line says what to do."""
    shutil.copytree(
        Path(jax_ep.__file__).parent,
        tmp_path / "jax_ep",
        ignore=shutil.ignore_patterns("_ffi*.so"),
    )
    found = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 1
    line = found.stderr.splitlines()[-1]
    assert "has no compiled module for this Python" in line and "-P" in line
    assert "circular" not in line


def test_an_older_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
    monkeypatch.setattr(jax, "__version__", "0.9.2")
    with pytest.raises(ImportError) as error:
        registration.register()
    assert str(error.value) == (
        "jax_ep needs jax >= 0.10.2, and this is jax 0.9.2: pip install -U "
        "'jax>=0.10.2'."
    )
