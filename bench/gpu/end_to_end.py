#!/usr/bin/env python3
"""The program as a user has it, on a GPU: a random model of Flash's shape is made, trained with LoRA and by RL, sampled, scored and served.

    bench/gpu/end_to_end.py RESULT.json [--plumb build/plumb] [--small]

Four layers with 32 experts and the vocabulary of assets/tiny (3.8 B parameters, 2.3 GB). Fails if a sampled log-probability differs from the
scored one in any bit, if RL reports a mismatch, or if an answer depends on what is served beside it. --small: assets/tiny itself, on any
machine, to try this script.
"""
import argparse
import concurrent.futures
import contextlib
import datetime
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FLASH = dict(
    hidden_size=4096, num_hidden_layers=4, num_nextn_predict_layers=0, num_attention_heads=64, head_dim=512, q_lora_rank=1024, o_groups=8,
    o_lora_rank=1024, sliding_window=128, index_n_heads=64, index_head_dim=128, index_topk=512, moe_intermediate_size=2048,
    n_routed_experts=32, num_experts_per_tok=6, qk_rope_head_dim=64, compress_ratios=[0, 4, 128, 4], initializer_range=0.02,
    max_position_embeddings=65536)
TRAIN = """
[model]
path = "{model}"
numerics = "released"
[data]
train = "{examples}/labels.jsonl"
thinking_mode = "chat"
row_tokens = 2048
[train]
steps = {steps}
rows_per_step = 4
learning_rate = 1e-3
[lora]
rank = 8
[output]
dir = "{work}/sft"
"""
RL = """
[model]
path = "{model}"
numerics = "released"
[data]
train = "{examples}/rl/maybe.jsonl"
thinking_mode = "chat"
row_tokens = 512
[rl]
groups_per_step = 8
group_size = 8
[sampling]
max_tokens = 24
temperature = 1.2
[train]
steps = {steps}
learning_rate = 2e-3
[lora]
rank = 8
[output]
dir = "{work}/rl"
[[reward]]
kind = "length"
unit = "characters"
target = 20
"""


class Session:
    def __init__(self, plumb, work, small):
        self.plumb, self.work, self.steps = plumb, work, 4 if small else 40
        self.model, self.figures = work / "model", []
        self.small = small

    def note(self, name, value, unit):
        self.figures.append({"name": name, "value": value, "unit": unit})
        print(f"{name}: {value} {unit}", flush=True)

    def run(self, *arguments):
        done = subprocess.run([self.plumb, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"plumb {arguments[0]}: {done.stderr}")

    def run_file(self, command, text):
        path = self.work / f"{command}.toml"
        path.write_text(text.format(model=self.model, examples=ROOT / "examples", work=self.work, steps=self.steps))
        self.run(command, path)

    def metrics(self, run):
        return [json.loads(line) for line in (self.work / run / "metrics.jsonl").read_text().splitlines()]


def make_model(s):
    tiny = ROOT / "assets/tiny"
    if s.small:
        shutil.copytree(tiny, s.model)
        return
    config = json.loads((tiny / "config.json").read_text()) | FLASH
    config["rope_scaling"]["original_max_position_embeddings"] = 4096
    (s.work / "config.json").write_text(json.dumps(config))
    s.run("init", s.work / "config.json", s.model)
    shutil.copy(tiny / "tokenizer.json", s.model)


def train(s):
    s.run_file("train", TRAIN)
    s.run_file("rl", RL)
    steps = [m for m in s.metrics("rl") if "mismatch_tokens" in m]
    s.note("RL: tokens whose log-probability in training differs from the sampler's", sum(m["mismatch_tokens"] for m in steps), "")
    s.note("RL: reward of the first step", round(steps[0]["reward"], 3), "")
    s.note("RL: reward of the last step", round(steps[-1]["reward"], 3), "")
    s.note("RL: sampled, median of the steps", round(sorted(m["sampled_tokens_per_second"] for m in steps)[len(steps) // 2]), "tokens/s")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare_bits(s, adapter):
    g = random.Random(1)
    prompts = [{"tokens": [g.randrange(10, 1200) for _ in range(1 + i * 37 % 700)]} for i in range(48)]
    write = lambda path, lines: path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    write(s.work / "in", prompts)
    s.run("sample", "--model", s.model, "--adapter", adapter, "--input", s.work / "in", "--output", s.work / "out", "--max-tokens", 40, "--batch", 32)
    answers = lines_of(s.work / "out")
    write(s.work / "in", [{"tokens": p["tokens"] + a["tokens"]} for p, a in zip(prompts, answers)])
    s.run("score", "--model", s.model, "--adapter", adapter, "--input", s.work / "in", "--output", s.work / "scored", "--row-tokens", 4096)
    pairs = [pair for p, a, q in zip(prompts, answers, lines_of(s.work / "scored")) for pair in zip(a["logprobs"], q["logprobs"][len(p["tokens"]):])]
    s.note("sampled log-probabilities", len(pairs), "")
    s.note("of them different from the scored ones", sum(x != y for x, y in pairs), "")


@contextlib.contextmanager
def serving(s, adapter):
    server = subprocess.Popen([s.plumb, "serve", "--model", s.model, "--adapter", f"sft={adapter}", "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            sys.exit("plumb serve ended")
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield found.group()
    finally:
        server.terminate()
        server.wait(timeout=60)


def serve(s, adapter):
    with serving(s, adapter) as url:
        def ask(i):
            body = {"model": "sft" if i % 2 else "model", "messages": [{"role": "user", "content": f"Tell {i} " + "word " * (i * 5 % 60)}],
                    "max_tokens": 64, "logprobs": True, "top_logprobs": 3, "seed": i, "temperature": 1}
            request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            return json.load(urllib.request.urlopen(request, timeout=600))

        def crowd(n):
            with concurrent.futures.ThreadPoolExecutor(n) as pool:
                return list(pool.map(ask, range(n)))

        alone = ask(3)
        for n in (1, 16, 64) if s.small else (1, 16, 64, 256, 512):
            start = time.time()
            answers = crowd(n)
            made = sum(a["usage"]["completion_tokens"] for a in answers)
            s.note(f"served, {n} chat requests at once, half of them with the adapter", round(made / (time.time() - start)), "tokens/s")
        s.note("an answer's choices differ alone and in a crowd", int(crowd(32)[3]["choices"] != alone["choices"]), "")


def device_name():
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    return "CPU"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result")
    parser.add_argument("--plumb", default=ROOT / "build/plumb")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        s = Session(args.plumb, pathlib.Path(folder), args.small)
        make_model(s)
        train(s)
        adapter = sorted((s.work / "sft/checkpoints").iterdir())[-1]
        compare_bits(s, adapter)
        serve(s, adapter)
    result = {"name": "end_to_end", "title": "The program as a user has it, on a GPU", "date": datetime.date.today().isoformat(), "device": device_name(),
              "command": "bench/gpu/end_to_end.py: four layers of Flash's shape, 32 experts, a vocabulary of 1,280", "figures": s.figures}
    pathlib.Path(args.result).write_text(json.dumps(result, indent=1) + "\n")
    bad = [f for f in s.figures if "differ" in f["name"] and f["value"]]
    sys.exit(f"differences: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
