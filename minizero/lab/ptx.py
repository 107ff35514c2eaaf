"""What Triton compiles a kernel to for a GPU; no GPU is needed for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

_PROGRAM = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compile(module, kernel, types, constants, options, capability):
    kernel = getattr(importlib.import_module(module), kernel)
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [["tt.divisibility", 16]]
    attrs = {(i,): aligned for i, name in enumerate(names)
             if signature[name][0] in "*i"}
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constants, attrs)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]

print(json.dumps([compile(**asked) for asked in json.load(sys.stdin)]))
"""


class Compiled(NamedTuple):
    """A kernel to compile. `types`: of its arguments, as "*fp32", "fp32" or "i32".

    constants: of the others. options: of the launch. capability: 90 is an H100's.
    """

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object] = {}
    capability: int = 90


def ptx(*kernels: Compiled) -> list[str]:
    """The PTX of each kernel, for addresses and sizes that are divisible by 16.

    In a process of its own, for in this one Triton may interpret. Raises
    subprocess.CalledProcessError if one does not compile.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([kernel._asdict() for kernel in kernels]),
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))
