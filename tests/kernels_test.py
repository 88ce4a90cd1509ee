"""Run-time compilation of the CUDA kernels. Needs NVRTC, and neither GPU nor driver."""

import hashlib
import importlib.util
import itertools
import os
import pathlib
import stat
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import kernels, nvrtc
from jax_ep.ffi import CombineOperands, DispatchOperands, LayoutOperands

try:
    nvrtc.version()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)
pytestmark = pytest.mark.jax_version

ARCH = "sm_90a"
SOURCE = '#include "two.h"\nextern "C" __global__ void k(int* x) { *x = kTwo; }\n'
INCLUDES = {"two.h": "constexpr int kTwo = 2;\n"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty disk cache, and an empty one in memory."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAX_EP_CACHE_DIR", str(folder))
    forget(monkeypatch)
    return folder


def forget(monkeypatch) -> None:
    """As in a new process: only the disk remembers."""
    monkeypatch.setattr(nvrtc, "_memory", {})


def compile_simple(source=SOURCE, includes=INCLUDES, arch=ARCH) -> nvrtc.Cubin:
    return nvrtc.compile_cached("simple", source, includes, arch)


def entry(folder: pathlib.Path) -> pathlib.Path:
    (path,) = folder.glob("*.cubin")
    return path


def plant(folder: pathlib.Path, image: bytes) -> None:
    """Puts another image where the cache has its only one."""
    digest = hashlib.sha256(image).hexdigest().encode()
    entry(folder).write_bytes(image + digest)


# --- kernels -----------------------------------------------------------------

