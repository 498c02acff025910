"""Writes a small random DeepSeek-V4 checkpoint in the released layout: reference tensor names, FP8 blocks, packed FP4 experts.

The values are chosen to hide no bug: no parameter is zero, one or constant; block scales have exponents that differ between
neighbours; hash tables hold distinct ids; gate and up reach beyond the clamp of 10; YaRN's ramp is inside the table. Nothing is
shared with reference.py."""

import json
import math
import os

import torch
from safetensors.torch import save_file

COMMON = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", attention_bias=False, attention_dropout=0.0,
    bos_token_id=0, eos_token_id=1, expert_dtype="fp4", hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, hidden_act="silu",
    initializer_range=0.02, max_position_embeddings=4096, n_shared_experts=1, norm_topk_prob=True, num_key_value_heads=1,
    num_nextn_predict_layers=1, rms_norm_eps=1e-6, rope_theta=10000, compress_rope_theta=160000, routed_scaling_factor=1.5,
    scoring_func="sqrtsoftplus", topk_method="noaux_tc", swiglu_limit=10.0, tie_word_embeddings=False, use_cache=True,
    torch_dtype="bfloat16", transformers_version="4.57.1",
    quantization_config=dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", scale_fmt="ue8m0",
                             weight_block_size=[128, 128]),
)


def yarn(original):
    return dict(type="yarn", factor=16, original_max_position_embeddings=original, beta_fast=32, beta_slow=1)


