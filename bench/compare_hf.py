"""Training step and decoding of a mid-size V4 (61 M parameters, 8 layers, 16 experts) against Hugging Face transformers, side by side.

Both sides hold the same FP32 weights (two more rows decode with ours packed as released, FP8 and FP4), use the same tokens and the same number of threads, and take turns within one run; figures are
medians. Losses and greedy tokens are compared as well, so that both sides are known to compute the same thing. There is no optimizer in
either step. PEFT cannot adapt the grouped projection o_a_proj; it is left out on both sides. Usage:

    .venv/bin/python bench/compare_hf.py build [--rounds 5] [--only full,decode1] [--out bench/results/compare_hf.json]
"""
import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils import logging

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
TOKENS, PROMPT, NEW, RANK = 512, 64, 64, 8
NOTE = """A V4 of 61 M parameters, 512 tokens; FP32 weights on both sides unless said otherwise; medians of runs that take turns.

Limits, measured on these two cores with plain loops: 296 GFLOP/s of FP32 multiply-adds (AVX-512), 22 GB/s read from memory (244 MB, the
whole model in FP32), 38 GB/s while 90 MB fit into the shared cache. Decoding alone reads about 90 MB of FP32 weights a token: 10 times
Hugging Face would need 19 to 24 GB/s beside all other work, about all that the memory gives; packed weights are a fifth of that.
A LoRA step has about 45 GFLOP of products, 0.15 s at the ceiling; products of 128 rows reach 264 to 278 GFLOP/s (`linear_bench`). The
rest of the step is packing rows and weights for the products, attention, the mixing of streams and copies of rows for the experts.

Tried without gain: sums of several groups of outputs in registers when few rows are multiplied (g++ 12 spills; FP4 with four rows took
twice as long)."""
ATTENTION = r"self_attn\.(q_a_proj|q_b_proj|kv_proj|o_b_proj|compressor\.kv_proj|compressor\.gate_proj)"
SHARED = r"mlp\.shared_experts\.(gate_proj|up_proj|down_proj)"


