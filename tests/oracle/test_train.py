"""plumb train and plumb pretrain from outside: kill -9 at any time and resume, TensorBoard files, adapters that peft's
format rules hold for, errors. The runs use a small random model that `plumb init` makes."""

import glob
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from safetensors import safe_open

PLUMB = os.environ["PLUMB"]
CLOCK = ("time", "step_seconds", "tokens_per_second")

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "tie_word_embeddings": False,
}


def plumb(*args, check=True):
    done = subprocess.run([PLUMB, *map(str, args)], capture_output=True, text=True)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    plumb("init", folder / "config.json", folder / "model", "--seed", 1)
    return folder / "model"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = []
    for i in range(24):  # counting up, by steps that differ: something to learn
        n = 10 + 7 * i % 50
        tokens = [2 + (i + (1 + i % 3) * k) % 90 for k in range(n)]
        lines.append(json.dumps({"tokens": tokens, "mask": [0] * 4 + [1] * (n - 4)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def run_file(folder, model, data, **changes):
    values = {
        "model.path": str(model),
        "model.numerics": "released",
        "data.train": str(data),
        "data.eval_fraction": 0.2,
        "data.row_tokens": 128,
        "train.steps": 12,
        "train.rows_per_step": 2,
        "train.learning_rate": 5e-3,
        "train.save_every": 3,
        "train.eval_every": 6,
        "train.keep_checkpoints": 100,
        "output.dir": str(folder / "run"),
        **changes,
    }
    tables = {}
    for key, value in values.items():
        table, name = key.split(".")
        tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    path = folder / "run.toml"
    path.write_text("\n".join(f"[{t}]\n" + "\n".join(lines) for t, lines in tables.items()) + "\n")
    return path


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def newest(run):
    return max(glob.glob(str(run / "checkpoints" / "step_*[0-9]")))


def same_final_state(a, b):
    files = sorted(p.name for p in pathlib.Path(newest(a)).iterdir())
    assert files == sorted(p.name for p in pathlib.Path(newest(b)).iterdir())
    for name in files:
        one, two = (pathlib.Path(newest(r)) / name for r in (a, b))
        assert one.read_bytes() == two.read_bytes(), name


@pytest.fixture(scope="module", params=["train", "pretrain"])
def whole(request, tmp_path_factory, model, data):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp(request.param)
    done = plumb(request.param, run_file(folder, model, data), "--json")
    return request.param, folder / "run", json.loads(done.stdout), done.stderr


def test_loss_falls(whole):
    command, run, summary, _ = whole
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert summary["steps"] == 12 and not summary["stopped"]
    assert summary["loss"] == lines[-1]["loss"] and summary["eval_loss"] == lines[-1]["eval/loss"]
    assert "eval/loss" in lines[5] and "eval/loss" not in lines[6]


def test_kill_and_resume_gives_the_same_bits(whole, tmp_path, model, data):
    command, run, _, _ = whole
    file = run_file(tmp_path, model, data)
    wanted = 2
    for _ in range(4):  # killed whenever so many lines of metrics are there
        process = subprocess.Popen([PLUMB, command, str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        log = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= wanted):
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        process.wait()
        wanted += 3
    plumb(command, file)
    assert metrics(tmp_path / "run") == metrics(run)
    same_final_state(tmp_path / "run", run)


def test_interrupt_saves_and_exits_cleanly(whole, tmp_path, model, data):
    command, run, _, _ = whole
    file = run_file(tmp_path, model, data, **{"train.save_every": 0})
    process = subprocess.Popen([PLUMB, command, str(file), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and "\n" in log.read_text()):
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["stopped"] and 1 <= summary["steps"] < 12
    assert summary["checkpoint"].endswith(f"step_{summary['steps']:06}")
    plumb(command, file)
    assert metrics(tmp_path / "run") == metrics(run)
    same_final_state(tmp_path / "run", run)


def test_tensorboard_shows_the_metrics(whole):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    command, run, _, _ = whole
    events = event_accumulator.EventAccumulator(str(run / "tb"))
    events.Reload()
    lines = metrics(run)
    for name in ("loss", "grad_norm", "learning_rate", "eval/loss"):
        seen = [(e.step, e.value) for e in events.Scalars(name)]
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert [s for s, _ in seen] == [s for s, _ in expected]
        assert [v for _, v in seen] == pytest.approx([v for _, v in expected], rel=1e-6)  # FP32 in event files


def test_checkpoint_is_read_by_others(whole):
    command, run, _, _ = whole
    folder = pathlib.Path(newest(run))
    assert plumb("inspect", folder).returncode == 0
    if command == "train":
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] == "LORA" and config["r"] == 8 and config["lora_alpha"] == 32
        with safe_open(folder / "adapter_model.safetensors", "np") as f:
            assert f.get_tensor("base_model.model.model.layers.0.self_attn.q_a_proj.lora_A.weight").shape == (8, 64)
    else:
        with safe_open(folder / "model.safetensors", "pt") as f:
            assert list(f.get_slice("layers.0.attn.wq_a.weight").get_shape()) == [32, 64]
            assert f.get_slice("layers.0.attn.wq_a.weight").get_dtype() == "F8_E4M3"  # stays in its format


def test_plan_is_printed(whole):
    command, run, _, err = whole
    for text in ("model ", "data ", "evaluation ", "trained ", "rows ", "steps ", "optimizer ", "learning rate "):
        assert any(line.startswith(text) for line in err.splitlines()), text
    assert "saved" in (run / "log.txt").read_text()


def test_training_goes_on_from_an_adapter(model, data, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    plumb("train", run_file(first, model, data))
    plumb("train", run_file(second, model, data, **{"lora.init": newest(first / "run"), "train.steps": 1}))
    assert metrics(second / "run")[0]["loss"] < 0.9 * metrics(first / "run")[0]["loss"]


def test_errors(model, data, tmp_path):
    def error(code, *args):
        done = plumb("train", *args, check=False)
        assert done.returncode == code, done.stderr
        return done.stderr

    bad = tmp_path / "bad.jsonl"
    file = run_file(tmp_path, model, bad)
    bad.write_text('{"tokens": [1, 2]}\n{"tokens": [1, 2\n')
    assert f"{bad}:2" in error(1, file)
    bad.write_text("")
    assert f"{bad}: is empty" in error(1, file)
    bad.write_text('{"tokens": [1, 96]}\n')
    assert "token 96 is not in the vocabulary" in error(1, file)
    bad.write_text('{"text": "abc"}\n')
    assert "tokenizer.json" in error(1, file)
    assert "train.learning_rate" in error(2, file, "--set", "train.learning_rat=1")
    file.write_text(file.read_text().replace("learning_rate", "learning_rat"))
    assert f"{file}:" in error(1, file)
    assert error(1, tmp_path / "none.toml")
    assert error(2) and error(2, file, "--nonsense")


def test_help_lists_the_keys():
    text = plumb("train", "--help").stdout
    for key in ("train.learning_rate", "lora.rank", "data.row_tokens", "output.resume"):
        assert key in text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
