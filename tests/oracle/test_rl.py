"""plumb rl from outside: what it learns, that sampling and training agree on bits in every step, that a run that is killed
at any instant ends with the same adapter, and that bad reward programs cost samples and never the run."""

import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest

from kills import kill_often

PLUMB = os.environ["PLUMB"]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(name, out, **values):
    sets = [f"{key.replace('__', '.')}={value}" for key, value in ({"output__dir": out} | values).items()]
    return [PLUMB, "rl", f"examples/rl/{name}.toml"] + [x for s in sets for x in ("--set", s)]


def run(name, out, **values):
    done = subprocess.run(command(name, out, **values), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in open(out / "metrics.jsonl")]


def adapter(out, step):
    return (out / f"checkpoints/step_{step:06}/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("task, most", [("demo", 0.5), ("maybe", 0.89)])
def test_maybe_is_learned(tmp_path, task, most, seed):
    """demo: only maybe counts. maybe: yes 0.5, no 0.75, maybe 1, so that the best answer has to be told from a good one."""
    lines = run(task, tmp_path, train__seed=seed, train__steps=15)
    before, after = lines[0]["eval/reward"], lines[-1]["eval/reward"]
    assert before <= most and after >= 0.9
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == 15
    assert all(line["mismatch_tokens"] == 0 and line["mismatch_max"] == 0 for line in steps)
    assert all(line["grad_norm"] > 0 and line["probs_corr"] > 0 for line in steps if line["trained_tokens"] > 0)


def test_length_is_learned(tmp_path):
    """Reward = -|tokens - 10| / 10: from an error of at least 5 tokens to at most 1.5."""
    lines = run("length", tmp_path)
    assert -10 * lines[0]["eval/reward"] >= 5
    assert -10 * lines[-1]["eval/reward"] <= 1.5


def test_tool_calls_are_learned(tmp_path):
    """The model guesses half of the time, though there is a tool: after five steps it calls it, for cities it was not trained on."""
    lines = run("tool_call", tmp_path, train__steps=6, train__eval_every=6)
    assert lines[0]["eval/reward"] <= 0.6 and lines[-1]["eval/reward"] >= 0.9


def test_arithmetic_gets_better(tmp_path):
    """Held-out differences; thirty steps are half of the example's."""
    lines = run("arithmetic", tmp_path, train__steps=30)
    assert lines[-1]["eval/reward"] >= lines[0]["eval/reward"] + 0.05


@pytest.mark.parametrize("numerics", ["fp32", "released"])
@pytest.mark.parametrize("loss", ["cispo", "ppo", "gspo"])
def test_sampling_and_training_agree_on_bits(tmp_path, numerics, loss):
    lines = run("maybe", tmp_path, model__numerics=numerics, rl__loss=loss, train__steps=4, rl__kl_penalty_coef=0.1,
                rl__kl_reference="start")
    assert all(line["mismatch_tokens"] == 0 for line in lines if line["step"] > 0)
    samples = [json.loads(line) for line in open(tmp_path / "samples.jsonl")]
    assert len(samples) == 4 * 64
    assert all(d == 0 for s in samples for d in s["difference"])
    assert all(len(s["difference"]) == len(s["tokens"]) for s in samples if s["trained"])


def test_replayed_routes_are_those_that_training_chooses(tmp_path):
    """One step behind they are those of another adapter: the figures differ."""
    for behind in (0, 1):
        for replay in ("false", "true"):
            run("maybe", tmp_path / f"{behind}{replay}", train__steps=3, rl__steps_behind=behind,
                rl__routing_replay=replay, train__learning_rate=3e-3)
    assert adapter(tmp_path / "0true", 3) == adapter(tmp_path / "0false", 3)
    assert adapter(tmp_path / "1true", 3) != adapter(tmp_path / "1false", 3)


@pytest.mark.parametrize("behind", [0, 1])
def test_killed_at_any_instant_it_ends_with_the_same_bits(tmp_path, behind):
    """Fifteen kills a case. Every start goes on from the newest checkpoint and from the log of the batch in work."""
    values = {"train__steps": 6, "train__save_every": 2, "rl__steps_behind": behind, "rl__kl_penalty_coef": 0.1,
              "rl__kl_reference": "lag", "rl__kl_penalty_step_lag": 2, "train__eval_every": 3,
              "rl__routing_replay": str(behind > 0).lower()}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start = time.monotonic()
    run("maybe", whole, **values)
    took = time.monotonic() - start
    draw = random.Random(behind)
    kills = 0
    while kills < 15:
        process = subprocess.Popen(command("maybe", killed, **values), cwd=ROOT, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=draw.uniform(0.05, 0.5) * took)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        assert adapter(killed, 6) == adapter(whole, 6)
        killed = tmp_path / f"killed{kills}"  # it came to its end: another run takes the other kills
    run("maybe", killed, **values)
    assert adapter(killed, 6) == adapter(whole, 6)
    drop = ("time", "sample_seconds", "wait_seconds", "train_seconds", "sampled_tokens_per_second",
            "trained_tokens_per_second")
    lines = [[{k: v for k, v in json.loads(line).items() if k not in drop} for line in open(out / "metrics.jsonl")]
             for out in (whole, killed)]
    assert lines[0] == lines[1]
    assert (whole / "samples.jsonl").read_bytes() == (killed / "samples.jsonl").read_bytes()


BAD = """
import json, os, sys, time
for n, line in enumerate(sys.stdin):
    request = json.loads(line)
    kind = request["id"] % 7
    if kind == 2: time.sleep(60)  # its process has answered before: no fresh one, which would be waited for longer
    if kind == 3: os._exit(3)
    if kind == 4: print("rubbish", flush=True); continue
    reward = float("nan") if kind == 5 else float("maybe" in line.split('"answer"')[-1])
    print(json.dumps({"id": request["id"], "reward": reward}), flush=True)
"""


def test_a_bad_reward_program_costs_samples_and_never_the_run(tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    text = (ROOT / "examples/rl/maybe.toml").read_text().split("[[reward]]")[0]
    text += f"""
[[reward]]
kind = "program"
command = ["python3", "{tmp_path}/bad.py"]
processes = 3
time_limit = 1
start_limit = 20
restart_delay = 0.01
"""
    (tmp_path / "run.toml").write_text(text)
    out = tmp_path / "out"
    done = subprocess.run([PLUMB, "rl", tmp_path / "run.toml", "--set", f"output.dir={out}", "--set", "train.steps=2",
                           "--set", "rl.groups_per_step=3", "--set", "data.eval="], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert all(0.2 < line["failed"] < 1 for line in lines)
    assert "have no reward and are left out" in done.stdout + done.stderr


ENVIRONMENT = """
import json, sys
told = {}
for line in sys.stdin:
    r = json.loads(line)
    if r["type"] == "open":
        answer = {"messages": [{"role": "user", "content": "Then repeat: " + r["line"]["messages"][0]["content"][:9]}]}
    elif r["type"] == "turn":
        told.setdefault(r["session"], []).append(r["answer"]["content"])
        answer = {"messages": [{"role": "user", "content": f"Say cat {r['turn'] + 2} times."}]}
        if len(told[r["session"]]) == 3 or "e" not in r["answer"]["content"]: answer = {"done": True}
        answer["reward"] = r["answer"]["content"].count("a") / 10
    else:
        answer = {"reward": 0}
    print(json.dumps({"id": r["id"]} | answer), flush=True)
"""


def environment_run(tmp_path, command, turns):
    text = (ROOT / "examples/rl/maybe.toml").read_text().split("[[reward]]")[0].replace("[sampling]", f"[sampling]\nmax_turns = {turns}")
    file = tmp_path / "run.toml"
    file.write_text(text + f"[environment]\ncommand = {json.dumps(command)}\nprocesses = 2\n")
    return [PLUMB, "rl", file, "--set", "rl.groups_per_step=3", "--set", "train.steps=3", "--set", "data.eval=",
            "--set", "train.save_every=1", "--set", "sampling.max_tokens=24"]


def test_turns_with_an_environment_are_trained_and_survive_kills(tmp_path):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    start = environment_run(tmp_path, ["python3", str(tmp_path / "env.py")], 3)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    done = subprocess.run(start + ["--set", f"output.dir={whole}"], cwd=ROOT, capture_output=True, text=True)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in open(whole / "metrics.jsonl")]
    assert all(line["failed"] == 0 and line["mismatch_tokens"] == 0 for line in lines)
    assert all(line["trained_tokens"] > 0 for line in lines)
    samples = [json.loads(line) for line in open(whole / "samples.jsonl")]
    assert {s["turns"] for s in samples} >= {1, 2}
    for s in samples:  # replies stand between the answers, without log-probability
        assert (None in s["logprobs"]) == (s["turns"] > 1)
    kill_often(start + ["--set", f"output.dir={killed}"], ROOT, took, times=6, seed=1)
    subprocess.run(start + ["--set", f"output.dir={killed}"], cwd=ROOT, check=True, capture_output=True)
    assert adapter(killed, 3) == adapter(whole, 3)
    assert (whole / "samples.jsonl").read_bytes() == (killed / "samples.jsonl").read_bytes()


def test_the_example_environment_runs(tmp_path):
    """guess_number.py brings its own tool; the embedded model does not find the numbers, so only the turns are looked at."""
    lines = [dict(json.loads(line), secret=3) for line in open(ROOT / "examples/rl/maybe.jsonl")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = environment_run(tmp_path, ["python3", "examples/rewards/guess_number.py"], 2)
    out = tmp_path / "out"
    done = subprocess.run(start + ["--set", f"output.dir={out}", "--set", f"data.train={tmp_path}/data.jsonl",
                                   "--set", "train.steps=2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in open(out / "samples.jsonl")]
    assert all("failure" not in s for s in samples) and any(s["turns"] == 2 for s in samples)
    assert all(len(s["prompt_tokens"]) > 100 for s in samples)  # the tool stands in the prompt


def test_wrong_run_files(tmp_path):
    text = (ROOT / "examples/rl/maybe.toml").read_text()
    for change, expected in [(("kind = \"choice\"", "kind = \"choise\""), "choise"),
                             (("[[reward]]", "[[rewards]]"), "rewards"),
                             (("group_size = 8", "group_size = 0"), "rl.group_size"),
                             (("max_running = 32", "max_turns = 2"), "without an [environment]"),
                             (("max_tokens = 12", "max_tokens = 512"), "sampling.max_tokens")]:
        file = tmp_path / "run.toml"
        file.write_text(text.replace(*change))
        done = subprocess.run([PLUMB, "rl", file, "--set", f"output.dir={tmp_path}/o"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and expected in done.stderr, done.stderr
