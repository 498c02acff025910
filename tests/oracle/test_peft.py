"""Adapters against PEFT: the same folder loaded by PEFT on the transformers model and by plumb gives the same logits, whoever wrote it.

Tolerance 1e-4 of the largest logit: both sides sum in fp32, in different orders. What PEFT cannot express: it applies o_a_proj, a
grouped linear, only after merging (unmerged, its low-rank product has the rows of all groups for every group and raises); its packed
experts are all experts of a layer with one A for gate and up (plumb's native layout has neither limit: tests/checkpoint)."""
import json
import os
import subprocess

import peft
import pytest
import torch
from safetensors.torch import load_file

import hf_model
from hf_model import CSA, HCA, SLIDING

torch.set_num_threads(1)
torch.set_grad_enabled(False)

MODULES = r".*\.(self_attn\.(q_a_proj|q_b_proj|kv_proj|o_b_proj{})|self_attn\.compressor\.(kv_proj|gate_proj)" \
          r"|mlp\.shared_experts\.(gate_proj|up_proj|down_proj))"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(3))


def build():
    return hf_model.build(seed=7, num_hidden_layers=3, layer_types=[SLIDING, CSA, HCA])


def logits(model):
    return model(input_ids=IDS[None], use_cache=False).logits[0]


def plumb(*arguments):
    subprocess.run([os.environ["PLUMB"], *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def score(folder, where, adapter=None, numerics="fp32"):
    """-> (logits [S,V], log-probabilities as they were printed)"""
    (where / "in.jsonl").write_text(json.dumps({"tokens": IDS.tolist()}) + "\n")
    plumb("score", "--model", folder, "--input", where / "in.jsonl", "--output", where / "out.jsonl", "--numerics", numerics,
          "--dump-logits", where / "logits.safetensors", *(["--adapter", adapter] if adapter else []))
    return load_file(where / "logits.safetensors")["logits.0"], json.loads((where / "out.jsonl").read_text())["logprobs"]


def same(ours, theirs):
    return (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("base")
    build().save_pretrained(where)
    return where


def make_adapter(where, grouped=False):
    """Has PEFT write an adapter whose B is not zero; -> the wrapped model."""
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=MODULES.format("|o_a_proj" if grouped else ""),
                             target_parameters=EXPERTS)
    model = peft.get_peft_model(build(), config)
    g = torch.Generator().manual_seed(11)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.copy_(torch.randn(p.shape, generator=g) * (0.3 if "lora_B" in name else 1) / p.shape[-1] ** 0.5)
    model.save_pretrained(where)
    return model.eval()


def load(adapter):
    return peft.PeftModel.from_pretrained(build(), adapter).eval()


def test_adapter_of_peft(folder, tmp_path):
    want = logits(make_adapter(tmp_path / "adapter"))
    ours, _ = score(folder, tmp_path, tmp_path / "adapter")
    base, _ = score(folder, tmp_path)
    assert same(ours, want)
    assert (want - base).abs().max() > 0.1 * want.abs().max()  # the adapter matters


def test_grouped_projection_equals_peft_after_merging(folder, tmp_path):
    model = make_adapter(tmp_path / "adapter", grouped=True)
    with pytest.raises(RuntimeError):  # [S, g, g*d_g] is added to [S, g, d_g]
        logits(model)
    ours, _ = score(folder, tmp_path, tmp_path / "adapter")
    assert same(ours, logits(model.merge_and_unload()))


def test_adapter_written_by_plumb_loads_in_peft(folder, tmp_path):
    want = logits(make_adapter(tmp_path / "first", grouped=True).merge_and_unload())
    for step, layout in (("first", "native"), ("native", "peft")):
        plumb("convert", tmp_path / step, tmp_path / layout, "--model", folder, "--layout", layout)
    assert same(logits(load(tmp_path / "peft").merge_and_unload()), want)


@pytest.mark.parametrize("numerics", ["fp32", "released"])
def test_every_layout_gives_the_same_bits(folder, tmp_path, numerics):
    make_adapter(tmp_path / "peft", grouped=True)
    first, logprobs = score(folder, tmp_path, tmp_path / "peft", numerics)
    for layout in ("vllm", "art", "native"):
        plumb("convert", tmp_path / "peft", tmp_path / layout, "--model", folder, "--layout", layout)
        got, printed = score(folder, tmp_path, tmp_path / layout, numerics)
        assert torch.equal(got, first) and printed == logprobs, layout
        plumb("convert", tmp_path / layout, tmp_path / f"{layout}-peft", "--model", folder, "--layout", "peft")
        a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", f"{layout}-peft"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), layout
