#!/bin/sh
# All that a short loan of a GPU should bring back: tests, benchmarks, then sanitizers. usage: tools/measure-gpu.sh DIRECTORY [PATTERN]
# DIRECTORY gets test_gpu.txt, log.txt and results.tgz (the benchmarks' JSON files), complete up to where the time ran out. PATTERN: the
# test executables to run under compute-sanitizer (default: none).
set -u
cd "$(dirname "$0")/.."
out=$1 pattern=${2:-}
mkdir -p "$out" build-gpu/results
{
  tools/test-gpu.sh "$out/test_gpu.txt"
  tools/bench-gpu.sh build-gpu/results
  tar -C build-gpu -czf "$out/results.tgz" results
  [ -z "$pattern" ] || tools/test-gpu.sh --sanitize="$pattern" "$out/sanitizers.txt"
} 2>&1 | tee "$out/log.txt"
