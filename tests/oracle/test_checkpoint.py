"""Checkpoints and adapters against other libraries: safetensors, transformers and PEFT read what plumb writes and write what it reads."""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_model

PLUMB = os.environ["PLUMB"]


def plumb(*args, fails=False):
    r = subprocess.run([PLUMB, *map(str, args)], capture_output=True, text=True)
    assert (r.returncode != 0) == fails, r.stdout + r.stderr
    return r.stderr if fails else r.stdout


def bits(t):
    return t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def read_folder(folder):
    """All tensors of a checkpoint folder, by the safetensors package."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return load_file(os.path.join(folder, "model.safetensors"))
    where = json.load(open(index))["weight_map"]
    tensors = {}
    for file in sorted(set(where.values())):
        part = load_file(os.path.join(folder, file))
        assert set(part) == {n for n, f in where.items() if f == file}
        tensors.update(part)
    return tensors


def hf_load(folder):
    """The model that transformers makes of a folder; nothing may be missing or left over."""
    from transformers import DeepseekV4ForCausalLM

    model, info = DeepseekV4ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_gb", ["5", "0.001"])
def test_safetensors_reads_what_plumb_writes(tmp_path, shard_gb):
    plumb("init", "tiny", tmp_path / "a", "--seed", 3, "--shard-gb", shard_gb)
    tensors = read_folder(tmp_path / "a")
    report = json.loads(plumb("inspect", tmp_path / "a", "--deep", "--json"))
    assert report["problem_count"] == 0 and report["total"]["tensors"] == len(tensors)
    assert report["total"]["bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert (report["files"] > 1) == (shard_gb != "5")
    assert tensors["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    assert tensors["layers.0.attn.wq_a.scale"].dtype == torch.float8_e8m0fnu
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8


def test_transformers_loads_every_layout_bit_equal(tmp_path):
    model = hf_model.build()
    model.save_pretrained(tmp_path / "hf")
    wanted = model.state_dict()
    source = tmp_path / "hf"
    for layout in ("released", "hf-state", "hf"):
        out = tmp_path / f"{layout}-out"
        plumb("convert", source, out, "--layout", layout, "--shard-gb", "0.0005")
        got = hf_load(out).state_dict()
        assert set(got) == set(wanted)
        for name in wanted:
            assert same(got[name], wanted[name]), name
        source = out  # the next conversion starts from this one
    assert read_folder(tmp_path / "hf-state-out").keys() == wanted.keys()
    original, back = load_file(tmp_path / "hf/model.safetensors"), read_folder(source)
    assert original.keys() == back.keys() and all(same(original[n], back[n]) for n in original)


def test_plumb_reads_a_state_dict_file(tmp_path):
    model = hf_model.build()
    model.config.save_pretrained(tmp_path)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    report = json.loads(plumb("inspect", tmp_path, "--json"))
    assert report["layout"] == "hf-state" and report["problem_count"] == 0 and "MTP" in report["notes"]["left out"]
    assert report["total"]["parameters"] == sum(p.numel() for p in model.parameters()) + sum(
        b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))


def test_transformers_dequantises_the_released_layout_to_the_same_values(tmp_path):
    """Its FP8 and FP4 decoding against ours, on sizes that its block grid can express."""
    config = dict(json.loads(hf_model.config().to_json_string()))
    sizes = dict(hidden_size=256, num_attention_heads=4, head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
                 moe_intermediate_size=128, index_n_heads=8, index_head_dim=16)
    config.update(sizes, expert_dtype="fp4",
                  quantization_config=dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", scale_fmt="ue8m0",
                                           weight_block_size=[128, 128]))
    config.pop("partial_rotary_factor", None)
    json.dump(config, open(tmp_path / "config.json", "w"))
    plumb("init", tmp_path / "config.json", tmp_path / "q", "--seed", 5)
    plumb("convert", tmp_path / "q", tmp_path / "bf16", "--layout", "hf-state", "--format", "bf16")
    ours = read_folder(tmp_path / "bf16")
    theirs = hf_load(tmp_path / "q").state_dict()
    for name, t in ours.items():
        if not name.startswith("mtp."):
            assert torch.equal(t.float(), theirs[name].float()), name


def test_bad_checkpoints_are_refused(tmp_path):
    plumb("init", "tiny", tmp_path / "a")
    path = tmp_path / "a/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert "truncated" in plumb("inspect", tmp_path / "a", fails=True)
    path.write_bytes(whole)
    tensors = load_file(path)
    tensors["layers.1.attn.wkv.scale"].view(torch.uint8)[0, 0] = 255
    save_file(tensors, path)
    error = plumb("convert", tmp_path / "a", tmp_path / "b", fails=True)
    assert "layers.1.attn.wkv.scale" in error and "NaN" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


# ---- Adapters --------------------------------------------------------------------------------------------------------


def peft_model(base):
    from peft import LoraConfig, get_peft_model

    experts = [f"model.layers.{i}.mlp.experts.{m}" for m in ("gate_up_proj", "down_proj") for i in range(5)]
    modules = ["q_a_proj", "self_attn.q_b_proj", "self_attn.kv_proj", "o_b_proj", "compressor.kv_proj", "compressor.gate_proj",
               "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"]
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=modules, target_parameters=experts))
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return model


def test_peft_adapters(tmp_path):
    from peft import PeftModel

    base = hf_model.build()
    base.save_pretrained(tmp_path / "base")
    model = peft_model(base).eval()
    model.save_pretrained(tmp_path / "peft")
    original = load_file(tmp_path / "peft/adapter_model.safetensors")

    # through every layout and back: not a bit changes
    source = "peft"
    for layout in ("vllm", "art", "native", "peft"):
        out = f"{layout}-out"
        plumb("convert", tmp_path / source, tmp_path / out, "--layout", layout, "--model", tmp_path / "base")
        source = out
    back = load_file(tmp_path / "peft-out/adapter_model.safetensors")
    assert back.keys() == original.keys()
    assert all(same(back[n], original[n]) for n in original)

    # PEFT takes our folder, configuration included
    ids = torch.arange(40)[None] % 96
    wanted = model(ids).logits.detach()
    again = PeftModel.from_pretrained(hf_model.build(), tmp_path / "peft-out").eval()
    assert torch.equal(again(ids).logits, wanted)
    with again.disable_adapter():
        assert not torch.equal(again(ids).logits, wanted)

    # the experts that ART's layout names are those that PEFT applies
    art = load_file(tmp_path / "art-out/adapter_model.safetensors")
    outer = model.base_model.model.model.layers[2].mlp.experts  # down_proj around gate_up_proj
    for wrapper, name in ((outer.base_layer, "gate_up_proj"), (outer, "down_proj")):
        delta = wrapper.get_delta_weight("default").detach()
        for e in range(8):
            key = f"base_model.model.model.layers.2.mlp.experts.{e}.{name}.lora_"
            ours = 2 * art[key + "B.weight"].double() @ art[key + "A.weight"].double()
            assert torch.allclose(delta[e].double(), ours, rtol=0, atol=1e-6)  # FP32 sums of three products below 0.1


def test_adapter_of_another_model_is_refused(tmp_path):
    base = hf_model.build()
    base.save_pretrained(tmp_path / "base")
    peft_model(base).save_pretrained(tmp_path / "peft")
    plumb("init", "tiny", tmp_path / "tiny")
    error = plumb("convert", tmp_path / "peft", tmp_path / "out", "--model", tmp_path / "tiny", fails=True)
    assert "expected" in error and "lora_A" in error
    assert not (tmp_path / "out").exists()
    assert json.loads(plumb("inspect", tmp_path / "peft", "--json"))["notes"]["rank"] == "3"