PRESETS = {
    # every ratio, a window of 16, dimensions that are multiples of 128, short original length (YaRN bites at once)
    "ratios": dict(
        vocab_size=256, hidden_size=128, num_hidden_layers=6, compress_ratios=[0, 4, 128, 4, 128, 0, 0], num_hash_layers=2,
        num_attention_heads=4, head_dim=128, qk_rope_head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
        sliding_window=16, index_n_heads=16, index_head_dim=128, index_topk=8, n_routed_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, rope_scaling=yarn(256)),
    # nothing is a multiple of 128: partial blocks in K, in N and in the key-value quantiser (96 = 64 + 32), 3 groups, no SWA
    # layer in front; the surplus entry at the end of compress_ratios must be ignored
    "ragged": dict(
        vocab_size=200, hidden_size=192, num_hidden_layers=4, compress_ratios=[4, 128, 4, 0, 0, 0], num_hash_layers=1,
        num_attention_heads=6, head_dim=112, qk_rope_head_dim=16, q_lora_rank=96, o_groups=3, o_lora_rank=40,
        sliding_window=24, index_n_heads=16, index_head_dim=32, index_topk=6, n_routed_experts=12, num_experts_per_tok=3,
        moe_intermediate_size=160, rope_scaling=yarn(64)),
    # the released head geometry (512/64, index 128, window 128, top 6, YaRN of the release) in two layers
    "flash": dict(
        vocab_size=512, hidden_size=256, num_hidden_layers=2, compress_ratios=[4, 128, 0], num_hash_layers=1,
        num_attention_heads=8, head_dim=512, qk_rope_head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=128,
        sliding_window=128, index_n_heads=16, index_head_dim=128, index_topk=16, n_routed_experts=16, num_experts_per_tok=6,
        moe_intermediate_size=128, rope_scaling=yarn(65536)),
}

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Maker:
    def __init__(self, config, seed):
        self.c, self.g, self.tensors = config, torch.Generator().manual_seed(seed), {}

    # ---- random pieces -----------------------------------------------------------------------------------------------

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.g)

    def matrix(self, out, inp, gain=1.0, block=(128, 128)):
        """Gaussian [out, inp] with unit output variance times gain^2, whose blocks differ by powers of two."""
        w = self.randn(out, inp) * gain / math.sqrt(inp)
        rows, cols = math.ceil(out / block[0]), math.ceil(inp / block[1])
        power = torch.randint(-1, 2, (rows, cols), generator=self.g).float()
        return w * torch.exp2(power).repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :inp]

    # ---- one method a storage format ---------------------------------------------------------------------------------

    def bf16(self, name, x):
        self.tensors[name] = x.to(torch.bfloat16).contiguous()

    def f32(self, name, x):
        self.tensors[name] = x.float().contiguous()

    def fp8(self, name, out, inp, gain=1.0):
        """.weight e4m3 [out, inp] and .scale e8m0 [ceil(out/128), ceil(inp/128)]; the scale is the smallest power of two
        that keeps the block within 448."""
        w = self.matrix(out, inp, gain)
        rows, cols = math.ceil(out / 128), math.ceil(inp / 128)
        padded = torch.zeros(rows * 128, cols * 128)
        padded[:out, :inp] = w
        amax = padded.abs().view(rows, 128, cols, 128).amax((1, 3))
        exponent = torch.ceil(torch.log2(amax / 448)).clamp(-126, 127)
        scale = torch.exp2(exponent).repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :inp]
        self.tensors[name + ".weight"] = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).contiguous()
        self.tensors[name + ".scale"] = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu).contiguous()

    def fp4(self, name, out, inp, gain=1.0):
        """.weight int8 [out, inp/2], low nibble = even input, and .scale e8m0 [out, inp/32]."""
        w = self.matrix(out, inp, gain, block=(1, 32)).view(out, inp // 32, 32)
        exponent = torch.ceil(torch.log2(w.abs().amax(-1) / 6)).clamp(-126, 127)
        v = w / torch.exp2(exponent)[..., None]
        code = (v.abs()[..., None] - E2M1).abs().argmin(-1)  # nearest; a tie takes the smaller magnitude (any choice is valid)
        code = (code + 8 * (v < 0)).view(out, inp).to(torch.uint8)
        self.tensors[name + ".weight"] = (code[:, 0::2] | (code[:, 1::2] << 4)).view(torch.int8).contiguous()
        self.tensors[name + ".scale"] = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu).contiguous()

    def norm(self, name, n):
        self.bf16(name + ".weight", 1 + 0.25 * self.randn(n))

    def hyper(self, prefix, rows, scales):
        n, d = self.c["hc_mult"], self.c["hidden_size"]
        self.f32(prefix + "_fn", self.randn(rows, n * d) / math.sqrt(n * d))
        self.f32(prefix + "_base", 0.5 * self.randn(rows))
        self.f32(prefix + "_scale", 0.6 + 0.8 * torch.rand(scales, generator=self.g))

    # ---- the model ---------------------------------------------------------------------------------------------------

    def compressor(self, prefix, ratio, width):
        d, co = self.c["hidden_size"], 2 if ratio == 4 else 1
        self.f32(prefix + ".ape", 0.7 * self.randn(ratio, co * width))
        self.bf16(prefix + ".wkv.weight", self.randn(co * width, d) / math.sqrt(d))
        self.bf16(prefix + ".wgate.weight", self.randn(co * width, d) / math.sqrt(d))
        self.norm(prefix + ".norm", width)

    def block(self, p, ratio, hashed):
        c = self.c
        d, heads, width, rank = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
        groups, orank, f, experts = c["o_groups"], c["o_lora_rank"], c["moe_intermediate_size"], c["n_routed_experts"]
        a = p + "attn."
        self.fp8(a + "wq_a", rank, d)
        self.norm(a + "q_norm", rank)
        self.fp8(a + "wq_b", heads * width, rank)
        self.fp8(a + "wkv", width, d)
        self.norm(a + "kv_norm", width)
        self.fp8(a + "wo_a", groups * orank, heads * width // groups, 2.0)
        self.fp8(a + "wo_b", d, groups * orank, 1.5)
        self.f32(a + "attn_sink", self.randn(heads))
        self.norm(p + "attn_norm", d)
        self.norm(p + "ffn_norm", d)
        n = c["hc_mult"]
        self.hyper(p + "hc_attn", (2 + n) * n, 3)
        self.hyper(p + "hc_ffn", (2 + n) * n, 3)
        self.bf16(p + "ffn.gate.weight", 1.5 * self.randn(experts, d) / math.sqrt(d))
        if hashed:
            k, vocab = c["num_experts_per_tok"], c["vocab_size"]
            table = torch.stack([torch.randperm(experts, generator=self.g)[:k] for _ in range(vocab)])
            self.tensors[p + "ffn.gate.tid2eid"] = table.long().contiguous()
        else:
            self.f32(p + "ffn.gate.bias", 0.2 * self.randn(experts))
        routed = self.fp4 if c.get("expert_dtype") == "fp4" else self.fp8
        for e in range(experts):
            for leaf, o, i, gain in (("w1", f, d, 4.0), ("w3", f, d, 4.0), ("w2", d, f, 0.07)):
                routed(f"{p}ffn.experts.{e}.{leaf}", o, i, gain)
        for leaf, o, i, gain in (("w1", f, d, 4.0), ("w3", f, d, 4.0), ("w2", d, f, 0.03)):
            self.fp8(f"{p}ffn.shared_experts.{leaf}", o, i, gain)
        if ratio:
            self.compressor(a + "compressor", ratio, width)
        if ratio == 4:
            heads_i, width_i = c["index_n_heads"], c["index_head_dim"]
            self.fp8(a + "indexer.wq_b", heads_i * width_i, rank)
            self.bf16(a + "indexer.weights_proj.weight", self.randn(heads_i, d) / math.sqrt(d))
            self.compressor(a + "indexer.compressor", 4, width_i)

    def model(self):
        c = self.c
        d, n, layers = c["hidden_size"], c["hc_mult"], c["num_hidden_layers"]
        self.bf16("embed.weight", self.randn(c["vocab_size"], d))
        self.bf16("head.weight", 2.0 * self.randn(c["vocab_size"], d) / math.sqrt(d))
        self.norm("norm", d)
        self.hyper("hc_head", n, 1)
        for i in range(layers):
            self.block(f"layers.{i}.", c["compress_ratios"][i], i < c["num_hash_layers"])
        for j in range(c["num_nextn_predict_layers"]):
            p = f"mtp.{j}."
            self.block(p, c["compress_ratios"][layers + j], False)
            self.fp8(p + "e_proj", d, d)
            self.fp8(p + "h_proj", d, d)
            for leaf in ("enorm", "hnorm", "norm"):
                self.norm(p + leaf, d)
            self.hyper(p + "hc_head", n, 1)
        return self.tensors


def build(out, preset="ratios", seed=1, experts="fp4", shards=1, **changes):
    """Writes config.json and model.safetensors, or `shards` files with an index; returns the config. experts "fp8" is the layout of the
    base checkpoints (128x128 FP8 experts, no expert_dtype); `changes` replace keys of the config."""
    config = {**COMMON, **PRESETS[preset], **changes}
    if experts == "fp8":
        config.pop("expert_dtype")
    tensors = Maker(config, seed).model()
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump(config, f, indent=1)
        f.write("\n")
    if shards == 1:
        save_file(tensors, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
        return config
    where, names = {}, sorted(tensors)
    for s in range(shards):
        file, part = f"model-{s + 1:05d}-of-{shards:05d}.safetensors", names[s::shards]
        save_file({k: tensors[k] for k in part}, os.path.join(out, file), metadata={"format": "pt"})
        where.update({k: file for k in part})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    with open(os.path.join(out, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, f, indent=1)
    return config
