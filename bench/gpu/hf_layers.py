#!/usr/bin/env python3
"""A training step of one layer of each kind in Hugging Face transformers (eager attention, bf16) on a GPU: what `model_gpu_bench` is
compared with in the same run.

    bench/gpu/hf_layers.py RESULT.json [--rows 4096 8192 16384] [--small]

Flash's shape with all 256 experts. The weights are frozen; the step is a forward pass, a backward pass down to the layer's input and no
update. Times are the fastest of three after one that is not counted. Rows that do not fit into the GPU's memory are said so.
"""
import argparse
import datetime
import json
import sys
import time

import torch
from transformers import DeepseekV4Config, DeepseekV4Model

KINDS = {"window": "sliding_attention", "CSA": "compressed_sparse_attention", "HCA": "heavily_compressed_attention"}
FLASH = dict(
    vocab_size=1024, hidden_size=4096, num_hidden_layers=1, num_attention_heads=64, head_dim=512, q_lora_rank=1024, o_groups=8,
    o_lora_rank=1024, qk_rope_head_dim=64, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=6,
    n_shared_experts=1, routed_scaling_factor=1.5, swiglu_limit=10.0, sliding_window=128, index_n_heads=64, index_head_dim=128,
    index_topk=512, hc_mult=4, hc_sinkhorn_iters=20, max_position_embeddings=65536, num_hash_layers=0,
    compress_rates={KINDS["CSA"]: 4, KINDS["HCA"]: 128},
    rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1})
SMALL = dict(hidden_size=128, num_attention_heads=4, head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=32, moe_intermediate_size=64,
             n_routed_experts=8, num_experts_per_tok=2, index_n_heads=4, index_head_dim=32, qk_rope_head_dim=16)


def layer(kind, device, small):
    config = DeepseekV4Config(**(FLASH | (SMALL if small else {})), layer_types=[KINDS[kind]])
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = DeepseekV4Model(config)
        torch.set_default_dtype(torch.float32)
    return model.to(torch.bfloat16).requires_grad_(False)


def step(model, rows, device):
    x = torch.randn(1, rows, model.config.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(1, rows, model.config.hidden_size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(4):
        x.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model(inputs_embeds=x, use_cache=False).last_hidden_state.backward(g)
        if device == "cuda":
            torch.cuda.synchronize()
        if _ > 0:
            best = min(best, time.perf_counter() - start)
    return 1e3 * best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try this script without a GPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = []
    for kind in KINDS:
        model = layer(kind, device, args.small)
        for rows in args.rows:
            name = f"one {kind} layer, forward and backward, {rows} rows"
            try:
                figures.append({"name": name, "value": round(step(model, rows, device), 1), "unit": "ms"})
            except torch.OutOfMemoryError:
                figures.append({"name": name, "value": "out of memory", "unit": ""})
                torch.cuda.empty_cache()
            print(figures[-1], flush=True)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    import transformers
    with open(args.result, "w") as f:
        json.dump({"name": "hf_layers", "date": datetime.date.today().isoformat(),
                   "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
                   "command": f"bench/gpu/hf_layers.py; transformers {transformers.__version__}, torch {torch.__version__}",
                   "figures": figures}, f, indent=1)


if __name__ == "__main__":
    sys.exit(main())
