"""Policy losses, distances from a teacher and sample weights against torch's automatic differentiation in double precision. The
oracle is written over whole rows with masks and group numbers, the program works on lists of trained tokens."""

import json
import math
import os
import pathlib
import subprocess

import numpy as np
import pytest
import torch

TOOL = pathlib.Path(os.environ["PLUMB_BUILD"]) / "tests" / "rl_loss_tool"
NAN = float("nan")


def ask(requests):
    text = "".join(json.dumps(r) + "\n" for r in requests)
    done = subprocess.run([TOOL], input=text, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def oracle(o, row):
    """row: tensors [T] new, old, original, reference, advantage, weight, group, mask -> loss, gradient of new."""
    new = row["new"].clone().requires_grad_()
    mask, group = row["mask"], row["group"]
    old = torch.where(torch.isnan(row["old"]), new.detach(), row["old"])
    d = new - old
    same = (group[:, None] == group[None, :]) & mask[None, :]
    mean = (torch.where(mask, d, 0)[None, :] * same).sum(1) / same.sum(1).clamp(min=1)
    token, sequence = torch.exp(d.clamp(-20, 20)), torch.exp(mean.clamp(-20, 20))
    level = o.get("level", "token")
    ratio = {"token": token, "sequence": sequence, "average": (token + sequence) / 2,
             "geometric_average": torch.sqrt(token) * torch.sqrt(sequence)}[level]
    if o.get("max_ratio", 0) > 0:
        ratio = ratio.clamp(max=o["max_ratio"])
    ppo = o.get("ppo", False)
    low = 1 - o.get("epsilon", 0.2 if ppo else 1.0)
    high = 1 + o.get("epsilon_high", o.get("epsilon", 0.2) if ppo else 4.0)
    counted = mask & (((low <= ratio) & (ratio <= high)) if o.get("mask_ratio") else torch.ones_like(mask))
    advantage = row["advantage"].clone()
    if o.get("kl", 0) > 0:
        source = old if o.get("kl_source") == "sample" else new
        kl = (source - row["reference"]).detach()
        known = mask & ~torch.isnan(kl)
        if known.any():
            advantage = advantage + torch.where(known, o["kl"] * (kl[known].mean() - kl), 0)
    advantage = advantage - o.get("tau", 0) * d.detach()
    clipped = ratio.clamp(low, high)
    if ppo:
        objective = torch.minimum(ratio * advantage, clipped * advantage)
    else:
        objective = clipped.detach() * advantage * new
    if o.get("truncated", 0) > 0:
        factor = torch.exp((old - row["original"]).detach().clamp(-20, 20)).clamp(max=o["truncated"])
        unknown = torch.isnan(row["old"]) | torch.isnan(row["original"])
        objective = objective * torch.where(unknown, 1.0, factor)
    loss = -(torch.where(counted, objective, 0) * row["weight"]).sum() * o["scale"]
    loss.backward()
    return float(loss.detach()), new.grad


def random_row(rng, length, groups, mask_share, far=0.3, nan_old=0.0, references=1.0):
    draw = lambda scale: torch.tensor(rng.normal(size=length) * scale, dtype=torch.float32).double()
    keep = lambda share: torch.tensor(rng.random(length) < share)
    old = -2 + draw(1)
    row = {"new": old + draw(far), "old": old, "original": old + draw(0.1), "reference": old + draw(0.5),
           "advantage": draw(1), "weight": draw(0.2).abs() + 0.5,
           "group": torch.tensor(np.sort(rng.integers(0, groups, length))), "mask": keep(mask_share)}
    for name, share in (("old", 1 - nan_old), ("reference", references), ("original", references)):
        row[name] = torch.where(keep(share), row[name], NAN)
    # The program takes FP32.
    return {k: v.float().double() if v.is_floating_point() else v for k, v in row.items()}


def request(o, row):
    null = lambda v: None if math.isnan(v) else float(v)
    tokens = []
    for i in torch.nonzero(row["mask"]).flatten().tolist():
        t = {k: null(row[k][i]) for k in ("new", "old", "original", "reference", "advantage", "weight")}
        tokens.append(t | {"sequence": int(row["group"][i])})
    return {"kind": "policy", "tokens": tokens, "scale": 1.0} | o


OPTIONS = [{}, {"ppo": True}, {"ppo": True, "epsilon": 0.1, "epsilon_high": 0.4}, {"epsilon": 0.2, "epsilon_high": 0.28},
           {"mask_ratio": True, "epsilon": 0.3, "epsilon_high": 0.3}, {"ppo": True, "mask_ratio": True},
           {"kl": 0.3}, {"kl": 0.3, "kl_source": "sample"}, {"tau": 0.5}, {"truncated": 1.05}, {"max_ratio": 1.1},
           {"ppo": True, "max_ratio": 1.1, "epsilon": 0.5},
           {"ppo": True, "kl": 0.1, "tau": 0.2, "truncated": 2.0, "epsilon": 0.25},
           {"ppo": True, "level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2}]  # the last: GSPO
LEVELS = ["token", "sequence", "average", "geometric_average"]


def compare(pairs):
    for (o, row), answer in zip(pairs, ask([request(o, row) for o, row in pairs])):
        loss, gradient = oracle({"scale": 1.0} | o, row)
        wanted = gradient[row["mask"]].numpy()
        # Gradients are handed over in FP32.
        assert answer["loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12), o
        np.testing.assert_allclose(np.array(answer["gradient"]), wanted, rtol=2e-6, atol=1e-7 * (1 + abs(wanted).max(initial=0)),
                                   err_msg=str(o))


def test_every_option_at_every_level():
    rng = np.random.default_rng(1)
    pairs = [(o | {"level": o.get("level", level), "scale": 0.125}, random_row(rng, 60, 4, 0.6, nan_old=0.1, references=0.8))
             for o in OPTIONS for level in LEVELS for _ in range(5)]
    compare(pairs)


@pytest.mark.parametrize("o", [{}, {"ppo": True}, {"ppo": True, "level": "sequence"}, {"level": "geometric_average"}])
def test_edge_cases(o):
    rng = np.random.default_rng(2)
    one = random_row(rng, 5, 1, 0.0)
    one["mask"][2] = True
    compare([(o, random_row(rng, 8, 1, 0.0)), (o, one), (o, random_row(rng, 30, 30, 1.0)),  # groups of one token
             (o, random_row(rng, 30, 3, 1.0, nan_old=1.0)),                                 # nothing known of the old policy
             (o | {"kl": 1.0}, random_row(rng, 30, 3, 1.0, references=0.0)),
             (o, random_row(rng, 40, 3, 1.0, far=8.0)), (o, random_row(rng, 40, 3, 1.0, far=60.0))])  # ratios far outside


def test_scale_and_correlation():
    rng = np.random.default_rng(3)
    row = random_row(rng, 50, 3, 1.0)
    whole, half = ask([request({"scale": 1.0}, row), request({"scale": 0.5}, row)])
    assert half["loss"] == pytest.approx(whole["loss"] / 2, rel=1e-12)
    expected = np.corrcoef(row["old"].exp().numpy(), row["new"].exp().numpy())[0, 1]
    assert whole["correlation"] == pytest.approx(expected, abs=1e-9)
    assert whole["kl"] == pytest.approx(float((row["new"] - row["reference"]).sum()), abs=1e-9)


def divergence_request(rng, rows, vocab, d, teacher_d, scale=1.0, forward=False):
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32).tolist()
    return {"kind": "divergence", "forward": forward, "hidden": draw(rows, d), "teacher_hidden": draw(rows, teacher_d),
            "head": (np.array(draw(vocab, d)) * scale).astype(np.float32).tolist(), "teacher_head": draw(vocab, teacher_d), "d": draw(rows)}


@pytest.mark.parametrize("forward", [False, True])
def test_divergence_from_a_teacher(forward):
    """torch's own kl_div and its gradient, through the head to the hidden rows, in double precision."""
    rng = np.random.default_rng(4)
    sizes = [(7, 40, 12, 20), (1, 5, 3, 3), (3, 1, 4, 4), (300, 33, 8, 6), (4, 1001, 16, 8)]
    requests = [divergence_request(rng, *size, forward=forward) for size in sizes]
    requests += [divergence_request(rng, 6, 50, 8, 8, scale=s, forward=forward) for s in (0, 10, 100)]  # flat, far apart
    same = divergence_request(rng, 5, 30, 6, 6, forward=forward)
    requests.append(same | {"teacher_hidden": same["hidden"], "teacher_head": same["head"]})
    for r, answer in zip(requests, ask(requests)):
        tensor = lambda name: torch.tensor(r[name], dtype=torch.float64)
        hidden, head = tensor("hidden").requires_grad_(), tensor("head").requires_grad_()
        p = torch.log_softmax(hidden @ head.T, -1)
        q = torch.log_softmax(tensor("teacher_hidden") @ tensor("teacher_head").T, -1)
        kl = torch.nn.functional.kl_div(*((p, q) if forward else (q, p)), log_target=True, reduction="none").sum(-1)
        (kl * tensor("d")).sum().backward()
        # FP32 logits: a relative error of 1e-6 of the largest, which a divergence inherits.
        size = max(1, float((hidden @ head.T).abs().max().detach()))
        np.testing.assert_allclose(answer["value"], kl.detach().numpy(), rtol=1e-5, atol=3e-6 * size)
        for name, value in (("d_hidden", hidden.grad), ("d_head", head.grad)):
            np.testing.assert_allclose(answer[name], value.numpy().ravel(), rtol=1e-4, atol=1e-5 * size * (1 + float(value.abs().max())))
    assert all(v == 0 for v in answer["value"] + answer["d_hidden"])  # the last: the teacher is the student


def weights_oracle(samples, scale_rewards, normalize, balance):
    reward = np.array([s["reward"] for s in samples], np.float64)
    group = np.array([s["group"] for s in samples])
    tokens = np.array([s["tokens"] for s in samples], np.float64)
    advantage = np.zeros(len(samples))
    for g in set(group):
        r = reward[group == g]
        a = r - r.mean() if np.ptp(r) > 0 else 0 * r
        advantage[group == g] = a / (r.std() + 1e-6) if scale_rewards else a
    kept = (advantage != 0) & (tokens > 0)
    weight = np.where(kept, 1 / (tokens + 1e-6), 0)
    if kept.any():
        weight = weight / ((weight * tokens)[kept].sum() / tokens[kept].sum())
    if balance > 0:
        advantage = np.where(advantage < 0, advantage * (1 - balance), advantage)
    if balance < 0:
        advantage = np.where(advantage > 0, advantage * (1 + balance), advantage)
    size = (np.abs(advantage) * weight * tokens)[kept].sum()
    if normalize and size > 0:
        advantage = advantage / (size / tokens[kept].sum())
    return advantage, weight, kept


def test_sample_weights():
    rng = np.random.default_rng(5)
    requests = []
    for case in range(60):
        n = int(rng.integers(1, 30))
        rewards = rng.choice([0.0, 0.5, 1.0, 0.1, -3.25], n) if case % 2 else rng.normal(size=n)
        samples = [{"group": int(rng.integers(0, 5)), "reward": float(r), "tokens": int(rng.integers(0, 9))} for r in rewards]
        requests.append({"kind": "weights", "samples": samples, "scale_rewards": bool(case % 3), "normalize": bool(case % 5),
                         "balance": [0.0, 0.5, -0.5, 1.0, -1.0][case % 5]})
    requests.append(requests[0] | {"samples": [{"group": 0, "reward": 0.1, "tokens": 3}] * 3})  # no variance
    requests.append(requests[0] | {"samples": [{"group": 0, "reward": 1.0, "tokens": 3}]})      # a group of one
    for r, answer in zip(requests, ask(requests)):
        advantage, weight, kept = weights_oracle(r["samples"], r["scale_rewards"], r["normalize"], r["balance"])
        assert answer["kept"] == kept.tolist()
        np.testing.assert_allclose(answer["advantage"], advantage, rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(answer["weight"], weight, rtol=2e-6, atol=1e-7)
    assert ask(requests[-2:-1])[0]["flat"] == 1
