#!/usr/bin/env python3
"""Lets Python import .deps/torch on a machine without the CUDA libraries, for the tests that compare with transformers on the CPU.

Python's half of torch links torch's CUDA half, which needs 2 GB of libraries (cuBLAS, cuDNN, NCCL, ...) that those tests never
call. For each that the machine lacks, this makes a stand-in whose functions print their name and abort, and a sitecustomize.py
that loads the stand-ins when `torch` is imported. Real libraries are preferred where they are there. Nothing else sees
them: ParVL itself does not link torch's CUDA half.

usage: stub_cuda.py TORCH_FOLDER DESTINATION   (DESTINATION is a folder on PYTHONPATH)
"""
import collections
import pathlib
import re
import subprocess
import sys

# Library → its functions' names. Order matters where one needs another.
LIBRARIES = {
    "libcublasLt.so.13": r"cublasLt",
    "libcublas.so.13": r"cublas(?!Lt)",
    "libcudnn.so.9": r"cudnn",
    "libcufft.so.12": r"cufft",
    "libcurand.so.10": r"curand",
    "libcusparse.so.12": r"cusparse(?!Lt)",
    "libcusparseLt.so.0": r"cusparseLt",
    "libnccl.so.2": r"p?nccl",
    "libcufile.so.0": r"cuFile",
    "libnvshmem_host.so.3": r"nvshmem",
}
USERS = ("libtorch_cuda.so", "libtorch_python.so", "libtorch_nvshmem.so")

SITECUSTOMIZE = '''"""Loads stand-ins for the CUDA libraries that this machine lacks when torch is imported; made by tools/stub_cuda.py."""
import ctypes
import pathlib
import sys

LIBRARIES = {names!r}


class BeforeTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            preload()
        return None


def preload():
    stubs = pathlib.Path(__file__).parent / "cuda_stubs"
    for name in LIBRARIES:
        if any(any((pathlib.Path(folder) / "nvidia").glob("*/lib/" + name)) for folder in sys.path if folder):
            continue  # torch finds it beside itself
        try:
            ctypes.CDLL(name)
        except OSError:
            ctypes.CDLL(str(stubs / name))


sys.meta_path.insert(0, BeforeTorch())
'''


def wanted_symbols(torch_lib: pathlib.Path) -> dict[str, str]:
    """Symbol → version ('' for none) of everything the CUDA half takes from other libraries."""
    symbols = {}
    for user in USERS:
        listing = subprocess.run(["nm", "-D", "--undefined-only", str(torch_lib / user)], check=True, capture_output=True, text=True)
        for line in listing.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols[name] = version.lstrip("@")
    return symbols


def build(library: str, symbols: dict[str, str], destination: pathlib.Path) -> None:
    code = ["#include <stdio.h>", "#include <stdlib.h>",
            "static void called(const char* name) {",
            '  fprintf(stderr, "%s: called in a stand-in for ' + library + ', which this machine lacks\\n", name);',
            "  abort();", "}"]
    by_version = collections.defaultdict(list)
    for name, version in sorted(symbols.items()):
        code.append(f'void {name}(void) {{ called("{name}"); }}')
        by_version[version].append(name)
    script = [f"{version} {{ global: {'; '.join(names)}; }};" for version, names in by_version.items() if version]
    source, versions = destination / f"{library}.c", destination / f"{library}.map"
    source.write_text("\n".join(code) + "\n")
    versions.write_text("\n".join(script) + "\n")
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-O1", f"-Wl,-soname,{library}", "-o", str(destination / library), str(source)]
    subprocess.run(command + ([f"-Wl,--version-script={versions}"] if script else []), check=True)
    source.unlink()
    versions.unlink()


def main() -> None:
    torch_lib = pathlib.Path(sys.argv[1]) / "torch" / "lib"
    destination = pathlib.Path(sys.argv[2])
    stubs = destination / "cuda_stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    symbols = wanted_symbols(torch_lib)
    for library, pattern in LIBRARIES.items():
        build(library, {s: v for s, v in symbols.items() if re.match(pattern, s)}, stubs)
    (destination / "sitecustomize.py").write_text(SITECUSTOMIZE.format(names=list(LIBRARIES)))


main()
