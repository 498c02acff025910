#!/bin/sh
# Builds the GPU kernels on this machine and runs all their tests. usage: tools/test-gpu.sh [--sanitize] [SUMMARY]
# SUMMARY (default build-gpu/test-summary.txt): date, device, driver, versions, one line a test. --sanitize also runs the tests named
# *Small* under compute-sanitizer (memcheck, racecheck, initcheck, synccheck).
set -eu
cd "$(dirname "$0")/.."
sanitize=
if [ "${1:-}" = --sanitize ]; then sanitize=1; shift; fi
summary=${1:-build-gpu/test-summary.txt}
tools/gpu-build.sh build-gpu
tools/gpu-build.sh --versions > "$summary"
failed=0
run() {  # name, command...
  name=$1; shift
  if "$@" > build-gpu/log.txt 2>&1; then result=passed; else result="FAILED ($?)"; failed=1; cat build-gpu/log.txt; fi
  echo "$name: $result" | tee -a "$summary"
  grep -v '^\[' build-gpu/log.txt | grep -v '^$' | head -100 >> "$summary" || true
}
for test in build-gpu/*_test; do
  run "$(basename "$test")" "$test"
  [ -n "$sanitize" ] || continue
  for tool in memcheck racecheck initcheck synccheck; do
    run "$(basename "$test") $tool" compute-sanitizer --tool $tool --error-exitcode 9 "$test" --gtest_filter='*Small*'
  done
done
exit $failed
