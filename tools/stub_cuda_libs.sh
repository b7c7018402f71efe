#!/usr/bin/env bash
# The tests compare with PyTorch's Python package, whose only published build for Linux wants 2 GB of CUDA libraries just to be
# imported. On a machine without a GPU none of their functions is ever called, so this writes one small library that defines
# their names (each aborts when called) under the file names that are asked for. Usage: stub_cuda_libs.sh TORCH_DIR OUT_DIR
# Use with LD_LIBRARY_PATH=OUT_DIR, and only for tests.
set -euo pipefail
torch=$1/lib cudart=$1/../nvidia/cu13/lib out=$2
mkdir -p "$out"
users=("$torch"/libtorch_cuda.so "$torch"/libtorch_nvshmem.so "$torch"/libtorch_python.so "$torch"/libtorch_cuda_linalg.so)
wanted=$(for lib in "${users[@]}"; do readelf -d "$lib" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; done | sort -u |
  grep -E '^lib(cu|nccl|nvshmem|nv)' | grep -vE '^libcudart|^libcuda\.so')
# Names that the users lack and that neither torch's other libraries nor the system's define.
names() { nm -D "$1" "${@:2}" 2>/dev/null | sed -n 's/.* \([TtWwVvBbDdRrGgiu]\) \([^@ ]*\).*/\2/p' | sort -u; }
for lib in "${users[@]}"; do nm -D --undefined-only "$lib"; done | awk '{print $NF}' | sed 's/@.*//' |
  grep -E '^(cu[a-zA-Z]|nccl|nvshmem)' | sort -u > "$out/undefined"
for lib in "$torch"/*.so "$cudart"/libcudart.so.13; do names "$lib" --defined-only; done | sort -u > "$out/defined"
comm -23 "$out/undefined" "$out/defined" | grep -vE '^cu(da)?[A-Z].*_ptsz$' |
  awk 'BEGIN {print "void abort(void);"} {print "void " $1 "(void) { abort(); }"}' > "$out/stubs.c"
gcc -shared -fPIC -o "$out/libstubs.so" -x c -w "$out/stubs.c"
for name in $wanted; do ln -sf libstubs.so "$out/$name"; done