def build_model():
    config = DeepseekV4Config(
        vocab_size=1024, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, head_dim=128, q_lora_rank=128, o_groups=2,
        o_lora_rank=128, qk_rope_head_dim=32, moe_intermediate_size=256, n_routed_experts=16, num_experts_per_tok=4,
        n_shared_experts=1, sliding_window=64, index_n_heads=8, index_head_dim=64, index_topk=64,
        layer_types=[SLIDING, SLIDING] + [CSA, HCA] * 3, num_hash_layers=2, hc_mult=4, max_position_embeddings=4096,
        eos_token_id=None, bos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # otherwise every token of a hash layer goes to the same experts
            if name.endswith("tid2eid"):
                buffer.copy_(torch.stack([torch.randperm(config.n_routed_experts)[: buffer.shape[1]] for _ in range(len(buffer))]))
    return model


def tokens(count, vocabulary, seed):  # as in step_bench.cpp
    ids, s = [], seed
    for _ in range(count):
        s = (s * 1103515245 + 12345) & 0x7FFFFFFF
        ids.append((s >> 8) % vocabulary)
    return ids


class Ours:
    def __init__(self, program, folder, threads):
        self.process = subprocess.Popen([program, folder, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("step_bench failed")
        return json.loads(answer)


class Theirs:
    def __init__(self, model, adapted):
        self.model, self.adapted = model, adapted
        self.ids = torch.tensor([tokens(TOKENS, model.config.vocab_size, 1)])

    def forward(self):
        with torch.no_grad():
            return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.item()

    def step(self, model):
        model.zero_grad(set_to_none=True)
        out = model(input_ids=self.ids, labels=self.ids, use_cache=False)
        out.loss.backward()
        return out.loss.item()

    def decode(self, batch):
        prompt = torch.tensor([tokens(PROMPT, self.model.config.vocab_size, i + 1) for i in range(batch)])
        with torch.no_grad():
            out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
        return out[:, PROMPT:].flatten().tolist()


def adapted_model(model, folder, routed):
    copy = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    copy.config._experts_implementation = model.config._experts_implementation
    names = [n for n, _ in copy.named_modules()]
    pattern = re.compile(rf".*\.({ATTENTION}|{SHARED})$")
    targets = [n for n in names if pattern.match(n)]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if routed else None
    lora = LoraConfig(r=RANK, lora_alpha=4 * RANK, target_modules=targets, target_parameters=parameters, lora_dropout=0.0)
    return get_peft_model(copy, lora)


def timed(body):
    begin = time.perf_counter()
    result = body()
    return time.perf_counter() - begin, result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", help="build folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="")
    parser.add_argument("--experts", default="", help="experts implementation of transformers; default: its own choice")
    parser.add_argument("--out")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(a.threads)
    wanted = set(a.only.split(",")) - {""}

    with tempfile.TemporaryDirectory() as folder:
        model = build_model()
        model.save_pretrained(folder)
        if a.experts:
            model.config._experts_implementation = a.experts
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {a.threads} threads, experts of transformers: "
              f"{model.config._experts_implementation}", flush=True)
        adapted = {k: adapted_model(model, folder, k == "lora") for k in ("lora", "lora_dense") if not wanted or k in wanted}
        packed_folder = os.path.join(folder, "packed")
        subprocess.run([f"{a.build}/plumb", "convert", folder, packed_folder, "--format", "released"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ours, packed = (Ours(f"{a.build}/bench/step_bench", f, a.threads) for f in (folder, packed_folder))
        theirs = Theirs(model, adapted)

        # name -> (title, ratio to reach or None, units of work, ours, theirs)
        cases = {
            "forward": ("forward, 512 tokens", None, TOKENS, f"forward {TOKENS}", theirs.forward),
            "full": ("step, all parameters, 512 tokens", 2, TOKENS, f"full {TOKENS}", lambda: theirs.step(model)),
            "lora": ("step, LoRA with routed experts, 512 tokens", 3, TOKENS, f"lora {TOKENS}", lambda: theirs.step(adapted["lora"])),
            "lora_dense": ("step, LoRA without routed experts", 3, TOKENS, f"lora_dense {TOKENS}",
                           lambda: theirs.step(adapted["lora_dense"])),
            "decode1": ("decoding alone, 64 + 64 tokens", 10, NEW, f"decode 1 {PROMPT} {NEW}", lambda: theirs.decode(1)),
            "decode16": ("decoding, 16 sequences", 5, 16 * NEW, f"decode 16 {PROMPT} {NEW}", lambda: theirs.decode(16)),
        }
        # The same model with packed weights, for which the other side has no format: its figures are those of the rows above.
        packed_cases = {"decode1": "decoding alone, our weights FP8 and FP4", "decode16": "decoding, 16 sequences, ours FP8 and FP4"}
        cases = {k: v for k, v in cases.items() if not wanted or k in wanted}
        packed_cases = {k: v for k, v in packed_cases.items() if k in cases}
        seconds = {k: ([], []) for k in cases}
        packed_seconds = {k: [] for k in packed_cases}
        for turn in range(a.rounds + 1):
            for name, (_, _, _, command, their_body) in cases.items():
                mine = ours.ask(command)
                their_seconds, result = timed(their_body)
                if turn == 0:  # warm-up, and the check that both sides compute the same
                    if name.startswith("decode"):
                        same = sum(x == y for x, y in zip(mine["tokens"], result)) / len(result)
                        print(f"{name}: {same:.1%} of the greedy tokens are equal")
                    elif name in ("forward", "full"):  # adapters start differently
                        print(f"{name}: loss {mine['loss']:.6f} and {result:.6f}")
                    continue
                seconds[name][0].append(mine["seconds"])
                seconds[name][1].append(their_seconds)
                if name in packed_cases:
                    packed_seconds[name].append(packed.ask(command)["seconds"])

    figures = []
    rows = [(title, goal, units, *seconds[name]) for name, (title, goal, units, _, _) in cases.items()]
    rows += [(title, *cases[name][1:3], packed_seconds[name], seconds[name][1]) for name, title in packed_cases.items()]
    print(f"\n{'':<46}{'ours':>12}{'HF':>12}{'':>10}{'ratio':>8}{'to reach':>10}")
    for title, goal, units, our_runs, their_runs in rows:
        mine, their = statistics.median(our_runs), statistics.median(their_runs)
        print(f"{title:<46}{units / mine:>12.1f}{units / their:>12.1f}{'tokens/s':>10}{their / mine:>8.2f}{goal or '':>10}")
        figures.append({"what": title, "ours, tokens/s": round(units / mine, 1), "Hugging Face, tokens/s": round(units / their, 1),
                        "ratio": round(their / mine, 2), "to reach": goal,
                        "ours, s": [round(s, 4) for s in our_runs], "Hugging Face, s": [round(s, 4) for s in their_runs]})
    if a.out:
        cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
        record = {"name": "compare_hf", "title": "Training step and decoding against Hugging Face transformers", "date": str(datetime.date.today()), "device": f"{a.threads} cores, {cpu}",
                  "command": "make bench", "note": NOTE, "figures": figures}
        with open(a.out, "w") as f:
            json.dump(record, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
