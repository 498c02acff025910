#!/bin/sh
# Builds the GPU kernels on this machine and runs all their benchmarks. Each writes DIRECTORY/<name>.json.
# usage: tools/bench-gpu.sh [DIRECTORY]   (default bench/results)
set -eu
cd "$(dirname "$0")/.."
results=${1:-bench/results}
tools/gpu-build.sh build-gpu
tools/gpu-build.sh --versions
failed=0
for bench in build-gpu/*_bench; do
  name=$(basename "$bench" _bench)
  timeout 120 "$bench" "$results/$name.json" || { echo "$name: FAILED ($?)"; failed=1; }
done
exit $failed
