"""Compares a program's dump (`plumb score --dump-layers`) with the oracle, stage by stage.

An FP8 network amplifies every difference: a sum in another order moves an fp32 value by 1e-7, that flips one bf16 rounding (2^-8) in
some ten thousand, which flips FP8 roundings (2^-4) behind it; after three layers any difference has grown to the quantisation noise
itself. End to end, a missing rounding point looks like another order of sums. So each stage is recomputed from the program's own
inputs and choices (Oracle.redo): there most rows agree to the bit.

BOUND: for each stage the mean over rows of |oracle - program| / |oracle|. They lie between what the order of fp32 sums does alone (four
seeds x 140 tokens, the worst layer of three presets, fp64 sums and one-by-one sums against the oracle's tree) and the smallest effect
of a missing rounding point:

             order of sums   bound   missing point
    q, kv    1e-4, 2e-4      3e-4    5e-4
    ckv      3e-4            4e-4    5e-4
    iq, ik   4e-4, 1e-3      2e-3, 4e-3    1e-2, 6e-3
    iw       2e-5            1e-4    2e-3
    o        1e-5            5e-5    1e-3
    mid      3e-5            2e-4    2e-3
    streams  1e-4            3e-4    2e-3
    logprob  2e-5            1e-4    3e-3

SAME: share of rows with the same bits; the order of sums alone leaves 76 % or more. A stage of fewer than 16 rows gets the bound that
140 rows would have if all others were equal, and needs no share of same bits: keys hold few different values (FP8), so that one sum on
the edge between two roundings moves a tenth of a row. GAP: how much worse than the oracle's a choice of
experts (score + bias) or entries (relative to the largest score) may be; given the same inputs no choice ever differed."""

import torch

BOUND = dict(q=3e-4, kv=3e-4, ckv=4e-4, iq=2e-3, iw=1e-4, ik=4e-3, o=5e-5, mid=2e-4, streams=3e-4, logits=1e-4, mtp_logits=1e-4)
SAME, GAP = 0.6, 1e-4


def problems(oracle, dump, layers=None):
    """-> list of sentences, empty if the dump passes. `layers`: only these layers and the head."""
    with torch.no_grad():
        redone = oracle.redo(dump, layers)
    found = []
    for name, x in redone.items():
        kind, x, y = name.split(".")[0], x.double(), dump[name].double()
        if name.endswith("logits"):
            mean, same, rows = (x.log_softmax(-1) - y.log_softmax(-1)).abs().mean().item(), 1.0, 16
        else:
            x, y, rows = x.flatten(1), y.flatten(1), len(x)
            if rows == 0:
                continue
            row = (x - y).norm(dim=1) / x.norm(dim=1).clamp(min=1e-30)
            mean, same = row.mean().item(), (row == 0).double().mean().item()
        limit = BOUND[kind] * (1 if rows >= 16 else 140 / rows)
        if not mean <= limit:  # not: a NaN is a problem
            found.append(f"{name}: mean difference {mean:.1e}, bound {limit:.0e}")
        elif rows >= 16 and same < SAME:
            found.append(f"{name}: {100 * same:.0f} % of rows have the same bits, bound {100 * SAME:.0f} %")
    for (kind, layer), gaps in oracle.gaps.items():
        if max(gaps, default=0.0) > GAP:
            found.append(f"{kind}.{layer}: a choice is worse than the oracle's by {max(gaps):.1e}, bound {GAP:.0e}")
    return found
