"""Checkpoint files: safetensors with every dtype that NumPy and JAX have, FP8 too."""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

# The format's names (https://github.com/huggingface/safetensors, section Format, and
# its enumeration Dtype). Those of less than a byte have no NumPy type of their layout.
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "C64": np.complex64,
}
_LENGTH_BYTES = 8  # Of the header's length, little endian.
_MAX_HEADER_BYTES = 100_000_000  # The format's own bound.


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, or of all in a folder, as NumPy arrays.

    Arrays are read-only views of the mapped file: what is not looked at is not read, so
    a whole checkpoint costs no memory. The `safetensors` package's own NumPy and Flax
    readers fail on FP8 (version 0.8: AttributeError), and the former on bfloat16.

    Args:
      path: a `.safetensors` file, or a folder of them (the shards of one checkpoint).

    Returns:
      Names to arrays, in the order of the files and of their headers; what
      `load_hf_moe_layer` takes.

    Raises:
      ValueError: a file that is not of the format or ends too early, a dtype that NumPy
        cannot hold, a tensor in two files; FileNotFoundError: no such file.

    Source: the format's description at https://github.com/huggingface/safetensors.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(
            f"jax_ep.load_safetensors: path (={str(path)!r}) must have .safetensors "
            "files in it."
        )
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        for name, array in _tensors(file).items():
            if name in tensors:
                _refuse(file, f"must not repeat {name} of another file")
            tensors[name] = array
    return tensors


def _tensors(file: Path) -> dict[str, np.ndarray]:
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if not 0 < length <= _MAX_HEADER_BYTES or start > size:
            _refuse(file, f"must begin with its header's length, and has {size} bytes")
        try:
            header = json.loads(opened.read(length))
        except ValueError as error:
            _refuse(file, f"must have a JSON header ({error})")
    if not isinstance(header, dict):
        _refuse(file, "must have a header of names")
    # Not np.memmap: its every slice would be one too.
    mapped = np.asarray(np.memmap(file, np.uint8, mode="r"))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor(file, mapped[start:], name, entry)
    return tensors


def _tensor(file: Path, data: np.ndarray, name: str, entry: Any) -> np.ndarray:
    try:
        shape, dtype_name = tuple(entry["shape"]), entry["dtype"]
        begin, end = entry["data_offsets"]
        num_elements = int(np.prod(shape, dtype=object))
    except (KeyError, TypeError, ValueError) as error:
        _refuse(file, f"must say dtype, shape and data_offsets of {name} ({error!r})")
    if dtype_name not in _DTYPES:
        _refuse(file, f"has {name} in {dtype_name}, which must be one of {[*_DTYPES]}")
    dtype = np.dtype(_DTYPES[dtype_name])
    if not 0 <= begin <= end <= data.size or end - begin != num_elements * (
        dtype.itemsize
    ):
        _refuse(
            file,
            f"must have {num_elements * dtype.itemsize} bytes of {name}, and has them "
            f"at {begin} to {end} of {data.size}",
        )
    return data[begin:end].view(dtype).reshape(shape)


def _refuse(file: Path, rule: str) -> NoReturn:
    raise ValueError(f"jax_ep.load_safetensors: path (={str(file)!r}) {rule}.")
