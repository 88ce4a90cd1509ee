"""CUDA source text to cubin, with NVRTC and a disk cache.

Nothing here runs before a program is lowered for CUDA, and no GPU or driver is needed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import stat
import tempfile
import threading
import warnings
from collections.abc import Mapping

from jax_ep.installed import pip_install

# What every kernel is compiled with. Rounding options stay at their defaults: where it
# matters the kernels say how to round. No -lineinfo, which triples what every custom
# call carries.
_FLAGS = ("--std=c++17", "-default-device")
_VERBOSE = "--ptxas-options=-v"
# Where there is a driver, NVRTC from 12.9 on keeps what it compiled; what comes from
# there has no log.
_NO_CACHE, _NO_CACHE_SINCE = "--no-cache", (12, 9)
_DIGEST_BYTES = 64  # A sha256 in hexadecimal, behind each cached cubin.

_memory: dict[str, "Cubin"] = {}
_lock = threading.Lock()  # of the table of locks
_key_locks: dict[str, threading.Lock] = {}  # held while a kernel is compiled


@dataclasses.dataclass(frozen=True)
class Cubin:
    """A compiled kernel and the sha256 of its bytes, in hexadecimal."""

    image: bytes
    sha256: str


@dataclasses.dataclass(frozen=True)
class Usage:
    """What ptxas says of one entry function: registers, and bytes per thread."""

    entry: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def compile_cached(
    name: str, source: str, includes: Mapping[str, str], arch: str
) -> Cubin:
    """The cubin of `source`, compiled or from the cache in memory or on disk.

    Args:
      name: stem of the files in the cache, for people.
      source: CUDA C++.
      includes: texts of the headers that `source` may include, by the name it uses.
        The CUDA toolkit's own are found by `include_folder`.
      arch: e.g. "sm_90a".

    Raises:
      ImportError: no cuda-python, NVRTC or CUDA headers. RuntimeError: the compiler's
        errors.
    """
    key = _key(source, includes, arch)
    with _lock:
        key_lock = _key_locks.setdefault(key, threading.Lock())
    with key_lock:
        cubin = _memory.get(key)
        if cubin is None:
            cubin = _from_disk(name, key, source, includes, arch)
            _memory[key] = cubin
        return cubin


def usage(source: str, includes: Mapping[str, str], arch: str) -> list[Usage]:
    """Compiles `source`, past every cache, and returns what its kernels use."""
    past_cache = (_NO_CACHE,) if version() >= _NO_CACHE_SINCE else ()
    _, log = _compile(source, includes, arch, (_VERBOSE, *past_cache))
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill"
        r" stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    found = [
        Usage(entry, *(int(n) for n in (registers, stack, stores, loads)))
        for entry, stack, stores, loads, registers in pattern.findall(log)
    ]
    if not found:
        raise RuntimeError(f"jax_ep: no resource usage in the log of ptxas:\n{log}")
    return found


def cache_folder() -> pathlib.Path | None:
    """`JAX_EP_CACHE_DIR`, else `jax_ep` in the user's cache folder, else None."""
    if folder := os.environ.get("JAX_EP_CACHE_DIR"):
        return pathlib.Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(folder) / "jax_ep"
    with contextlib.suppress(RuntimeError):  # no home folder
        return pathlib.Path.home() / ".cache" / "jax_ep"
    return None


@functools.cache
def include_folder() -> pathlib.Path:
    """The folder of `cuda_bf16.h`: of the pip packages, else of a CUDA toolkit.

    Of the packages for NVRTC's own CUDA: those for 12 and 13 may both be there.
    """
    candidates = []
    for package in _header_packages():
        # find_spec, since the packages are folders without code.
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            for path in (spec and spec.submodule_search_locations) or ():
                candidates.append(pathlib.Path(path) / "include")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            candidates.append(pathlib.Path(root) / "include")
    candidates.append(pathlib.Path("/usr/local/cuda/include"))
    for candidate in candidates:
        if (candidate / "cuda_bf16.h").is_file():
            return candidate
    raise ImportError(
        "jax_ep: the CUDA kernels need CUDA's headers (cuda_bf16.h), which are in none "
        f"of {[str(c) for c in candidates]}. {_install()} brings them "
        "(nvidia-cuda-runtime); CUDA_HOME may name a toolkit instead."
    )


def _header_packages() -> tuple[str, ...]:
    before_13, since_13 = "nvidia.cuda_runtime", "nvidia.cu13"
    try:
        return (before_13,) if version() < (13, 0) else (since_13, before_13)
    except ImportError:  # Whoever compiles hears of that first.
        return since_13, before_13


