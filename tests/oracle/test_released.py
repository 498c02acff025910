"""The profile `released`, stage by stage, against an oracle of the published inference arithmetic (tests/oracle/released).

Bounds and their reasons: released/check.py. The negative controls take one rounding point out of the oracle, or give it another
implementation's rule, and demand that the comparison sees it: so no point can go missing in the program unnoticed."""
import json
import math
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file

import hf_model
from released import check, formats, make, reference

torch.set_num_threads(1)
torch.set_grad_enabled(False)

FOLDERS = {  # name -> arguments of make.build
    "ratios": dict(preset="ratios"),
    "ragged": dict(preset="ragged"),
    "flash": dict(preset="flash"),
    "base": dict(preset="ratios", experts="fp8", seed=2),
    "ragged base": dict(preset="ragged", experts="fp8", seed=4),
}
LENGTH = 140  # tokens for which the bounds were measured
CASES = [(name, LENGTH, None) for name in FOLDERS] + [("ratios", n, None) for n in (1, 2, 3, 5)]
CASES += [("ratios", n, [1, 2]) for n in (127, 128, 129, 130)]  # the two kinds of compressed layers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            folder = str(tmp_path_factory.mktemp("released"))
            make.build(folder, **FOLDERS[name])
            made[name] = folder, reference.Oracle(folder)
        return made[name]

    return get


def random_ids(vocab, tokens, seed=5):
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def dump(folder, ids, where):
    """Everything that the program computes for one token list."""
    (where / "in.jsonl").write_text(json.dumps({"tokens": ids}) + "\n")
    subprocess.run([os.environ["PLUMB"], "score", "--model", folder, "--input", where / "in.jsonl", "--output", where / "out.jsonl",
                    "--dump-layers", where / "dump.safetensors"], check=True)
    return load_file(where / "dump.safetensors")


@pytest.mark.parametrize("name,tokens,layers", CASES, ids=[f"{n}-{t}" for n, t, _ in CASES])
def test_every_stage(checkpoints, tmp_path, name, tokens, layers):
    folder, oracle = checkpoints(name)
    got = dump(folder, random_ids(oracle.config["vocab_size"], tokens), tmp_path)
    mtp = oracle.layers
    assert {f"streams.{mtp - 1}", f"q.{mtp - 1}", "logits"} <= got.keys() and (tokens == 1 or f"o.{mtp}" in got)
    assert check.problems(oracle, got, layers) == []


def test_sharded_checkpoint_is_the_same_model(checkpoints, tmp_path):
    folder, oracle = checkpoints("ratios")
    make.build(tmp_path / "shards", "ratios", shards=3)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) == 3
    ids = random_ids(oracle.config["vocab_size"], 30)
    whole, shards = dump(folder, ids, tmp_path), dump(str(tmp_path / "shards"), ids, tmp_path)
    assert whole.keys() == shards.keys() and all(torch.equal(whole[k], shards[k]) for k in whole)


# ---- Negative controls: the comparison sees every point ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def control(checkpoints, tmp_path_factory):
    folder, oracle = checkpoints("ratios")
    return oracle, dump(folder, random_ids(oracle.config["vocab_size"], 64), tmp_path_factory.mktemp("control"))


STAGE = {"act.wq_a": "q", "act.wq_b": "q", "sim.kv": "kv", "sim.ckv": "ckv", "had.iq": "iq", "sim.ik": "ik", "out.iw": "iw", "attn.p": "o",
         "out.wo_a": "mid", "hc.post": "mid", "act.w2": "streams", "out.s2": "streams", "hc.head": "logits", "mtp.sum": "q"}


@pytest.mark.parametrize("point", reference.POINTS)
def test_a_missing_point_is_seen(control, monkeypatch, point):
    oracle, got = control
    monkeypatch.setattr(oracle, "off", {point})
    mtp = point in ("norm.mtp", "act.mtp", "out.mtp", "mtp.sum")
    found = check.problems(oracle, got, layers=[oracle.layers] if mtp else [3])  # layer 3 has an indexer and a score router
    assert found and found[0].startswith(STAGE.get(point, ""))


@pytest.mark.parametrize("option", reference.OPTIONS)
def test_another_rule_is_seen(control, monkeypatch, option):
    oracle, got = control
    monkeypatch.setattr(oracle, option, reference.OPTIONS[option][1])
    assert check.problems(oracle, got, layers=[3])


# ---- The oracle itself -------------------------------------------------------------------------------------------------------

INDEXER = {"norm": "kv_norm", "wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias"}


