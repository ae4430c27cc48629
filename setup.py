"""The compiled engine: optional, for without a compiler Python's engines run the same steps."""

import sys
import sysconfig

from setuptools import Extension, setup

# One build serves all versions of Python from 3.11 on, whose limited API has the buffer protocol.
STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
engine = Extension(
    "hiercoll.runtime._engine",
    [f"hiercoll/runtime/{name}.c" for name in ("_engine", "_calls", "_regions", "_attributes", "_communicators")],
    depends=["hiercoll/runtime/_engine.h"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
    extra_compile_args=["-std=c11", "-fvisibility=hidden"],
    libraries=["dl"],
    py_limited_api=STABLE,
    optional=True,
)
setup(ext_modules=[engine], options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {})
