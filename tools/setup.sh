#!/usr/bin/env bash
# Installs what the build needs and is missing: Debian packages (tools/apt.txt) and, in .deps/, pinned and hash-checked
# packages. `setup.sh tests` adds what the tests compare with. Safe to run again: it does nothing when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
deps=$PWD/.deps
mkdir -p "$deps"

# Runs a command with its output in a log; prints a line every 4 s while it runs, and the log's end if it fails.
quietly() {
  local what=$1; shift
  local log="$deps/setup.log"
  echo "setup: $what"
  "$@" >"$log" 2>&1 &
  local pid=$! start=$SECONDS ticks=0
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    ticks=$((ticks + 1))
    if [ $((ticks % 20)) = 0 ]; then echo "setup: $what ... $((SECONDS - start)) s"; fi
  done
  if ! wait "$pid"; then
    tail -n 20 "$log" >&2
    echo "setup: failed to $what; the whole log is $log" >&2
    exit 1
  fi
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

install_apt() {
  as_root apt-get update -q
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

missing=$(grep -v '^#' tools/apt.txt | while read -r p; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || echo "$p"; done)
# shellcheck disable=SC2086
if [ -n "$missing" ]; then quietly "install Debian packages: $(echo $missing)" install_apt $missing; fi

# pip_target FOLDER REQUIREMENTS: installs into .deps/FOLDER once per content of the requirements file.
pip_target() {
  local folder=$deps/$1 file=$2 stamp
  stamp=$(sha256sum "$file" | cut -c1-16)
  if [ -e "$folder/.ready-$stamp" ]; then return; fi
  rm -rf "$folder"
  quietly "download $(grep -oE '^[a-zA-Z0-9_.-]+==[^ ]+' "$file" | head -3 | tr '\n' ' ')into .deps/$1" \
    python3 -m pip install --disable-pip-version-check --no-deps --require-hashes --no-compile -q --target "$folder" -r "$file"
  touch "$folder/.ready-$stamp"
}
pip_target torch tools/requirements-build.txt
pip_target data tools/requirements-data.txt
if [ ! -e "$deps/jinja/.ready" ]; then
  quietly "download the Jinja engine of llama-cpp-python 0.3.36" python3 tools/fetch_sdist.py llama-cpp-python==0.3.36 \
    832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e "$deps/jinja" \
    vendor/llama.cpp/common/jinja/ vendor/llama.cpp/common/unicode vendor/llama.cpp/common/json. vendor/llama.cpp/LICENSE
  touch "$deps/jinja/.ready"
fi
if [ ! -e "$deps/xgrammar/.ready" ]; then
  quietly "download xgrammar 0.2.9" python3 tools/fetch_sdist.py xgrammar==0.2.9 \
    87b466bca2475e29bb0323abc62c6c33cbcbcff47e5fb800a3e2099ac9620b90 "$deps/xgrammar" \
    cpp/ include/xgrammar/ 3rdparty/picojson/picojson.h 3rdparty/dlpack/include/ 3rdparty/dlpack/LICENSE LICENSE NOTICE
  touch "$deps/xgrammar/.ready"
fi
# promtool alone, out of Debian's package of Prometheus: installed, that would run a server on this machine.
fetch_promtool() {
  local work
  work=$(mktemp -d "$deps/promtool.XXXXXX")
  cd "$work"
  apt-get download -q prometheus || { as_root apt-get update -q && apt-get download -q prometheus; }
  dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
  mkdir -p "$deps/promtool"
  mv usr/bin/promtool "$deps/promtool/promtool"
  rm -rf "$work"
}

if [ "${1:-}" = tests ]; then
  pip_target oracle tools/requirements-tests.txt
  if [ ! -e "$deps/promtool/promtool" ]; then quietly "download promtool" fetch_promtool; fi
  if [ ! -e "$deps/cuda-stubs/libstubs.so" ]; then tools/stub_cuda_libs.sh "$deps/torch/torch" "$deps/cuda-stubs"; fi
fi
