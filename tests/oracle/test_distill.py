"""On-policy distillation from outside: a student reaches its teacher on held-out questions, without any reward too; a run that
is killed ends with the same adapter; teachers that do not fit are refused."""

import json
import os
import pathlib
import shutil
import subprocess
import time

import pytest

from kills import kill_often

PLUMB = os.environ["PLUMB"]
ROOT = pathlib.Path(__file__).resolve().parents[2]
CLOCK = ("time", "sample_seconds", "wait_seconds", "train_seconds", "sampled_tokens_per_second", "trained_tokens_per_second")


def sets(values):
    return [x for key, value in values.items() for x in ("--set", f"{key.replace('__', '.')}={value}")]


def plumb(*args):
    done = subprocess.run([PLUMB, *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The adapter of the demo, which says maybe."""
    out = tmp_path_factory.mktemp("teacher")
    plumb("rl", "examples/rl/demo.toml", *sets({"output__dir": out, "data__eval": ""}))
    return out / "checkpoints/step_000015"


def prompts_only(folder):
    """The example without its reward: a run of distillation alone."""
    file = folder / "run.toml"
    file.write_text((ROOT / "examples/rl/distill.toml").read_text().split("[[reward]]")[0].replace('loss = "none"\n', ""))
    return file


def command(file, teacher, out, **values):
    return ["rl", file, *sets({"distill__teacher_adapter": teacher, "output__dir": out} | values)]


def metrics(out):
    return [json.loads(line) for line in open(out / "metrics.jsonl")]


def test_a_student_reaches_its_teacher_on_held_out_questions(tmp_path, teacher):
    plumb(*command("examples/rl/distill.toml", teacher, tmp_path))
    lines = metrics(tmp_path)
    assert lines[0]["eval/reward"] <= 0.5 and lines[-1]["eval/reward"] >= 0.9  # maybe is one of three answers before
    assert lines[-1]["eval/teacher_kl"] < 0.1 * lines[0]["eval/teacher_kl"]
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == 10
    for line in steps:
        assert line["mismatch_tokens"] == 0 and line["loss"] == line["teacher_kl"] > 0
        assert "policy_loss" not in line and "groups_without_variance" not in line and "reward" in line


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_no_reward_is_needed(tmp_path, teacher, divergence):
    done = plumb(*command(prompts_only(tmp_path), teacher, tmp_path, train__steps=5, distill__divergence=divergence), "--json")
    lines = metrics(tmp_path)
    assert lines[-1]["eval/teacher_kl"] < 0.5 * lines[0]["eval/teacher_kl"]
    assert not any("reward" in key for line in lines for key in line)
    assert json.loads(done)["reward"] is None


def test_a_policy_loss_beside_it(tmp_path, teacher):
    values = {"train__steps": 3, "rl__loss": "cispo", "distill__coefficient": 0.25, "sampling__temperature": 1.2, "data__eval": ""}
    plumb(*command("examples/rl/distill.toml", teacher, tmp_path, **values))
    for line in metrics(tmp_path):
        assert line["loss"] == pytest.approx(line["policy_loss"] + 0.25 * line["teacher_kl"], rel=1e-9)
        assert line["policy_loss"] != 0 and line["mismatch_tokens"] == 0 and "groups_without_variance" in line
    samples = [json.loads(line) for line in open(tmp_path / "samples.jsonl")]
    assert all(s["trained"] for s in samples)  # the teacher looks at groups without variance too


def test_killed_at_any_instant_it_ends_with_the_same_bits(tmp_path, teacher):
    values = {"train__steps": 6, "train__save_every": 2, "train__eval_every": 3, "rl__steps_behind": 1}
    file, whole, killed = prompts_only(tmp_path), tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    plumb(*command(file, teacher, whole, **values))
    took = time.monotonic() - began
    kill_often([PLUMB, *map(str, command(file, teacher, killed, **values))], ROOT, took, times=6, seed=4)
    plumb(*command(file, teacher, killed, **values))
    name = "checkpoints/step_000006/trainer_state.safetensors"
    assert (whole / name).read_bytes() == (killed / name).read_bytes()
    drop = lambda lines: [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]
    assert drop(metrics(whole)) == drop(metrics(killed))


def test_a_model_as_the_teacher(tmp_path):
    """A copy of the model in another folder: a student that has not moved yet is equal to it."""
    shutil.copytree(ROOT / "assets/tiny", tmp_path / "copy")
    values = {"distill__teacher_model": tmp_path / "copy", "train__steps": 1, "train__warmup_steps": 0, "rl__groups_per_step": 2, "data__eval": ""}
    plumb(*command(prompts_only(tmp_path), "", tmp_path, **values))
    (line,) = metrics(tmp_path)
    assert line["teacher_kl"] == 0 and line["grad_norm"] == 0


def test_teachers_that_do_not_fit(tmp_path, teacher):
    other = tmp_path / "other"
    config = json.loads((ROOT / "assets/tiny/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    plumb("init", tmp_path / "config.json", other)
    renamed = tmp_path / "renamed"
    shutil.copytree(ROOT / "assets/tiny", renamed)
    vocabulary = json.loads((renamed / "tokenizer.json").read_text(encoding="utf-8"))
    ids = vocabulary["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (renamed / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    file = prompts_only(tmp_path)
    for values, expected in [({"distill.teacher_model": other}, f"has a vocabulary of {config['vocab_size'] + 64} tokens"),
                             ({"distill.teacher_model": renamed}, 'is "b", the student\'s is "a"'),
                             ({"distill.teacher_adapter": tmp_path}, str(tmp_path)),
                             ({"distill.coefficient": 0}, "has no reward"),
                             ({"rl.kl_penalty_coef": 1}, "there is no reward")]:
        args = ["rl", file, *sets({"output.dir": tmp_path / "o"} | values)]
        if "distill.coefficient" in values:
            args += sets({"distill.teacher_adapter": ""})
        done = subprocess.run([PLUMB, *map(str, args)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and expected in done.stderr, done.stderr
