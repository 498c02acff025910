#!/bin/sh
# What test-gpu.sh and bench-gpu.sh share. usage: tools/gpu-build.sh DIRECTORY | --versions
set -eu
cd "$(dirname "$0")/.."
if [ "$1" = --versions ]; then
  date -u '+date: %F %H:%M UTC'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed 's/^/device, driver: /'
  nvcc --version | sed -n 's/.*release/nvcc:/p'
  cmake --version | sed -n 1p
  c++ --version | sed -n 1p
  git rev-parse --short HEAD 2>/dev/null | sed 's/^/commit: /' || true
  exit 0
fi
if [ ! -f "$1/build.ninja" ] && [ ! -f "$1/Makefile" ]; then
  cmake -S tests/kernels -B "$1" -DPLUMB_CUDA=ON > /dev/null
fi
cmake --build "$1" --parallel "$(nproc)"
