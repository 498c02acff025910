// Equality on bits, wherever tensors are.
#pragma once
#include <cstring>

#include "model/forward.h"

namespace plumb::testing {

// Shape, type (bf16 of a device reads as f32) and every bit; two undefined tensors are equal.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  const Tensor x = a.on_device() ? to_host(a) : a, y = b.on_device() ? to_host(b) : b;
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         (x.bytes() == 0 || std::memcmp(x.raw(), y.raw(), x.bytes()) == 0);
}

inline bool same_bits(const KvCache& a, const KvCache& b) {
  for (size_t l = 0; l < a.layers.size(); ++l)
    for (Tensor LayerCache::*t :
         {&LayerCache::keys, &LayerCache::index_keys, &LayerCache::pending_kv, &LayerCache::pending_gate,
          &LayerCache::index_pending_kv, &LayerCache::index_pending_gate})
      if (!same_bits(a.layers[l].*t, b.layers[l].*t)) return false;
  return true;
}

}  // namespace plumb::testing
