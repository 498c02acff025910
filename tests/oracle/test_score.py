"""plumb score, sample, inspect, convert and init as a user meets them: results, bad input, bits.

Log-probabilities are compared with ==: the program prints an fp32 value with the digits that give it back."""
import json
import os
import shutil
import struct
import subprocess

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from released import make

VOCAB = 256


def run(*arguments, code=0, **keywords):
    done = subprocess.run([os.environ["PLUMB"], *map(str, arguments)], capture_output=True, text=True, timeout=60, **keywords)
    assert done.returncode == code, done.stderr
    return done


def write_lines(path, lines):
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def read_lines(path):
    return [json.loads(x) for x in path.read_text().splitlines()]


def score(model, where, lines, *options):
    """-> the lines of the output"""
    run("score", "--model", model, "--input", write_lines(where / "in.jsonl", lines), "--output", where / "out.jsonl", *options)
    return read_lines(where / "out.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make.build(folder, "ratios", seed=5)
    return folder


@pytest.fixture
def copy(model, tmp_path):
    """A copy of the model to damage."""
    return shutil.copytree(model, tmp_path / "copy")


def documents(seed, lengths):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in lengths]


# ---- Results -----------------------------------------------------------------------------------------------------------------


def test_shape_of_the_result(model, tmp_path):
    lines = [{"tokens": d} for d in documents(1, [5, 1, 40])]
    out = score(model, tmp_path, lines, "--routed-experts", "--dump-logits", tmp_path / "logits.safetensors")
    logits = load_file(tmp_path / "logits.safetensors")
    assert len(out) == 3
    for i, (line, got) in enumerate(zip(lines, out)):
        ids = line["tokens"]
        assert got["tokens"] == ids and got["logprobs"][0] is None and len(got["logprobs"]) == len(ids)
        want = logits[f"logits.{i}"].double().log_softmax(-1)
        for t in range(1, len(ids)):
            assert numpy.float32(got["logprobs"][t]) == got["logprobs"][t]  # an fp32 value, all its digits
            assert abs(got["logprobs"][t] - want[t - 1, ids[t]]) < 2e-6  # fp32 against fp64 of values up to 15
        experts = torch.tensor(got["routed_experts"])
        assert experts.shape == (len(ids), 6, 4) and experts.min() >= 0 and experts.max() < 16
        assert all(len(set(row)) == 4 for token in got["routed_experts"] for row in token)
    table = load_file(model / "model.safetensors")["layers.1.ffn.gate.tid2eid"]
    assert [token[1] for token in out[0]["routed_experts"]] == table[torch.tensor(lines[0]["tokens"])].tolist()


@pytest.mark.parametrize("numerics", ["fp32", "bf16", "released"])
def test_same_bits_alone_packed_and_on_any_threads(model, tmp_path, numerics):
    lines = [{"tokens": d} for d in documents(2, [37, 1, 130, 3, 16, 64, 2, 129])]
    first = score(model, tmp_path, lines, "--numerics", numerics, "--threads", 1)
    for options in (["--row-tokens", 1], ["--row-tokens", 100, "--threads", 2], ["--row-tokens", 10000, "--threads", 3]):
        assert score(model, tmp_path, lines, "--numerics", numerics, *options) == first
    for line, got in zip(lines, first):  # recomputed, each in a process of its own
        if len(line["tokens"]) in (1, 37, 130):
            assert score(model, tmp_path, [line], "--numerics", numerics) == [got]
    again = score(model, tmp_path, lines[::-1], "--numerics", numerics)  # other neighbours
    assert again[::-1] == first


def test_prefix_has_the_same_bits(model, tmp_path):
    """Causality through the program: what comes later changes nothing."""
    ids = documents(3, [140])[0]
    cuts = (3, 4, 5, 16, 17, 127, 128, 129)
    whole, *parts = score(model, tmp_path, [{"tokens": ids}] + [{"tokens": ids[:n]} for n in cuts])
    for n, part in zip(cuts, parts):
        assert part["logprobs"] == whole["logprobs"][:n]


def test_profiles_differ(model, tmp_path):
    """Three arithmetics of one model: near each other, never equal."""
    lines = [{"tokens": documents(4, [20])[0]}]
    a, b, c = (score(model, tmp_path, lines, "--numerics", n)[0]["logprobs"][1:] for n in ("fp32", "bf16", "released"))
    assert score(model, tmp_path, lines)[0]["logprobs"][1:] == c  # the default
    for x, y in ((a, b), (b, c), (a, c)):
        difference = (torch.tensor(x) - torch.tensor(y)).abs()
        assert 1e-3 < difference.mean() < 1  # 0.45 nats is what all roundings together are worth in this model


