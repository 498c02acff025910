#!/usr/bin/env bash
# Installs what plumb needs. Idempotent; does nothing when everything is there.
#   tools/bootstrap.sh          the compiler, the build tools and the libraries of the program (Debian packages)
#   tools/bootstrap.sh tests    also .venv with the Python oracles that the tests compare with (PyPI)
# No Python runs in the product.
set -euo pipefail
cd "$(dirname "$0")/.."

PACKAGES=(g++ cmake ninja-build make ccache pkg-config libfmt-dev libcli11-dev libtomlplusplus-dev nlohmann-json3-dev
          libpcre2-dev libxxhash-dev libboost1.81-dev libgtest-dev libgmock-dev libbenchmark-dev)
[ "${1:-}" = tests ] && PACKAGES+=(python3-venv chromium chromium-driver)

missing=()
for p in "${PACKAGES[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "bootstrap: installing Debian packages: ${missing[*]}"
  sudo=(); [ "$(id -u)" = 0 ] || sudo=(sudo)
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

[ "${1:-}" = tests ] || exit 0
stamp=.venv/requirements.sha256
want=$(sha256sum tests/requirements.txt | cut -d' ' -f1)
if [ "$(cat $stamp 2>/dev/null || true)" != "$want" ]; then
  echo "bootstrap: installing the Python oracles of tests/requirements.txt into .venv"
  python3 -m venv .venv
  # torch without its GPU libraries (2 GB): the oracles run on the CPU and libtorch_cpu.so resolves what it needs from the
  # CUDA toolkit where there is one. Without a toolkit the plain wheel with everything is taken.
  if ldconfig -p | grep -q libcudart.so.13 || [ -e "${CUDA_HOME:-/usr/local/cuda}/lib64/libcudart.so" ]; then
    .venv/bin/pip install -q --disable-pip-version-check --no-deps torch==2.11.0 nvidia-cusparselt-cu13==0.8.0 \
      nvidia-nvshmem-cu13==3.4.5 nvidia-cufile==1.15.1.6
  else
    .venv/bin/pip install -q --disable-pip-version-check torch==2.11.0
  fi
  .venv/bin/pip install -q --disable-pip-version-check -r tests/requirements.txt
  echo "$want" > $stamp
fi