# Rows below 16 bytes, of odd size, of one piece, of several, and several leaves.
LEAF_BYTES = [(1,), (14336,), (65536,), (7168, 7168 // 128 * 4), (5, 64, 6)]
LEAVES = [
    (("bfloat16",), (7168,)),
    (("float16",), (4096,)),
    (("float32",), (7168,)),
    (("bfloat16", "float32"), (3, 1)),
]
COMBINE_FLAGS = [
    {},
    dict(has_weights=True, has_bias=True),
    dict(has_row_values=True),
    dict(wire_f32=True, has_weights=True, has_row_values=True),
    dict(out_f32=True, has_row_values=True),
]


def configurations():
    """Every branch that is compiled in, at the ends of its range and in common use."""
    for kernel in usual_configurations():
        yield kernel
        yield kernels.for_few(kernel)


def usual_configurations():
    yield kernels.layout_kernel()
    ranks_and_topk = itertools.cycle([(4, 8), (1, 1), (64, 32), (2, 6)])
    for leaf_bytes, has_weights in itertools.product(LEAF_BYTES, (False, True)):
        num_ranks, num_topk = next(ranks_and_topk)
        yield kernels.dispatch_kernel(
            num_ranks=num_ranks,
            num_topk=num_topk,
            leaf_bytes=leaf_bytes,
            has_weights=has_weights,
        )
    for i, (dtypes, widths) in enumerate(LEAVES * 2):
        flags = COMBINE_FLAGS[(i + i // len(LEAVES)) % len(COMBINE_FLAGS)]
        num_ranks, num_topk = next(ranks_and_topk)
        yield kernels.combine_kernel(
            num_ranks=num_ranks,
            num_topk=num_topk,
            leaf_dtypes=dtypes,
            leaf_widths=widths,
            **flags,
        )


@pytest.mark.parametrize("arch", kernels.DEFAULT_ARCHITECTURES)
@pytest.mark.parametrize("stage", ["layout", "dispatch", "combine"])
def test_kernels_use_no_local_memory(stage, arch):
    wanted = [kernel for kernel in configurations() if kernel.stage.endswith(stage)]
    for kernel, _, usage in kernels.report(wanted, [arch]):
        assert usage.entry == f"jax_ep_{stage}"
        spilled = usage.spill_store_bytes + usage.spill_load_bytes
        assert (usage.stack_bytes, spilled) == (0, 0), (kernel.macros, usage)
        assert 0 < usage.registers <= 255


def test_usage_sees_local_memory():
    source = """
extern "C" __global__ void k(float* x) {
  float a[64];
  for (int i = 0; i < 64; ++i) a[(int)x[64 + i]] = x[i];
  x[0] = a[(int)x[64]];
}
"""
    (usage,) = nvrtc.usage(source, {}, ARCH)
    assert usage.entry == "k" and usage.stack_bytes == 256


@pytest.mark.parametrize(
    "version, has_cache", [((12, 8), False), ((12, 9), True), ((13, 0), True)]
)
def test_usage_goes_past_the_cache_of_nvrtc(monkeypatch, version, has_cache):
    """What comes from there has no log; older ones do not know the option."""
    flags = []

    def compiled(source, includes, arch, extra):
        flags.extend(extra)
        if has_cache and "--no-cache" not in extra:
            return b"", ""
        return b"", (
            "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
            "    8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads\n"
            "ptxas info    : Used 16 registers, used 0 barriers"
        )

    monkeypatch.setattr(nvrtc, "version", lambda: version)
    monkeypatch.setattr(nvrtc, "_compile", compiled)
    assert nvrtc.usage("", {}, ARCH) == [nvrtc.Usage("k", 16, 8, 4, 2)]
    assert ("--no-cache" in flags) == has_cache


def test_compile_errors_are_shown():
    with pytest.raises(RuntimeError, match='(?s)NVRTC_ERROR_COMPILATION.*"missing"'):
        compile_simple("int x = missing;\n")


# --- attributes of a custom call ---------------------------------------------


def of(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


ROUTING = [of((64, 6)), of((64, 6)), of((2, 64, 6))]  # slot, slot_rank, recv_slot


def test_layout_attributes():
    params = dict(num_ranks=2, num_experts=8, stamps=False)
    ids = LayoutOperands(of((4096, 6)))
    found = kernels.attributes("jax_ep_layout", params, ids)
    few = kernels.attributes("jax_ep_layout", params, LayoutOperands(of((64, 6))))
    assert (found["few"], few["few"]) == (False, True)
    assert found["cubin_sm_90a_sha256"] != few["cubin_sm_90a_sha256"]
    assert found["cubin_archs"] == "sm_90a,sm_100a"
    for arch in kernels.DEFAULT_ARCHITECTURES:
        image = found[f"cubin_{arch}"]
        assert image.startswith(b"\x7fELF")
        assert found[f"cubin_{arch}_sha256"] == hashlib.sha256(image).hexdigest()
    assert len(found) == 2 + 2 * 2


def test_dispatch_attributes():
    leaves = (of((64, 96), jnp.bfloat16), of((64, 3), jnp.uint8))
    weights = of((64, 6), jnp.float32)
    operands = DispatchOperands(*ROUTING, of((4,)), of((4,)), weights, leaves)
    params = dict(num_ranks=2, stamps=False, has_weights=True)
    found = kernels.attributes("jax_ep_dispatch", params, operands)
    assert found["num_topk"] == 6 and found["num_topk"].dtype == np.int64
    np.testing.assert_array_equal(found["leaf_bytes"], np.array([192, 3], np.int64))
    assert found["leaf_bytes"].dtype == np.int64


def test_combine_attributes():
    leaves = (of((128, 96), jnp.bfloat16), of((128, 5), jnp.float32))
    bias = (of((64, 96), jnp.bfloat16), of((64, 5), jnp.float32))
    values = of((128,), jnp.float32)
    operands = CombineOperands(*ROUTING, None, values, leaves, bias)
    params = dict(
        num_ranks=2,
        stamps=False,
        has_weights=False,
        has_row_values=True,
        has_bias=True,
        wire_f32=False,
        out_f32=False,
    )
    found = kernels.attributes("jax_ep_combine", params, operands)
    assert found["num_topk"] == 6
    np.testing.assert_array_equal(found["leaf_dtypes"], np.array([1, 0], np.int32))
    assert found["leaf_dtypes"].dtype == np.int32
    np.testing.assert_array_equal(found["leaf_widths"], np.array([96, 5], np.int64))
    assert found["leaf_widths"].dtype == np.int64


def test_tokens_and_capacity_compile_nothing(cache):
    params = dict(num_ranks=2, stamps=False, has_weights=False)

    def attributes(num_tokens):
        routing = [of((num_tokens, 6)), of((num_tokens, 6)), of((2, num_tokens, 6))]
        leaves = (of((num_tokens, 96), jnp.bfloat16),)
        operands = DispatchOperands(*routing, of((4,)), of((4,)), None, leaves)
        return kernels.attributes("jax_ep_dispatch", params, operands)

    first, second = attributes(300), attributes(4096)
    assert first["cubin_sm_90a"] is second["cubin_sm_90a"]
    assert len(list(cache.glob("*.cubin"))) == len(kernels.DEFAULT_ARCHITECTURES)
    # Few tokens have a kernel of their own, for any number of them.
    first, second = attributes(1), attributes(256)
    assert first["few"] and first["cubin_sm_90a"] is second["cubin_sm_90a"]
    assert len(list(cache.glob("*.cubin"))) == 2 * len(kernels.DEFAULT_ARCHITECTURES)


def test_too_many_leaves():
    leaves = (of((64, 96), jnp.bfloat16),) * (kernels.MAX_LEAVES + 1)
    operands = DispatchOperands(*ROUTING, of((4,)), of((4,)), None, leaves)
    params = dict(num_ranks=2, stamps=False, has_weights=False)
    with pytest.raises(ValueError, match="jax_ep.dispatch: .* at most 16 leaves.* 17"):
        kernels.attributes("jax_ep_dispatch", params, operands)


class FakeDevice:
    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    "capabilities, want",
    [
        ([], kernels.DEFAULT_ARCHITECTURES),
        (["9.0"], ("sm_90a",)),
        (["9.0", "9.0"], ("sm_90a",)),
        (["12.0", "10.3"], ("sm_103a", "sm_120a")),
    ],
)
def test_architectures_of_the_local_devices(monkeypatch, capabilities, want):
    devices = [FakeDevice(capability) for capability in capabilities]
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    assert kernels.architectures() == want


def test_old_devices_are_named(monkeypatch):
    devices = [FakeDevice("9.0"), FakeDevice("8.0")]
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    with pytest.raises(NotImplementedError, match=r"need .* 9\.0 .* has 8\.0"):
        kernels.architectures()


# --- the disk cache ----------------------------------------------------------


def test_the_disk_remembers(cache, monkeypatch):
    cubin = compile_simple()
    assert cubin.image.startswith(b"\x7fELF")
    assert cubin.sha256 == hashlib.sha256(cubin.image).hexdigest()
    assert compile_simple() is cubin
    forget(monkeypatch)
    assert compile_simple() == cubin
    plant(cache, b"planted")
    forget(monkeypatch)
    assert compile_simple().image == b"planted"


def test_the_text_lies_beside_the_cubin(cache):
    cubin = compile_simple()
    text = entry(cache).with_suffix(".cu").read_text()
    assert "kTwo = 2" in text and "#include" not in text
    again = compile_simple(text, {})
    assert len(again.image) == len(cubin.image)  # the same code, save its hash


def test_what_is_compiled_is_the_key(cache, monkeypatch):
    compile_simple()
    variants = [
        dict(source=SOURCE + "\n"),
        dict(includes={"two.h": "constexpr int kTwo = 3;\n"}),
        dict(arch="sm_100a"),
    ]
    for number, variant in enumerate(variants):
        compile_simple(**variant)
        assert len(list(cache.glob("*.cubin"))) == 2 + number
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    compile_simple()
    assert len(list(cache.glob("*.cubin"))) == 2 + len(variants)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_compiled_again(cache, monkeypatch, damage):
    cubin = compile_simple()
    whole = entry(cache).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    entry(cache).write_bytes(
        dict(
            truncated=whole[: len(whole) // 2],
            flipped=bytes(flipped),
            empty=b"",
            foreign=b"something else" * 100,
        )[damage]
    )
    forget(monkeypatch)
    assert compile_simple() == cubin
    assert entry(cache).read_bytes() == whole


def test_without_a_usable_folder_it_compiles_and_warns_once(tmp_path, monkeypatch):
    # A file where the folder should be: root may write to a read-only folder.
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("JAX_EP_CACHE_DIR", str(blocked / "cache"))
    with pytest.warns(UserWarning, match="cannot keep compiled kernels in .*file/cach"):
        assert compile_simple().image.startswith(b"\x7fELF")
    assert compile_simple(SOURCE + "\n").image.startswith(b"\x7fELF")


def test_only_its_owner_may_use_the_cache_folder(cache):
    old = os.umask(0)
    try:
        compile_simple()
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "mode, owner, reason",
    [
        (0o770, 0, "its mode 770 lets other users write to it; chmod 700 mends that"),
        (0o702, 0, "its mode 702 lets other users write to it; chmod 700 mends that"),
        (0o700, 1, "it belongs to user {uid}, and this is user {other}"),
        (0o755, 0, None),
    ],
)
def test_a_folder_that_others_may_write_holds_no_code(
    cache, monkeypatch, mode, owner, reason
):
    cubin = compile_simple()
    plant(cache, b"planted")
    cache.chmod(mode)
    forget(monkeypatch)
    nvrtc._warn_no_cache.cache_clear()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + owner)
    if reason is None:
        assert compile_simple().image == b"planted"
        return
    before = sorted(cache.iterdir())
    with pytest.warns(UserWarning) as caught:
        assert compile_simple() == cubin
        assert compile_simple(SOURCE + "\n").image.startswith(b"\x7fELF")
    reason = reason.format(uid=uid, other=uid + 1)
    assert [str(warning.message) for warning in caught] == [
        f"jax_ep: cannot keep compiled kernels in {cache} ({reason}); every process "
        "compiles its own. JAX_EP_CACHE_DIR may name another folder."
    ]
    assert sorted(cache.iterdir()) == before


def test_cache_folder(monkeypatch):
    assert nvrtc.cache_folder().name == "cache"
    monkeypatch.delenv("JAX_EP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert nvrtc.cache_folder() == pathlib.Path("/somewhere/jax_ep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert nvrtc.cache_folder() == pathlib.Path("/home/someone/.cache/jax_ep")


def test_threads_share_one_compilation(monkeypatch):
    compiled = []
    compile_text = nvrtc._compile
    monkeypatch.setattr(
        nvrtc, "_compile", lambda *args: compiled.append(1) or compile_text(*args)
    )
    cubins = []
    threads = [
        threading.Thread(target=lambda: cubins.append(compile_simple()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert all(cubin is cubins[0] for cubin in cubins) and len(cubins) == 8


_PROCESS = """
import sys
from jax_ep import nvrtc
sys.stdin.readline()  # all at once
for i in range(5):
    source = 'extern "C" __global__ void k(int* x) { *x = %d; }' % i
    print(nvrtc.compile_cached("race", source, {}, "sm_90a").sha256)
"""


def test_processes_may_start_at_once(cache):
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", _PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = [process.communicate("go\n")[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len(set(outputs)) == 1 and len(outputs[0].split()) == 5
    names = sorted(path.name for path in cache.iterdir())
    suffixes = [pathlib.Path(name).suffix for name in names]
    assert suffixes == [".cu", ".cubin"] * 5, names  # and nothing half written
    for path in cache.glob("*.cubin"):
        data = path.read_bytes()
        assert hashlib.sha256(data[:-64]).hexdigest().encode() == data[-64:]


# --- what may be missing -----------------------------------------------------


def test_no_cuda_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"cuda-python.*pip install .*\[cuda13\]'"):
        nvrtc._nvrtc()


def test_no_headers(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pathlib.Path, "is_file", lambda path: False)
    monkeypatch.setenv("CUDA_HOME", "/opt/toolkit")
    with pytest.raises(ImportError, match=r"/opt/toolkit/include.*\[cuda13"):
        nvrtc.include_folder.__wrapped__()


@pytest.mark.parametrize(
    "version, folder", [((12, 9), "cuda_runtime"), ((13, 0), "cu13")]
)
def test_headers_are_of_the_compilers_cuda(monkeypatch, tmp_path, version, folder):
    """With the packages of both installed."""
    for name in ("cuda_runtime", "cu13"):
        (tmp_path / name / "include").mkdir(parents=True)
        (tmp_path / name / "include" / "cuda_bf16.h").write_text("")

    def find_spec(name):
        place = str(tmp_path / name.removeprefix("nvidia."))
        return types.SimpleNamespace(submodule_search_locations=[place])

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(nvrtc, "version", lambda: version)
    assert nvrtc.include_folder.__wrapped__() == tmp_path / folder / "include"


def test_headers_of_a_toolkit(monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_bf16.h").write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert nvrtc.include_folder.__wrapped__() == tmp_path / "include"
