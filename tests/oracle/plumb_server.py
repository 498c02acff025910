"""Starts `plumb serve` on the embedded model and `plumb watch`, for the tests of their clients and pages."""
import contextlib
import json
import os
import pathlib
import re
import subprocess
import threading

import torch
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).parent.parent.parent


@contextlib.contextmanager
def listening(*arguments):
    """Starts the program with these arguments. -> its address, http://127.0.0.1:PORT, once it listens."""
    server = subprocess.Popen([os.environ["PLUMB"], *map(str, arguments), "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise RuntimeError("plumb ended: " + "".join(said))
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop it
        yield found.group()
    finally:
        server.terminate()
        server.wait(timeout=20)


def serve(*arguments):
    return listening("serve", "--model", ROOT / "assets/tiny", *arguments)


def watch(folder, *arguments):
    return listening("watch", folder, *arguments)


def write_adapter(folder, seed):
    """A LoRA adapter of random numbers for the embedded model, large enough to change its answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(5):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_a_proj.lora_"
        tensors[name + "A.weight"] = torch.randn(2, 128, generator=generator)
        tensors[name + "B.weight"] = torch.randn(64, 2, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["q_a_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
