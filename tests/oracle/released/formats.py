"""Number formats, functions in fp32, and the reader of checkpoints in the released layout, for reference.py. Sections in brackets are
those of the model specification."""

import glob
import json
import math
import os

import torch

# ======================================================================================================================
# Number formats [2.2]
# ======================================================================================================================


def round_bf16(x):
    return x.to(torch.bfloat16).to(x.dtype)


def pow2_ceil(x):
    """Smallest power of two >= x, for x > 0."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def round_grid(x, lowest, mantissa_bits, tie="even"):
    """Nearest value with the given number of mantissa bits; below 2^lowest the grid is evenly spaced (subnormals)."""
    exponent = (torch.frexp(x)[1] - 1).clamp(min=lowest)
    step = torch.ldexp(torch.ones_like(x), exponent - mantissa_bits)
    q = x / step
    return (torch.round(q) if tie == "even" else torch.sign(q) * torch.floor(q.abs() + 0.5)) * step


def round_e4m3(x):
    return round_grid(x, -6, 3)


def round_e2m1(x, tie="even"):
    return round_grid(x, 0, 1, tie)


def fp8_scale(amax):
    return pow2_ceil(amax.clamp(min=1e-4) * (1 / 448))


def fp4_scale(amax):
    return pow2_ceil(amax.clamp(min=6 * 2.0**-126) * (1 / 6))


def quantise(x, block, top, scale_of, rounding):
    """Blocks of the last dimension (the last one may be short) -> nearest representable multiple of a power-of-two scale."""
    parts = []
    for part in x.split(block, -1):
        scale = scale_of(part.abs().amax(-1, keepdim=True))
        parts.append(rounding((part / scale).clamp(-top, top)) * scale)
    return torch.cat(parts, -1)


def decode_e4m3(raw):
    """uint8 codes -> fp32 values, from the definition: sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7f is NaN."""
    code = torch.arange(256)
    e, m = (code >> 3) & 15, (code & 7).float()
    value = torch.where(e == 0, m * 2.0**-9, (1 + m / 8) * torch.exp2(e.float() - 7))
    value[(code & 127) == 127] = math.nan
    return torch.where(code >= 128, -value, value)[raw.long()]


def decode_e8m0(raw):
    return torch.exp2(raw.double() - 127).float()


def decode_fp4(raw):
    """uint8 [o, i/2] -> fp32 [o, i]; the low nibble is the even element."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    return torch.stack([table[(raw & 15).long()], table[(raw >> 4).long()]], -1).flatten(1)


# ======================================================================================================================
# Functions in fp32: evaluated in fp64 and rounded once, so that a result does not depend on vector width or alignment
# ======================================================================================================================


def exp(x):
    return torch.exp(x.double()).float()


def sigmoid(x):
    return torch.sigmoid(x.double()).float()


def silu(x):
    return (x.double() * torch.sigmoid(x.double())).float()


def rsqrt(x):
    return (1 / torch.sqrt(x.double())).float()


def sqrt_softplus(z):
    z = z.double()
    return torch.sqrt(torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0)).float()


def hadamard(x):
    """Sylvester order, scaled by n^-1/2; butterflies in fp32 [3.6]."""
    n, shape = x.shape[-1], x.shape
    assert n & (n - 1) == 0, f"the indexer's head dimension must be a power of two, not {n}"
    h, half = x.reshape(-1, n), 1
    while half < n:
        h = h.view(-1, n // (2 * half), 2, half)
        h = torch.stack([h[:, :, 0] + h[:, :, 1], h[:, :, 0] - h[:, :, 1]], 2).view(-1, n)
        half *= 2
    return (h * n**-0.5).view(shape)


def frequencies(dim, base, yarn):
    """Angular frequency of every pair [3.2]; yarn = None or (factor, original length, beta_fast, beta_slow)."""
    j = torch.arange(dim // 2, dtype=torch.float64)
    w = base ** (-2 * j / dim)
    if yarn and yarn[1] > 0:
        factor, original, fast, slow = yarn
        turn = lambda rotations: dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))
        lo, hi = max(math.floor(turn(fast)), 0), min(math.ceil(turn(slow)), dim - 1)
        ramp = ((j - lo) / ((hi - lo) or 0.001)).clamp(0, 1)
        w = w / factor * ramp + w * (1 - ramp)
    return w


# ======================================================================================================================
# Checkpoint [2.1]
# ======================================================================================================================


def load(folder):
    """-> (config dict, {name: fp32 tensor}, {name of a quantised weight: block of K in which products are summed first})."""
    from safetensors.torch import load_file

    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    raw = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        if os.path.basename(path).startswith("model"):
            raw.update(load_file(path))
    tensors, blocks = {}, {}
    for name, t in raw.items():
        if name.endswith(".scale") and name[:-6] + ".weight" in raw:
            continue
        scale = raw.get(name[:-7] + ".scale") if name.endswith(".weight") else None
        if scale is None:
            tensors[name] = t if t.dtype in (torch.int64, torch.int32) else t.float()
            continue
        s, codes = decode_e8m0(scale.view(torch.uint8)), t.view(torch.uint8)
        if t.dtype == torch.int8:  # packed FP4, one scale per row and 32 inputs
            w, blocks[name] = decode_fp4(codes), 32
            assert s.shape == (w.shape[0], w.shape[1] // 32), name
            s = s.repeat_interleave(32, 1)
        else:  # FP8, one scale per 128x128 block, partial blocks at the ends
            w, blocks[name] = decode_e4m3(codes), 128
            assert s.shape == (-(-w.shape[0] // 128), -(-w.shape[1] // 128)), name
            s = s.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
        # Scales are powers of two: scaling a value commutes with every rounding of the partial sums, so dequantised weights
        # summed block by block give the bits of "sum the codes of a block, multiply by both scales, add".
        tensors[name] = w * s
    return config, tensors, blocks
