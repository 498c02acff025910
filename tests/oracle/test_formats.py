"""FP8 and FP4 weights against ml-dtypes: what `plumb convert --format fp8|released|bf16` writes, bit by bit."""

import json
import os
import subprocess

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

PLUMB = os.environ["PLUMB"]


def plumb(*args):
    r = subprocess.run([PLUMB, *map(str, args)], capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr


def scales(blocks, largest):
    """Smallest power of two that holds the largest magnitude of each block; blocks: float64 [..., block]."""
    return np.exp2(np.ceil(np.log2(np.abs(blocks).max(-1) / largest)))


def encode_fp8(w):
    out, inp = w.shape
    rows, cols = -(-out // 128), -(-inp // 128)
    padded = np.zeros((rows * 128, cols * 128))
    padded[:out, :inp] = w
    s = scales(padded.reshape(rows, 128, cols, 128).transpose(0, 2, 1, 3).reshape(rows, cols, -1), 448)
    whole = np.repeat(np.repeat(s, 128, 0), 128, 1)[:out, :inp]
    return (w / whole).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), s


def encode_fp4(w):
    groups = w.reshape(w.shape[0], -1, 32)
    s = scales(groups, 6)
    codes = (groups / s[..., None]).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(w.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, s


def fill(shape, seed):
    """Every kind of value: all magnitudes, exact ties of both formats, signed zeros, largest codes."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    ties = rng.choice([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 17.0, 19.0, 432.0, 448.0, 2**-10, 3 * 2**-10], shape)
    return np.where(rng.random(shape) < 0.5, w, ties * rng.choice([-1, 1], shape)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint with FP32 weights of that kind in all quantised matrices, and its file."""
    folder = tmp_path_factory.mktemp("formats")
    plumb("init", "tiny", folder / "a", "--format", "fp32")
    path = folder / "a/model.safetensors"
    tensors = load_file(path)
    names = [n for n, t in tensors.items() if t.dim() == 2 and any(x in n for x in (".w1.", ".w2.", ".w3.", ".wq_", ".wkv.", ".wo_"))
             and "compressor" not in n]
    for i, n in enumerate(names):
        tensors[n] = torch.from_numpy(fill(tuple(tensors[n].shape), i))
    save_file(tensors, path)
    return folder, tensors, names


def check_scale(stored, wanted):
    assert stored.dtype == torch.float8_e8m0fnu
    got = stored.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize("form", ["fp8", "released"])
def test_encoding(model, form):
    folder, tensors, names = model
    plumb("convert", folder / "a", folder / form, "--format", form)
    written = load_file(folder / form / "model.safetensors")
    kinds = set()
    for n in names:
        fp4 = form == "released" and ".experts." in n
        data, scale = (encode_fp4 if fp4 else encode_fp8)(tensors[n].numpy().astype(np.float64))
        assert np.array_equal(written[n].view(torch.uint8).numpy(), data), n
        check_scale(written[n.removesuffix("weight") + "scale"], scale)
        kinds.add(fp4)
    assert len(kinds) == (2 if form == "released" else 1)
    assert json.load(open(folder / form / "config.json"))["quantization_config"]["scale_fmt"] == "ue8m0"


def test_decoding(model):
    """Back to FP32: value of the code times the scale."""
    folder, _, names = model
    if not (folder / "released").exists():
        plumb("convert", folder / "a", folder / "released", "--format", "released")
    plumb("convert", folder / "released", folder / "wide", "--format", "fp32")
    packed, wide = load_file(folder / "released/model.safetensors"), load_file(folder / "wide/model.safetensors")
    for n in names:
        scale = packed[n.removesuffix("weight") + "scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        code = packed[n].view(torch.uint8).numpy()
        if packed[n].dtype == torch.int8:
            nibbles = np.stack([code & 15, code >> 4], -1).reshape(code.shape[0], -1)
            value, s = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32), np.repeat(scale, 32, 1)
        else:
            value, s = code.view(ml_dtypes.float8_e4m3fn).astype(np.float32), np.repeat(np.repeat(scale, 128, 0), 128, 1)
        assert np.array_equal(wide[n].numpy(), value * s[: value.shape[0], : value.shape[1]]), n


def test_bf16_rounding(model):
    folder, tensors, names = model
    plumb("convert", folder / "a", folder / "bf16", "--format", "bf16")
    written = load_file(folder / "bf16/model.safetensors")
    for n in names:
        wanted = tensors[n].numpy().astype(ml_dtypes.bfloat16).view(np.uint16)
        assert np.array_equal(written[n].view(torch.uint16).numpy(), wanted), n