@pytest.fixture(scope="module")
def with_tokenizer(model, tmp_path_factory):
    """The model with a tokenizer of single bytes."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("text") / "model")
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(vocabulary, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.save(str(folder / "tokenizer.json"))
    return folder, t


def test_text(with_tokenizer, tmp_path):
    folder, tokenizer = with_tokenizer
    text = "The quick brown fox, 12.5!"
    ids = [0] + tokenizer.encode(text).ids  # begin of sentence, as in training
    by_text, by_ids = score(folder, tmp_path, [{"text": text}, {"tokens": ids}])
    assert by_text["tokens"] == ids and by_text == by_ids


# ---- Sampling ----------------------------------------------------------------------------------------------------------------


def sample(folder, where, prompts, *options):
    run("sample", "--model", folder, "--input", write_lines(where / "prompts.jsonl", [{"tokens": p} for p in prompts]),
        "--output", where / "answers.jsonl", *options)
    return read_lines(where / "answers.jsonl")


@pytest.mark.parametrize("numerics", ["released", "fp32"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_sampled_logprobs_are_those_of_score(model, tmp_path, numerics, temperature):
    prompts = documents(6, [1, 3, 4, 127, 20, 300])  # 300: longer than a chunk of the prefill
    options = ["--numerics", numerics, "--temperature", temperature, "--max-tokens", 12, "--seed", 7]
    first = sample(model, tmp_path, prompts, *options, "--batch", 1)
    scored = score(model, tmp_path, [{"tokens": p + a["tokens"]} for p, a in zip(prompts, first)], "--numerics", numerics)
    for prompt, answer, line in zip(prompts, first, scored):
        assert len(answer["tokens"]) == 12 or answer["tokens"][-1] == 1
        assert answer["logprobs"] == line["logprobs"][len(prompt):]  # bit for bit
    for batch in (2, 3, 4, 5):
        assert sample(model, tmp_path, prompts, *options, "--batch", batch, "--threads", 1 + batch % 2) == first
    if temperature:
        assert sample(model, tmp_path, prompts, *options[:-1], 8) != first  # another seed


def test_greedy_takes_the_largest_logit(model, tmp_path):
    prompt = documents(7, [9])[0]
    (answer,) = sample(model, tmp_path, [prompt], "--temperature", 0, "--max-tokens", 6)
    ids = prompt + answer["tokens"]
    score(model, tmp_path, [{"tokens": ids}], "--dump-logits", tmp_path / "logits.safetensors")
    logits = load_file(tmp_path / "logits.safetensors")["logits.0"]
    for t in range(len(prompt), len(ids)):
        assert ids[t] == logits[t - 1].argmax()


def test_stop_token_ends_an_answer(copy, tmp_path):
    prompt = documents(8, [6])[0]
    (free,) = sample(copy, tmp_path, [prompt], "--temperature", 0, "--max-tokens", 8)
    assert free["finish_reason"] == "length" and len(free["tokens"]) == 8
    config = json.loads((copy / "config.json").read_text())
    config["eos_token_id"] = free["tokens"][3]  # the model says when to stop
    (copy / "config.json").write_text(json.dumps(config))
    (stopped,) = sample(copy, tmp_path, [prompt], "--temperature", 0, "--max-tokens", 8)
    end = free["tokens"].index(free["tokens"][3]) + 1
    assert stopped["finish_reason"] == "stop" and stopped["tokens"] == free["tokens"][:end]
    assert stopped["logprobs"] == free["logprobs"][:end]


def test_sample_on_the_terminal(with_tokenizer):
    folder, _ = with_tokenizer
    arguments = ["sample", "--model", folder, "--prompt", "Hello", "--max-tokens", 5, "--seed", 3]
    first, again = run(*arguments), run(*arguments)
    assert first.stdout and first.stdout == again.stdout
    j = json.loads(run(*arguments, "--json").stdout)
    assert j["text"] + "\n" == first.stdout and len(j["logprobs"]) == len(j["tokens"])


# ---- Bad input ---------------------------------------------------------------------------------------------------------------


def refused(where, arguments, *parts, code=1):
    """The program says what is wrong in one line, exits with `code` and leaves no file behind."""
    before = sorted(where.rglob("*"))
    done = run(*arguments, code=code)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("plumb: ")
    for part in parts:
        assert part in done.stderr
    assert sorted(where.rglob("*")) == before


LINES = {  # a bad line -> what the error must contain
    "nonsense": ["not valid JSON"],
    '{"tokens": [1]} x': ["not valid JSON"],
    '[1, 2]': ["not an object"],
    '{}': ["nothing to score", "tokens"],
    '{"tokens": []}': ["no token"],
    '{"tokens": "a"}': ["not a list"],
    '{"tokens": [1, 256]}': ["256", "0 to 255"],
    '{"tokens": [-1]}': ["-1", "0 to 255"],
    '{"tokens": [1.5]}': ["1.5", "whole numbers"],
    '{"tokens": [99999999999999999999]}': ["99999999999999999999"],
    '{"tokens": [true]}': ["true"],
    '{"tokens": [null]}': ["null"],
    '{"tokes": [1]}': ["tokes", "nearest known key is tokens"],
    '{"tokens": [1], "colour": 2}': ["unknown key colour"],
    '{"tokens": [1], "text": "a"}': ["more than one of the keys"],
}


@pytest.mark.parametrize("line", LINES)
def test_bad_lines(model, tmp_path, line):
    (tmp_path / "in.jsonl").write_text('{"tokens": [3]}\n\n' + line + "\n")
    refused(tmp_path, ["score", "--model", model, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"],
            f"{tmp_path}/in.jsonl:3: ", *LINES[line])


def test_text_without_a_tokenizer(model, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    refused(tmp_path, ["score", "--model", model, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"],
            f"{model}/tokenizer.json", "token ids instead")


def test_bad_files(model, tmp_path):
    good, out = write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2]}]), tmp_path / "out.jsonl"
    (tmp_path / "empty").write_text("\n \n")
    os.symlink("/dev/full", tmp_path / "full")  # a link, so that a program that replaces its output does no harm
    score = lambda model, source, to, *more: ["score", "--model", model, "--input", source, "--output", to, *more]
    refused(tmp_path, score(model, tmp_path / "empty", out), f"{tmp_path}/empty", "no line")
    refused(tmp_path, score(model, tmp_path / "absent", out), f"{tmp_path}/absent", "No such file")
    refused(tmp_path, score(model, tmp_path, out), str(tmp_path), "directory")
    refused(tmp_path, score(tmp_path / "absent", good, out), f"{tmp_path}/absent", "checkpoint")
    refused(tmp_path, score(model, good, tmp_path / "no" / "out"), f"{tmp_path}/no/out", "No such file")
    refused(tmp_path, score(model, good, tmp_path / "full"), f"{tmp_path}/full", "disk is full")
    refused(tmp_path, score(model, good, out, "--dump-logits", tmp_path / "full"), f"{tmp_path}/full", "disk is full")
    refused(tmp_path, score(model, good, tmp_path), str(tmp_path), "is a folder")
    refused(tmp_path, score(model, good, out, "--adapter", tmp_path / "absent"), f"{tmp_path}/absent", "No such file")
    assert (tmp_path / "full").is_char_device()


def test_output_may_be_a_pipe(model, tmp_path):
    lines = write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2, 3]}])
    piped = run("score", "--model", model, "--input", lines, "--output", "/dev/fd/1").stdout
    assert json.loads(piped) == score(model, tmp_path, [{"tokens": [1, 2, 3]}])[0]


def test_an_old_result_stays_when_a_run_fails(model, tmp_path):
    (tmp_path / "out.jsonl").write_text("old")
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1]}, {"tokens": [300]}])
    run("score", "--model", model, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", code=1)
    assert (tmp_path / "out.jsonl").read_text() == "old"


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)


def nan_scale(t):
    t["layers.2.attn.wkv.scale"].view(torch.uint8)[0, 0] = 255


MODELS = {  # damage -> what the error must contain
    "wrong shape": (lambda t: t.update({"layers.1.attn.q_norm.weight": torch.zeros(5, dtype=torch.bfloat16)}),
                    ["layers.1.attn.q_norm.weight", "[128] expected", "[5] found"]),
    "unknown tensor": (lambda t: t.update({"layers.1.attn.wq_c.weight": torch.zeros(5)}), ["layers.1.attn.wq_c.weight", "nearest"]),
    "unknown bias": (lambda t: t.update({"layers.2.ffn.gate.e_bias": torch.zeros(16)}), ["layers.2.ffn.gate.e_bias"]),
    "bias on a hash layer": (lambda t: t.update({"layers.0.ffn.gate.bias": torch.zeros(16)}), ["layers.0.ffn.gate.bias"]),
    "no hash table": (lambda t: t.pop("layers.0.ffn.gate.tid2eid"), ["layers.0.ffn.gate.tid2eid", "missing"]),
    "quantised router": (lambda t: t.update({"layers.2.ffn.gate.weight": torch.zeros(16, 128).to(torch.float8_e4m3fn)}),
                         ["layers.2.ffn.gate.weight", "F8_E4M3 found"]),
    "missing scale": (lambda t: t.pop("layers.3.ffn.experts.2.w1.scale"), ["layers.3.ffn.experts.2.w1", "scale", "missing"]),
    "missing tensor": (lambda t: t.pop("norm.weight"), ["norm.weight", "missing"]),
    "NaN scale": (nan_scale, ["layers.2.attn.wkv.scale", "[0,0]", "NaN"]),
}


@pytest.mark.parametrize("damage", MODELS)
def test_damaged_tensors(copy, tmp_path, damage):
    change_tensors(copy, MODELS[damage][0])
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2]}])
    refused(tmp_path, ["score", "--model", copy, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"],
            str(copy), *MODELS[damage][1])


def test_damaged_files(copy, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2]}])
    arguments = ["score", "--model", copy, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    config, weights = (copy / "config.json").read_text(), (copy / "model.safetensors").read_bytes()

    def with_config(**changes):
        (copy / "config.json").write_text(json.dumps({**json.loads(config), **changes}))

    with_config(compress_ratios=[0, 4, 128, 4])
    refused(tmp_path, arguments, "config.json", "compress_ratios", "4")
    with_config(compress_ratios=[0, 4, 128, 5, 128, 0, 0])
    refused(tmp_path, arguments, "config.json", "compress_ratios", "5")
    (copy / "config.json").write_text(config[: len(config) // 2])
    refused(tmp_path, arguments, "config.json", "JSON")
    (copy / "config.json").write_text(config)
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(tmp_path, arguments, "model.safetensors")
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + weights[8:])
    refused(tmp_path, arguments, "model.safetensors")
    (copy / "model.safetensors").unlink()
    refused(tmp_path, arguments, str(copy))


def test_missing_shard(tmp_path):
    make.build(tmp_path / "model", "ratios", shards=3)
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2]}])
    refused(tmp_path, ["score", "--model", tmp_path / "model", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"],
            "model-00002-of-00003.safetensors")


def test_sample_refuses_bad_options(model, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1]}])
    arguments = ["sample", "--model", model, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    for option, value in (("--temperature", -1), ("--top-p", 0), ("--top-k", -1), ("--min-p", 2), ("--max-tokens", 0)):
        refused(tmp_path, [*arguments, option, value], option.removeprefix("--").replace("-", "_"), "allowed", code=2)
    refused(tmp_path, [*arguments, "--max-tokens", 5000], "5001", "4096")  # more positions than the model has
    (tmp_path / "in.jsonl").write_text('{"tokens": [1]}\n{"promt": "a"}\n')
    refused(tmp_path, arguments, "in.jsonl:2", "promt", "nearest known key is prompt")


@pytest.mark.parametrize("arguments", [[], ["scor"], ["score"], ["score", "--frob"], ["score", "--numerics", "fp64"],
                                       ["sample", "--batch", "0"], ["convert", "a"]], ids=str)
def test_wrong_usage(arguments):
    assert run(*arguments, code=2).stderr


# ---- Files in and out --------------------------------------------------------------------------------------------------------


def test_help_of_every_command():
    commands = [line.split()[0] for line in run("--help").stdout.split("Subcommands:")[1].splitlines() if line.strip()]
    assert {"score", "sample", "chat", "init", "convert", "inspect", "train", "pretrain"} <= set(commands)
    for command in commands:
        assert "Usage: plumb " + command in run(command, "--help").stdout


def test_init_inspect_and_convert(tmp_path):
    run("init", "tiny", tmp_path / "tiny", "--seed", 3)
    assert "no problems" in run("inspect", tmp_path / "tiny", "--deep").stdout
    summary = json.loads(run("inspect", tmp_path / "tiny", "--json").stdout)
    assert summary
    vocabulary = json.loads((tmp_path / "tiny" / "config.json").read_text())["vocab_size"]
    lines = [{"tokens": [i * 7 % vocabulary for i in range(30)]}]
    first = score(tmp_path / "tiny", tmp_path, lines)
    for layout in ("hf", "released"):
        run("convert", tmp_path / "tiny", tmp_path / layout, "--layout", layout)
        assert score(tmp_path / layout, tmp_path, lines) == first
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("tiny", "released"))
    assert a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)
