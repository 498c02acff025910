"""Direct preference optimization: its loss and gradient against torch's automatic differentiation, and `plumb dpo` from outside:
what it learns, that a run that is killed ends with the same bits, epochs, errors."""

import json
import os
import pathlib
import subprocess
import time

import numpy as np
import pytest
import torch

from kills import kill_often

PLUMB = os.environ["PLUMB"]
ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = pathlib.Path(os.environ["PLUMB_BUILD"]) / "tests" / "rl_loss_tool"
CLOCK = ("time", "step_seconds", "tokens_per_second")


def oracle(pairs, beta, smoothing):
    """pairs [n, 4]: log-probabilities of chosen and rejected answer, of the policy and of the reference"""
    t = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 4)
    policy = t[:, :2].clone().requires_grad_()
    rewards = beta * (policy - t[:, 2:])
    margin = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - smoothing) * torch.nn.functional.logsigmoid(margin) - smoothing * torch.nn.functional.logsigmoid(-margin)
    losses.sum().backward()
    mean = lambda x: float(x.double().mean().detach()) if len(t) else 0.0
    figures = {"loss": mean(losses), "rewards/chosen": mean(rewards[:, 0]), "rewards/rejected": mean(rewards[:, 1]),
               "rewards/accuracies": mean(rewards[:, 0] > rewards[:, 1]), "rewards/margins": mean(margin),
               "logps/chosen": mean(policy[:, 0]), "logps/rejected": mean(policy[:, 1])}
    return losses.detach().numpy(), policy.grad.numpy(), figures


def test_loss_and_gradient():
    rng = np.random.default_rng(1)
    pairs = [(-50 + 10 * rng.normal(size=(n, 4))).tolist() for n in (0, 1, 2, 17)]
    pairs += [[[-1.0, -1.0, -1.0, -1.0]], [[-2e4, -3.0, -3.0, -2e4], [-3.0, -2e4, -2e4, -3.0]]]  # equal; far apart
    requests = [{"kind": "dpo", "pairs": p, "beta": beta, "label_smoothing": s}
                for p in pairs for beta in (0.1, 1.0, 5.0) for s in (0.0, 0.1, 0.49)]
    done = subprocess.run([TOOL], input="".join(json.dumps(r) + "\n" for r in requests), capture_output=True, text=True, check=True)
    for r, line in zip(requests, done.stdout.splitlines()):
        answer = json.loads(line)
        losses, gradient, figures = oracle(r["pairs"], r["beta"], r["label_smoothing"])
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-12, atol=1e-300)
        np.testing.assert_allclose(answer["d_chosen"], gradient[:, 0], rtol=1e-9, atol=1e-300)
        np.testing.assert_allclose(answer["d_rejected"], gradient[:, 1], rtol=1e-9, atol=1e-300)
        for name, value in figures.items():
            assert answer[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def command(out, **values):
    sets = [f"{key.replace('__', '.')}={value}" for key, value in ({"output__dir": out} | values).items()]
    return [PLUMB, "dpo", "examples/dpo/maybe.toml", "--json"] + [x for s in sets for x in ("--set", s)]


def run(out, **values):
    done = subprocess.run(command(out, **values), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in open(out / "metrics.jsonl")], json.loads(done.stdout.splitlines()[-1])


def answers(questions, *options):
    out = questions.with_suffix(".answers")
    done = subprocess.run([PLUMB, "sample", "--model", "assets/tiny", "--temperature", "1", "--max-tokens", "8", "--input", questions,
                           "--output", out, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["text"] for line in open(out)]


def test_what_is_preferred_is_learned(tmp_path):
    """Held-out pairs are told apart, and the answers that are sampled are those that were preferred."""
    lines, summary = run(tmp_path)
    first, last = lines[0], lines[-1]
    assert len(lines) == 12 and summary["steps"] == 12 and last["epoch"] == 2
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-9) and first["rewards/margins"] == 0  # the policy is the reference
    assert last["eval/rewards/accuracies"] == 1 and last["eval/rewards/margins"] > 0.15
    assert summary["eval_loss"] == last["eval/loss"] < 0.6
    assert all(line["physical_tokens"] < line["logical_tokens"] for line in lines)  # prompts are shared
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"messages": json.loads(line)["prompt"]}) + "\n"
                                 for line in open(ROOT / "examples/dpo/maybe_eval.jsonl")))
    before = answers(questions).count("maybe")
    assert answers(questions, "--adapter", summary["checkpoint"]).count("maybe") >= max(11, before + 4)


def test_killed_at_any_instant_it_ends_with_the_same_bits(tmp_path):
    values = {"train__save_every": 2, "train__eval_every": 3, "dpo__pairs_per_step": 7, "data__row_tokens": 64}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    lines, _ = run(whole, **values)
    took = time.monotonic() - began
    assert len(lines) == 14 and lines[-1]["pairs"] == 5 and lines[-1]["epoch"] == 2  # 96 pairs of both epochs, by sevens
    kill_often(command(killed, **values), ROOT, took, times=6, seed=2)
    again, _ = run(killed, **values)
    name = "checkpoints/step_000014/"
    for file in ("adapter_model.safetensors", "trainer_state.safetensors", "trainer_state.json"):
        assert (whole / name / file).read_bytes() == (killed / name / file).read_bytes()
    drop = lambda lines: [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]
    assert drop(lines) == drop(again)


def test_an_adapter_as_reference_and_a_held_out_part(tmp_path):
    _, summary = run(tmp_path / "first", train__epochs=1)
    values = {"lora__init": summary["checkpoint"], "dpo__reference_adapter": summary["checkpoint"], "train__steps": 2,
              "data__eval": "", "data__eval_fraction": 0.25}
    lines, _ = run(tmp_path / "second", **values)
    assert lines[0]["rewards/margins"] == 0 and lines[1]["rewards/margins"] != 0  # it begins as its reference
    assert 0 <= lines[1]["eval/rewards/accuracies"] <= 1
    values["dpo__reference_adapter"] = ""
    lines, _ = run(tmp_path / "third", **values)
    assert lines[0]["rewards/margins"] > 0  # what the first run has learned


def test_wrong_run_files(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    for values, expected in [({"dpo__beta": 0}, "dpo.beta"), ({"dpo__label_smoothing": 0.5}, "dpo.label_smoothing"),
                             ({"data__train": tmp_path / "bad.jsonl"}, "bad.jsonl:1: has no key rejected"),
                             ({"data__row_tokens": 16}, "none with two answers that count"),
                             ({"dpo__reference_adapter": tmp_path}, str(tmp_path)), ({"rl__loss": "ppo"}, "no key of plumb dpo")]:
        done = subprocess.run(command(tmp_path / "o", **values), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode in (1, 2) and expected in done.stderr, done.stderr
