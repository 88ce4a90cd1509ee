"""Headers of a Python environment, as the repository @py_env.

The environment is that of the interpreter PYTHON_BIN_PATH (default: python3). It must
have jaxlib, for the XLA FFI headers, and nanobind.
"""

_FIND = """
import importlib.util
import json
import pathlib
import sysconfig

def folder(package):
    return pathlib.Path(importlib.util.find_spec(package).origin).parent

print(json.dumps({
    "jaxlib_include": str(folder("jaxlib") / "include"),
    "nanobind": str(folder("nanobind")),
    "python_include": sysconfig.get_path("include"),
}))
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib_include/xla/ffi/**/*.h"]),
    includes = ["jaxlib_include"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h", "python_include/**/*.h"]),
    copts = ["-std=c++17", "-fvisibility=hidden", "-fno-strict-aliasing"],
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
        "python_include",
    ],
    linkstatic = True,
    textual_hdrs = glob(["nanobind/src/*", "nanobind/ext/**/*.h"]),
)
"""

def _py_env_impl(rctx):
    python = rctx.os.environ.get("PYTHON_BIN_PATH", "python3")
    found = rctx.execute([python, "-c", _FIND])
    if found.return_code != 0:
        fail("PYTHON_BIN_PATH (=%s) must be a Python with jaxlib and nanobind:\n%s" %
             (python, found.stderr))
    for name, path in json.decode(found.stdout).items():
        rctx.symlink(path, name)
    rctx.file("BUILD.bazel", _BUILD)

py_env = repository_rule(
    doc = "Finds jaxlib, nanobind and Python headers with PYTHON_BIN_PATH.",
    environ = ["PYTHON_BIN_PATH"],
    implementation = _py_env_impl,
    local = True,
)
