#!/bin/sh
# Runs the benchmarks of this machine's processor and renews docs/performance.md. Usage: tools/bench.sh [build folder]
# Takes about five minutes; close other programs. GPU kernels: tools/bench-gpu.sh.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build}
tools/bootstrap.sh tests

"$build/bench/linear_bench"
"$build/bench/tree_bench" assets/tiny bench/results/tree.json

# PyTorch's CUDA build looks for its libraries even when it computes on the CPU.
LD_LIBRARY_PATH="/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  .venv/bin/python bench/compare_hf.py "$build" --out bench/results/compare_hf.json

python3 tools/performance_page.py
