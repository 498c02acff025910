#!/bin/sh
# Builds the GPU kernels on this machine and runs all their tests, and those of the model on the GPU if `make build` has made them. usage: tools/test-gpu.sh [--sanitize[=PATTERN]] [SUMMARY]
# SUMMARY (default build-gpu/test-summary.txt): date, device, driver, versions, one line a test. --sanitize: instead, the tests named
# *Small* under compute-sanitizer (memcheck, racecheck, initcheck, synccheck), of the executables that match PATTERN.
set -eu
cd "$(dirname "$0")/.."
sanitize=
case "${1:-}" in
  --sanitize) sanitize=. ; shift ;;
  --sanitize=*) sanitize=${1#--sanitize=}; shift ;;
esac
summary=${1:-build-gpu/test-summary.txt}
tools/gpu-build.sh build-gpu
tools/gpu-build.sh --versions > "$summary"
failed=0
run() {  # name, command...
  name=$1; shift
  if timeout 200 "$@" > build-gpu/log.txt 2>&1; then result=passed; else result="FAILED ($?)"; failed=1; cat build-gpu/log.txt; fi
  echo "$name: $result" | tee -a "$summary"
  grep -v '^\[' build-gpu/log.txt | grep -v '^$' | head -100 >> "$summary" || true
}
for test in build-gpu/*_test build/tests/model_gpu_test; do
  [ -x "$test" ] || { echo "$test: not built (make build)" | tee -a "$summary"; continue; }
  name=$(basename "$test")
  if [ -z "$sanitize" ]; then
    run "$name" "$test"
    if [ "$name" = model_gpu_test ]; then
      run "$name --portable" "$test" --portable --gtest_filter='ModelGpu.*:DecodeGraphs.Small*'
    elif grep -qx "$name" tests/kernels/portable_tests.txt; then
      run "$name --portable" "$test" --portable
    fi
  elif echo "$name" | grep -Eq "$sanitize"; then
    for tool in memcheck racecheck initcheck synccheck; do
      run "$name $tool" compute-sanitizer --tool $tool --error-exitcode 9 "$test" --gtest_filter='*Small*'
    done
  fi
done
exit $failed
