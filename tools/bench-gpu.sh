#!/bin/sh
# Builds the GPU kernels on this machine and runs all their benchmarks, and those of the model on the GPU if `make build` has made them.
# Each writes DIRECTORY/<name>.json.
# usage: tools/bench-gpu.sh [DIRECTORY]   (default bench/results)
set -eu
cd "$(dirname "$0")/.."
results=${1:-bench/results}
tools/gpu-build.sh build-gpu
tools/gpu-build.sh --versions
failed=0
for bench in build-gpu/*_bench build/bench/model_gpu_bench build/bench/decoding_gpu_bench; do
  [ -x "$bench" ] || { echo "$bench: not built (make build)"; continue; }
  name=$(basename "$bench" _bench)
  timeout 120 "$bench" "$results/$name.json" || { echo "$name: FAILED ($?)"; failed=1; }
done
exit $failed