@functools.cache
def version() -> tuple[int, int]:
    """The version of NVRTC, major and minor."""
    nvrtc = _nvrtc()
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-python has no NVRTC library to load
        raise ImportError(
            f"jax_ep: NVRTC, which compiles the CUDA kernels, cannot be loaded "
            f"({' '.join(str(error).split())}). {_install()} brings it "
            "(nvidia-cuda-nvrtc)."
        ) from error
    _check(nvrtc, result, "")
    return major, minor


def _nvrtc():
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"jax_ep: the CUDA kernels are compiled through cuda-python, which cannot "
            f"be imported ({error}). {_install()} brings it."
        ) from error
    return nvrtc


def _install() -> str:
    return f"{pip_install('cuda13')} (cuda12 for a driver of CUDA 12)"


def _check(nvrtc, result, log: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"jax_ep: NVRTC failed with {result.name}.\n{log}")


@functools.cache
def _toolkit_digest(folder: pathlib.Path) -> str:
    # The toolkit's headers with device code: a new version of them is a new kernel.
    digest = hashlib.sha256()
    for path in sorted(folder.glob("cuda_[bf]*.h*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _key(source: str, includes: Mapping[str, str], arch: str) -> str:
    digest = hashlib.sha256()
    parts = [source, arch, *_FLAGS, repr(version()), _toolkit_digest(include_folder())]
    for header in sorted(includes):
        parts += [header, includes[header]]
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _from_disk(name, key, source, includes, arch) -> Cubin:
    folder = cache_folder()
    if folder is not None and (reason := not_private(folder)):
        _warn_no_cache(str(folder), reason)
        folder = None
    path = folder / f"{name}-{arch}-{key[:32]}.cubin" if folder else None
    if path is not None:
        with contextlib.suppress(OSError):
            image, digest = _split(path.read_bytes())
            if hashlib.sha256(image).hexdigest().encode() == digest:
                return Cubin(image, digest.decode())
    image, _ = _compile(source, includes, arch)
    cubin = Cubin(image, hashlib.sha256(image).hexdigest())
    if path is not None:
        try:
            make_folder(path.parent)
            # The text first: whoever finds a cubin finds what it was made from.
            _write(path.with_suffix(".cu"), _flat_text(source, includes).encode())
            _write(path, image + cubin.sha256.encode())
        except OSError as error:
            _warn_no_cache(str(folder), str(error))
    return cubin


def make_folder(folder: pathlib.Path) -> None:
    """Makes a cache folder, its owner's alone, where there is none."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def not_private(folder: pathlib.Path) -> str:
    """Why a folder is no place for code that will run, or "" (also if it is not there).

    A cubin's digest stands beside it, so whoever may write there decides what runs.
    """
    try:
        status = folder.stat()
    except OSError:
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return f"its mode {mode:o} lets other users write to it; chmod 700 mends that"
    return ""


def _split(data: bytes) -> tuple[bytes, bytes]:
    return data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]


def _write(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all, whoever else writes it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@functools.cache  # one warning for a folder
def _warn_no_cache(folder: str, reason: str) -> None:
    warnings.warn(
        f"jax_ep: cannot keep compiled kernels in {folder} ({reason}); every process "
        "compiles its own. JAX_EP_CACHE_DIR may name another folder.",
        stacklevel=2,
    )


def _flat_text(source: str, includes: Mapping[str, str]) -> str:
    """The source with our own headers in place of their #include lines."""
    seen = set()

    def expand(text: str) -> str:
        def replace(match):
            header = match.group(1)
            if header not in includes or header in seen:
                return "" if header in includes else match.group(0)
            seen.add(header)
            return expand(includes[header])

        return re.sub(r'^#include "([^"]+)"$', replace, text, flags=re.MULTILINE)

    return expand(source)


def _compile(source, includes, arch, extra=()) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    version()  # a clear error where there is no NVRTC
    names = [header.encode() for header in includes]
    texts = [text.encode() for text in includes.values()]
    result, program = nvrtc.nvrtcCreateProgram(
        source.encode(), b"jax_ep.cu", len(names), texts, names
    )
    _check(nvrtc, result, "")
    try:
        flags = [*_FLAGS, *extra, f"-arch={arch}", f"-I{include_folder()}"]
        (result,) = nvrtc.nvrtcCompileProgram(
            program, len(flags), [flag.encode() for flag in flags]
        )
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = log.rstrip(b"\0").decode(errors="replace")
        _check(nvrtc, result, log)
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return cubin, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(get_size, get, program) -> bytes:
    _, size = get_size(program)
    buffer = bytes(size)
    get(program, buffer)
    return buffer
