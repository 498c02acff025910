"""Run directories as plumb writes them, for the tests of what shows them."""
import json
import pathlib

ROOT = pathlib.Path(__file__).parent.parent.parent


def config(command, steps):
    table = {"rl": "[rl]\ngroup_size = 2\n", "pretrain": "[pretrain]\nmuon_momentum = 0.95\n", "train": ""}[command]
    return f'[model]\npath = "{ROOT}/assets/tiny"\n\n[train]\nsteps = {steps}\n\n{table}\n[output]\ndir = "x"\n'


def metrics(step, **more):
    return {"step": step, "time": 1_800_000_000 + 2.0 * step, "loss": 1 / step, "grad_norm": 0.5, "learning_rate": 1e-3,
            **more}


def rl_metrics(step, mismatch=0):
    return metrics(step, reward=step / 10, loss=2 / step, mismatch_tokens=mismatch, mismatch_max=0.01 * mismatch, completion_tokens=2.0,
                   truncated=0.0, steps_behind=0, sampled_tokens_per_second=100.0, trained_tokens_per_second=200.0)


def sample(step, number, prompt, tokens, reward, difference, **more):
    logprobs = [-0.5 - i for i in range(len(tokens))]
    return {"step": step, "line": 1, "group": 0, "number": number, "answer": f"answer {number}", "finish_reason": "stop",
            "turns": 1, "reward": reward, "metrics": {"choice": reward}, "advantage": reward - 0.5, "trained": bool(difference),
            "prompt_tokens": prompt, "tokens": tokens, "logprobs": logprobs, "difference": difference, **more}


def append(file, *lines):
    with open(file, "a", encoding="utf-8") as f:
        f.write("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def write_run(folder, command="rl", steps=3, total=10, mismatch=0):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config(command, total))
    append(folder / "metrics.jsonl", *(rl_metrics(s, mismatch) if command == "rl" else metrics(s) for s in range(1, steps + 1)))
    (folder / "log.txt").write_text("")
    return folder
