"""Tiny random DeepSeek-V4 models in Hugging Face transformers 5.17.0 (CPU, fp32): an oracle that shares no code with plumb.

What that library computes, and where it differs from the released model, is listed in docs/numerics.md ("Hugging Face")."""
import os

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def config(**over):
    kw = dict(
        vocab_size=96, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, head_dim=32, q_lora_rank=24, o_groups=2,
        o_lora_rank=16, qk_rope_head_dim=8, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2,
        n_shared_experts=1, routed_scaling_factor=1.5, swiglu_limit=1.0, sliding_window=8, index_n_heads=16,
        index_head_dim=16, index_topk=3, hc_mult=4, hc_sinkhorn_iters=3, max_position_embeddings=4096, num_hash_layers=2,
        layer_types=[SLIDING, CSA, HCA, CSA, SLIDING], compress_rates={CSA: 4, HCA: 16},
        rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    )
    kw.update(over)
    return DeepseekV4Config(**kw)


def randomise(model, seed):
    """The library's initial values (zeros, ones, nearly constant matrices) would hide most defects."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda p: torch.randn(p.shape, generator=g)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.3 * normal(p))
            elif name.endswith("scale"):
                p.copy_(0.5 + torch.rand(p.shape, generator=g))
            elif name.endswith("fn"):
                p.copy_(0.1 * normal(p))
            elif name.endswith(("base", "position_bias", "sinks")) or "embed" in name:
                p.copy_(normal(p))
            else:
                p.copy_(normal(p) * (1.5 / p.shape[-1] ** 0.5))
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):
                n = model.config.n_routed_experts
                b.copy_(torch.stack([torch.randperm(n, generator=g)[: b.shape[1]] for _ in range(b.shape[0])]))
            elif name.endswith("e_score_correction_bias"):
                b.copy_(0.3 * normal(b))
    return model


def build(seed=1, **over):
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(config(**over)).float().eval()
    model.config._experts_implementation = "batched_mm"  # a token's result does not depend on the others' routing
    return randomise(model, seed)


LEAVES = {
    "self_attn.sinks": "attn.attn_sink", "self_attn.q_a_proj": "attn.wq_a", "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b", "self_attn.kv_proj": "attn.wkv", "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a", "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.compressor.position_bias": "attn.compressor.ape", "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate", "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn.gate",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1", "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
}


def released_gradients(model):
    """{released name: gradient} of a model after backward(); stacked experts are taken apart."""
    out = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        g, name = p.grad, name.removeprefix("model.")
        if name == "embed_tokens.weight":
            out["embed.weight"] = g
        elif name == "lm_head.weight":
            out["head.weight"] = g
        elif name.startswith("hc_head.hc_"):
            out["hc_head_" + name.removeprefix("hc_head.hc_")] = g
        elif name == "norm.weight":
            out[name] = g
        else:
            _, n, leaf = name.split(".", 2)
            layer = f"layers.{n}."
            if leaf.startswith(("attn_hc.", "ffn_hc.")):
                half, what = leaf.split(".")
                out[f"{layer}hc_{half.removesuffix('_hc')}_{what}"] = g
            elif leaf == "mlp.experts.gate_up_proj":
                for e in range(g.shape[0]):
                    out[f"{layer}ffn.experts.{e}.w1.weight"], out[f"{layer}ffn.experts.{e}.w3.weight"] = g[e].chunk(2)
            elif leaf == "mlp.experts.down_proj":
                for e in range(g.shape[0]):
                    out[f"{layer}ffn.experts.{e}.w2.weight"] = g[e]
            else:
                stem = leaf.removesuffix(".weight")
                out[layer + LEAVES[stem] + (".weight" if leaf.endswith(".weight") else "")] = g
    return out


def tool(name):
    return os.path.join(os.environ["PLUMB_BUILD"], "tests", name)
