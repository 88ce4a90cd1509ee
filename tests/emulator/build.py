"""Compiles the CUDA kernels for the emulated machine.

The sources are copied; in the copy, declarations of shared memory become calls to the
machine, and ptx.cuh is the machine's. Nothing else of them changes, unless a test asks
for it (`edits`).
"""

import dataclasses
import os
import pathlib
import re
import subprocess
from collections.abc import Sequence

from emulator.cases import kernel_name

from jax_ep.kernels import Kernel

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
CUDA = ROOT / "ffi" / "cuda"
COMPILER = os.environ.get("CXX", "g++")
OURS = ("machine", "memory", "report", "run", "warps")

# Warnings are errors in our own code; the kernels are written for another compiler.
FLAGS = ["-std=c++17", "-O1", "-g0", "-ffp-contract=off", "-fno-strict-aliasing"]
FLAGS += ["-U_FORTIFY_SOURCE", f"-I{HERE}", f"-I{ROOT}"]
STRICT = ["-Wall", "-Wextra", "-Werror"]


@dataclasses.dataclass(frozen=True)
class Edit:
    """A replacement in one source, of a text that must be there."""

    file: str
    old: str
    new: str


def _shared_memory(text: str) -> str:
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) (unsigned char|int) (\w+)\[\];",
        r"auto* \2 = emu::DynamicShared<\1>();",
        text,
    )
    return re.sub(
        r"(?m)^( *)__shared__ (\w+) (\w+)((?:\[\w+\])?);",
        r"\1auto& \3 = emu::StaticShared<\2\4>(__LINE__);",
        text,
    )


def _copy_sources(folder: pathlib.Path, edits: Sequence[Edit]) -> None:
    folder.mkdir(parents=True)
    headers = ("portable", "limits", "dtypes", "workspace", "launch_shape", "few_shape")
    for path in [*CUDA.glob("*.cu*"), *(CUDA / f"{name}.h" for name in headers)]:
        text = path.read_text()
        for edit in edits:
            if edit.file == path.name:
                if edit.old not in text:
                    raise ValueError(f"{path.name} has no {edit.old!r} to replace.")
                text = text.replace(edit.old, edit.new)
        text = _shared_memory(text)
        if "__shared__" in text:
            raise ValueError(f"{path.name} declares shared memory in another way.")
        (folder / path.name).write_text(text)
    (folder / "ptx.cuh").write_text((HERE / "ptx.cuh").read_text())


def _source(kernels: Sequence[Kernel]) -> str:
    """One translation unit with all kernels, entry points and Configs renamed."""
    lines = ['#include "cuda_shim.h"', '#include "kernels.h"', "#include <cstdlib>"]
    lines.append('#include "few_shape.h"')
    for stage in sorted({kernel.stage for kernel in kernels}):
        lines.append(f'#include "{stage}.cuh"')
    table = []
    for i, kernel in enumerate(kernels):
        usual = kernel.stage.removeprefix("few_")
        title = kernel.stage.title().replace("_", "")
        entry = f"jax_ep_{usual}"
        macros = [(f"JAX_EP_{name}", text) for name, text in kernel.macros]
        macros += [("Config", f"Config{i}"), (entry, f"{entry}{i}")]
        lines += [f"#define {name} {text}" for name, text in macros]
        lines.append(f'#include "{kernel.stage}.cu"')
        lines += [f"#undef {name}" for name, _ in macros]
        size = f"jax_ep::cuda::{title}<Config{i}>"
        dims = f"{size}::kThreads, {size}::kShape.shared_bytes"
        if kernel.stage in ("few_dispatch", "few_combine"):
            dims = f"{size}::kThreads, 0"
        run = f"[](const void* p) {{ {entry}{i}(*static_cast<const jax_ep::cuda::"
        run += f"{usual.title()}Params*>(p)); }}"
        dims = "0, 0" if usual == "layout" else dims
        is_few = str(kernel.stage != usual).lower()
        table.append(
            f'{{"{kernel_name(kernel)}", "{usual}", {is_few}, {run}, {dims}}},'
        )
    lines.append("const emu::Kernel kTable[] = {")
    lines += [*table, "};", "const emu::Kernel* FindKernel(const std::string& name) {"]
    lines += ["for (const emu::Kernel& k : kTable) if (name == k.name) return &k;"]
    lines += ["std::abort();", "}"]
    dims = "jax_ep::cuda::LaunchDims"
    lines += [f"{dims} LayoutDims(bool few, int blocks, int ranks, int experts) {{"]
    lines += ["return few ? jax_ep::cuda::FewLayoutLaunch(ranks, experts)"]
    lines += [": jax_ep::cuda::LayoutLaunch(blocks, blocks, ranks, experts);", "}"]
    lines.append("")
    return "\n".join(lines)


def machine_objects(folder: pathlib.Path) -> list[pathlib.Path]:
    """The machine's part of every program, which no edit changes."""
    objects = [folder / f"{name}.o" for name in OURS]
    for path in objects:
        source = HERE / f"{path.stem}.cc"
        command = [COMPILER, *FLAGS, *STRICT, "-isystem", str(CUDA)]
        subprocess.run([*command, "-c", "-o", str(path), str(source)], check=True)
    return objects


def program(
    folder: pathlib.Path,
    objects: Sequence[pathlib.Path],
    kernels: Sequence[Kernel],
    edits: Sequence[Edit] = (),
    macros: Sequence[str] = (),
) -> pathlib.Path:
    """The program `run` (run.cc) with these kernels, in `folder`."""
    sources = folder / "sources"
    _copy_sources(sources, edits)
    text = folder / "kernels.cc"
    text.write_text(_source(list(dict.fromkeys(kernels))))
    command = [COMPILER, *FLAGS, *[f"-D{macro}" for macro in macros], "-w"]
    command += ["-isystem", str(sources), "-o", str(folder / "run"), str(text)]
    subprocess.run([*command, *[str(path) for path in objects]], check=True)
    return folder / "run"