def hf_state(o):
    """The oracle's dequantised tensors under the names of transformers' state dict, without MTP."""
    leaves = {new: old for old, new in hf_model.LEAVES.items()}
    leaves |= {f"attn.indexer.compressor.{k}": f"self_attn.compressor.indexer.{v}" for k, v in INDEXER.items()}
    leaves |= {"attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj", "ffn.gate.tid2eid": "mlp.gate.tid2eid",
               "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
               "ffn.gate.bias": "mlp.gate.e_score_correction_bias"}
    out = {"model.embed_tokens.weight": o.t["embed.weight"], "lm_head.weight": o.t["head.weight"], "model.norm.weight": o.t["norm.weight"]}
    for name, t in o.t.items():
        head, _, leaf = name.partition(".")
        if head.startswith("hc_head_"):
            out["model.hc_head." + head.removeprefix("hc_head_").join(["hc_", ""])] = t
        elif head == "layers" and ".experts." not in leaf:
            layer, leaf = leaf.split(".", 1)
            stem, weight = (leaf.removesuffix(".weight"), ".weight" if leaf.endswith(".weight") else "")
            if leaf.startswith("hc_"):
                _, half, what = leaf.split("_")
                out[f"model.layers.{layer}.{half}_hc.{what}"] = t
            else:
                out[f"model.layers.{layer}.{leaves[stem]}{weight}"] = t
    for i in range(o.layers):
        w = lambda leaf: torch.stack([o.t[f"layers.{i}.ffn.experts.{e}.{leaf}.weight"] for e in range(o.config["n_routed_experts"])])
        out[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat([w("w1"), w("w3")], 1)
        out[f"model.layers.{i}.mlp.experts.down_proj"] = w("w2")
    return out


@pytest.mark.parametrize("name", ["ratios", "ragged"])
def test_oracle_without_points_is_hugging_face(checkpoints, monkeypatch, name):
    """2e-5 of logits up to 10 was measured; sums in another order."""
    _, oracle = checkpoints(name)
    monkeypatch.setattr(oracle, "off", set(reference.POINTS))
    other = ("architectures", "model_type", "quantization_config", "expert_dtype", "torch_dtype", "transformers_version")
    config = {k: v for k, v in oracle.config.items() if k not in other}
    model = hf_model.DeepseekV4ForCausalLM(hf_model.DeepseekV4Config(**config)).float().eval()
    model.config._experts_implementation = "batched_mm"
    model.load_state_dict(hf_state(oracle), strict=True)
    ids = torch.tensor(random_ids(oracle.config["vocab_size"], 135))
    want = model(input_ids=ids[None], use_cache=False).logits[0]
    assert (oracle.prefill(ids) - want).abs().max() < 1e-4


def fill(n, seed):  # the deterministic filler of the golden numbers
    return torch.tensor([math.sin(1.7 * seed + 0.9 * k) for k in range(n)], dtype=torch.float32)


def near(a, b, tol=2e-6):
    return (torch.as_tensor(a) - torch.as_tensor(b)).abs().max().item() <= tol


def test_oracle_formats_are_those_of_torch():
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    small, codes = every[every.abs() <= 448], torch.arange(256).to(torch.uint8)
    assert torch.equal(formats.round_e4m3(small), small.to(torch.float8_e4m3fn).float())
    assert torch.equal(formats.decode_e4m3(codes).nan_to_num(9e9), codes.view(torch.float8_e4m3fn).float().nan_to_num(9e9))
    assert torch.equal(formats.decode_e8m0(codes)[:255], codes[:255].view(torch.float8_e8m0fnu).float())
    x, table = small[small.abs() <= 6], torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal((formats.round_e2m1(x) - x).abs(), (x.abs()[:, None] - table).abs().amin(1))
    assert formats.round_e2m1(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).tolist() == [0, 1, 1, 2, 2, 4, 4]  # ties to even
    assert formats.fp8_scale(torch.tensor([448.0, 449, 1, 3.5, 0])).tolist() == [1, 2, 2.0**-8, 2.0**-7, 2.0**-22]
    assert formats.fp4_scale(torch.tensor([6.0, 6.1, 1, 0])).tolist() == [1, 2, 0.25, 2.0**-126]


def test_oracle_has_the_golden_numbers():
    """Numbers of the model specification, appendix A."""
    o = reference.Oracle(off=("attn.p",), config=None)
    o.config = {"hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "num_experts_per_tok": 6, "routed_scaling_factor": 1.5, "index_topk": 3}
    kv, gate = (torch.stack([fill(4, t + at) for t in range(10)]) for at in (1, 31))
    ape = torch.stack([fill(4, j + 61) for j in range(4)])
    assert near(o.pool_prefill(kv, gate, ape, 4), [[0.385868, 0.198053], [0.501045, 0.309519]])  # A1
    keys = torch.stack([fill(4, 10 + k) for k in range(5)])
    blocks = [torch.arange(3), torch.tensor([3, 4])]
    assert near(o.attend(fill(4, 2)[None], keys, blocks, torch.tensor([0.3]))[0], [-0.272135, -0.381985, -0.202756, 0.129914])  # A2
    iq, ik = torch.stack([fill(3, 70), fill(3, 71)]), torch.stack([fill(3, 80 + s) for s in range(3)])
    assert o.select(iq, fill(2, 90), ik, 3).tolist() == [1, 2, 0]  # A3
    assert o.select(iq, fill(2, 90), ik[[1, 1, 0, 1]], 4).tolist() == [0, 1, 3]  # equal scores: lower entry first
    rows = torch.tensor([[1.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 3, 1], [0.5, -1, 0, 4]])
    want = [[0.661039, 0.169846, 0.110271, 0.058854], [0.145858, 0.752727, 0.066139, 0.035300],
            [0.087233, 0.060926, 0.794472, 0.057387], [0.105869, 0.016501, 0.029118, 0.848458]]
    assert near(o.sinkhorn(rows[None])[0], want)  # A5
    w = formats.frequencies(64, 160000.0, (16, 65536, 32, 1))
    assert near(w[[1, 15, 16, 24, 31]], torch.tensor([0.687656, 3.635539e-3, 2.265625e-3, 1.953125e-5, 5.680529e-7]).double(), 1e-6)  # A6
    assert near(formats.sqrt_softplus(torch.tensor([-4.0, -1, 0, 1, 4])), [0.134722, 0.559698, 0.832555, 1.145976, 2.004532])  # A7
    o.t = {"weight": torch.diag(fill(6, 160)), "bias": torch.zeros(6)}
    chosen, weights = o.route("", torch.ones(1, 6), None, 0)
    assert near(torch.zeros(6).scatter(0, chosen[0], weights[0]), [0.353445, 0.297951, 0.217411, 0.175497, 0.192904, 0.262793])  # A9
    x = fill(128, 3)
    assert near(formats.hadamard(formats.hadamard(x)), x)
