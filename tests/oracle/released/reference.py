"""The `released` arithmetic of DeepSeek-V4 in plain PyTorch on the CPU: an oracle that shares no code with plumb.

It reads a checkpoint folder in the released layout and computes logits with the rounding points of the published inference code.
Sections in brackets are those of the model specification. All values are held in fp32; a rounding point replaces a tensor by the
values that the narrower format can hold. Products of such values are exact in fp32, so only the order of summation is open; it is
fixed here (Oracle.dot) and does not depend on the number of rows.

Rounding points, in the order in which a row meets them. Each is one call `pt(name, x)`; Oracle(off=[NAME]) removes it (a trailing *
matches a prefix, `*` alone removes all, which leaves an fp32 forward on dequantised weights). Kinds: bf16 = nearest even;
fp8x128, fp8x64 = e4m3 with one power-of-two scale per block of that many channels; fp4x32 = e2m1 likewise. Last column: section of the
model specification that has the point; code = only the published code has it.

  hc.pre      bf16     y = sum_j pre_j h_j, the contraction of the four streams (both halves of a layer)               3.9
  norm.block  bf16     attn_norm and ffn_norm outputs: fp32 inside, weight included, one cast                          3.1
  act.wq_a    fp8x128  input of wq_a                                                                                   3.3
  out.wq_a    bf16     result of wq_a                                                                                  3.3
  norm.q      bf16     q_norm output, shared by wq_b and the indexer                                                   3.1
  act.wq_b    fp8x128  input of wq_b                                                                                   3.3
  out.wq_b    bf16     result of wq_b                                                                                  3.3
  norm.qhead  bf16     unweighted norm of every query head (option qhead_norm)                                         3.1
  rope.q      bf16     rotated query                                                                                   3.2
  act.wkv     fp8x128  input of wkv (the same bytes as act.wq_a)                                                       3.3
  out.wkv     bf16     result of wkv                                                                                   3.3
  norm.kv     bf16     kv_norm output                                                                                  3.1
  rope.kv     bf16     rotated key = value                                                                             3.2
  sim.kv      fp8x64   window key = value, channels before the rotary ones only                                        3.3
  pool.ckv    bf16     pooled entry of the main compressor (fp32 projections and softmax before it)                    3.6
  norm.ckv    bf16     its norm                                                                                        3.6
  rope.ckv    bf16     its rotation                                                                                    3.6
  sim.ckv     fp8x64   compressed key = value, channels before the rotary ones only                                    3.6
  act.iwq_b   fp8x128  input of the indexer's wq_b                                                                     3.7
  out.iwq_b   bf16     its result                                                                                      3.7
  rope.iq     bf16     rotated index query                                                                             3.7
  had.iq      bf16     Hadamard transform of it (off: no transform at all)                                             3.7
  sim.iq      fp4x32   index query, all channels                                                                       3.7
  pool.ik     bf16     pooled entry of the indexer's compressor                                                        3.6
  norm.ik     bf16     its norm                                                                                        3.6
  rope.ik     bf16     its rotation                                                                                    3.6
  had.ik      bf16     Hadamard transform of it (off: no transform at all)                                             3.6
  sim.ik      fp4x32   index key, all channels                                                                         3.6
  out.iw      bf16     result of weights_proj                                                                          3.7
  attn.p      bf16     exp(score - running maximum) as factor of the value product; the denominator keeps fp32         3.5
  out.attn    bf16     attention output of a head                                                                      3.5
  rope.o      bf16     output rotated back                                                                             3.2
  out.wo_a    bf16     result of the grouped wo_a (bf16 product, input not quantised; option wo_a_fp8)                 3.3
  act.wo_b    fp8x128  input of wo_b                                                                                   3.3
  out.wo_b    bf16     result of wo_b                                                                                  3.3
  hc.post     bf16     the four streams after a sublayer                                                               3.9
  act.w13     fp8x128  input of a routed expert's w1 and w3                                                            3.8
  out.w13     bf16     results of w1 and w3, before the clamp                                                          code
  hid.w2      bf16     silu(gate) * up * routing weight                                                                3.8
  act.w2      fp8x128  input of w2                                                                                     3.8
  out.w2      bf16     result of w2, before the fp32 sum over experts                                                  code
  act.s13     fp8x128  the same five for the shared expert                                                             3.8
  out.s13     bf16     ...                                                                                             code
  hid.s2      bf16     ...                                                                                             3.8
  act.s2      fp8x128  ...                                                                                             3.8
  out.s2      bf16     ...                                                                                             code
  moe.sum     bf16     routed sum + shared expert                                                                      3.8
  hc.head     bf16     contraction of the streams in front of the head (backbone and MTP)                              3.9
  norm.final  bf16     norm in front of the head; the logits stay fp32                                                 3.1
  norm.mtp    bf16     enorm and hnorm outputs                                                                         3.10
  act.mtp     fp8x128  inputs of e_proj and h_proj                                                                     3.10
  out.mtp     bf16     their results                                                                                   3.10
  mtp.sum     bf16     the sum of the two, input streams of the MTP block                                              code

Not rounded (fp32): norms, rotation, pooling, softmax, denominators, sink, router, index scores, mHC, expert sum, logits.

Dump, as `plumb score --dump-layers` writes it: ids [S] i64; logits [S,V]; streams.N [S,n,d] after layer N and mid.N between its two
halves; routed.N [S,K] i64 in slot order; selected.N [S,k] i64 for ratio-4 layers, compressed entries in ascending order, -1 =
unused; mtp_logits [S-1,V] (row i predicts ids[i+2]). N counts from 0; N = number of layers is the MTP block (S-1 rows). The stages
of attention, as the core meets them: q.N [S,H,c] after rope.q; kv.N [S,c] after sim.kv; ckv.N [S/r,c] after sim.ckv; iq.N [S,HI,cI]
after sim.iq; iw.N [S,HI] with both scale factors; ik.N [S/4,cI] after sim.ik; o.N [S,H,c] after out.attn."""

import math

import torch

from released.formats import (exp, fp4_scale, fp8_scale, frequencies, hadamard, load, quantise, round_bf16, round_e2m1, round_e4m3, rsqrt,
                              sigmoid, silu, sqrt_softplus)

POINTS = {}  # name -> kind, in order, read from the table above
for _line in __doc__.split("\n"):
    _w = _line.split()
    if _line.startswith("  ") and len(_w) > 2 and "." in _w[0] and _w[1] in ("bf16", "fp8x128", "fp8x64", "fp4x32"):
        POINTS[_w[0]] = _w[1]

OPTIONS = {  # name -> allowed values, the first is the default; the others are choices of other implementations
    "blocks": ("list", "parts"),      # how a query's keys are cut into blocks of 64 (see Oracle.key_blocks)
    "qhead_norm": ("f32", "bf16"),    # bf16: square, mean, rsqrt and product each rounded, as eager code does
    "index_scores": ("f32", "bf16"),  # bf16: weight, score, product and sum each rounded, as eager code does
    "wo_a_fp8": ("no", "yes"),        # yes: quantise the input of wo_a 1x128
    "fp4_tie": ("even", "up"),        # e2m1 rounding of a value halfway between two codes
    "sink_in_max": ("no", "yes"),     # yes: the running maximum starts at the sink
}


class Oracle:
    def __init__(self, folder=None, off=(), config=None, **options):
        if folder is not None:
            self.config, self.t, self.block_of = load(folder)
        else:  # pieces only (self test)
            self.config, self.t, self.block_of = config or {}, {}, {}
        unknown = set(options) - set(OPTIONS)
        assert not unknown, f"unknown option {unknown}"
        for key, allowed in OPTIONS.items():
            value = options.get(key, allowed[0])
            assert value in allowed, f"{key}: {value} is not one of {allowed}"
            setattr(self, key, value)
        self.off = {p for p in POINTS for o in off if p == o or (o.endswith("*") and p.startswith(o[:-1]))}
        for o in off:
            assert o in POINTS or o.endswith("*"), f"no rounding point {o}"
        self.replay = {}  # ("routed"|"selected", layer) -> recorded choices that replace the computed ones (prefill only)
        self.gaps = {}    # by how much a replayed choice is worse than the computed one
        if self.config:
            self.setup()

    def setup(self):
        c = self.config
        self.layers, self.eps = c["num_hidden_layers"], c["rms_norm_eps"]
        self.rope = c["qk_rope_head_dim"]
        self.window = c["sliding_window"]
        slots = self.layers + c.get("num_nextn_predict_layers", 0)
        self.ratios = c["compress_ratios"][:slots]
        assert len(self.ratios) == slots, "compress_ratios is too short"
        assert all(r in (0, 4, 128) for r in self.ratios), "ratios must be 0, 4 or 128"
        s = c.get("rope_scaling")
        yarn = s and (s["factor"], s["original_max_position_embeddings"], s["beta_fast"], s["beta_slow"])
        plain = frequencies(self.rope, float(c["rope_theta"]), None)
        scaled = frequencies(self.rope, float(c["compress_rope_theta"]), yarn)
        self.freq = {0: plain, 4: scaled, 128: scaled}

    # ---- rounding points ---------------------------------------------------------------------------------------------

    def pt(self, name, x):
        """The one place where a value is rounded to a narrower format."""
        kind = POINTS[name]
        if name not in self.off:
            if kind == "bf16":
                x = round_bf16(x)
            elif kind == "fp4x32":
                x = quantise(x, 32, 6.0, fp4_scale, lambda v: round_e2m1(v, self.fp4_tie))
            else:
                x = quantise(x, int(kind[4:]), 448.0, fp8_scale, round_e4m3)
        return x

    # ---- sums --------------------------------------------------------------------------------------------------------

    @staticmethod
    def sum0(x):
        """Sum over the first dimension: fold the upper half onto the lower half until one is left."""
        while x.shape[0] > 1:
            n = x.shape[0]
            h = (n + 1) // 2
            x = torch.cat([x[: n - h] + x[h:], x[n - h : h]])
        return x[0]

    def mean_square(self, x):
        return self.sum0((x * x).movedim(-1, 0)) / x.shape[-1]

    def dot(self, x, w, block=128):
        """x [M,K] times w [N,K] transposed -> [M,N]: within a block of K as in sum0, blocks added one after the other."""
        (m, k), n = x.shape, w.shape[0]
        xt, wt = x.T.contiguous(), w.T.contiguous()
        out = torch.zeros(m, n)
        cols = min(n, 4096)
        rows = max(1, 1_000_000 // (min(block, k) * cols))  # keeps the product array in the cache
        for r in range(0, m, rows):
            for c in range(0, n, cols):
                total = torch.zeros(min(rows, m - r), min(cols, n - c))
                for a in range(0, k, block):
                    part = lambda i, j: xt[i:j, r : r + rows, None] * wt[i:j, None, c : c + cols]
                    b = min(a + block, k)
                    total = total + self.sum0(part(a, b))
                out[r : r + rows, c : c + cols] = total
        return out

    # ---- small blocks ------------------------------------------------------------------------------------------------

    def linear(self, name, x):
        return self.dot(x, self.t[name], self.block_of.get(name, 128))

    def norm(self, x, weight):
        """RMSNorm over the last dimension in fp32 [3.1]; the caller rounds."""
        y = x * rsqrt(self.mean_square(x) + self.eps)[..., None]
        return y if weight is None else weight * y

    def qhead(self, q):
        if self.qhead_norm == "f32":
            return self.norm(q, None)
        mean = round_bf16(self.sum0(round_bf16(q * q).movedim(-1, 0)) / q.shape[-1])
        return q * round_bf16(rsqrt(round_bf16(mean + self.eps)))[..., None]

    def rotate(self, x, positions, freq, inverse=False):
        """Rotates the last `rope` channels of x [rows, ..., channels], interleaved pairs, in fp32 [3.2]."""
        angle = (positions.float()[:, None] * freq.float()).double()
        angle = angle.view([len(positions)] + [1] * (x.dim() - 2) + [-1])
        cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
        if inverse:
            sin = -sin
        n = 2 * freq.shape[0]
        even, odd = x[..., -n::2], x[..., 1 - n :: 2]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        return torch.cat([x[..., :-n], turned], -1)

    def simulate(self, name, x):
        """FP8 storage simulation of the channels in front of the rotary ones [3.3]."""
        return torch.cat([self.pt(name, x[..., : -self.rope]), x[..., -self.rope :]], -1)

    def transform(self, name, x):
        return self.pt(name, x if name in self.off else hadamard(x))

    # ---- mHC [3.9] ---------------------------------------------------------------------------------------------------

    def hc_mix(self, h, prefix):
        v = h.flatten(1)
        m = self.dot(v, self.t[prefix + "_fn"])
        return m * rsqrt(self.mean_square(v) + self.eps)[:, None], self.t[prefix + "_scale"], self.t[prefix + "_base"]

    def sinkhorn(self, logits):
        """[rows, source, destination] -> nearly doubly stochastic."""
        eps = self.config["hc_eps"]
        rowsum = lambda c: self.sum0(c.movedim(2, 0))[:, :, None]
        colsum = lambda c: self.sum0(c.movedim(1, 0))[:, None, :]
        c = exp(logits - logits.amax(2, keepdim=True))
        c = c / rowsum(c) + eps
        c = c / (colsum(c) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            c = c / (rowsum(c) + eps)
            c = c / (colsum(c) + eps)
        return c

    def hc_pre(self, h, prefix):
        n = h.shape[1]
        m, scale, base = self.hc_mix(h, prefix)
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + self.config["hc_eps"]
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = self.sinkhorn((m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n))
        y = self.sum0((pre[:, :, None] * h).movedim(1, 0))
        return self.pt("hc.pre", y), post, comb

    def hc_post(self, f, h, post, comb):
        """h'_dst = post_dst * F + sum over src of comb[src, dst] * h_src"""
        mixed = self.sum0((comb[:, :, :, None] * h[:, :, None, :]).movedim(1, 0))
        return self.pt("hc.post", post[:, :, None] * f[:, None, :] + mixed)

    def hc_head(self, h, prefix):
        m, scale, base = self.hc_mix(h, prefix + "hc_head")
        pre = sigmoid(m * scale + base) + self.config["hc_eps"]
        return self.pt("hc.head", self.sum0((pre[:, :, None] * h).movedim(1, 0)))

    def logits(self, h, prefix):
        z = self.pt("norm.final", self.norm(self.hc_head(h, prefix), self.t[prefix + "norm.weight"]))
        return self.linear("head.weight", z)

    # ---- compressor [3.6] --------------------------------------------------------------------------------------------

    def pool(self, values, scores):
        """[slots, entries, channels] -> [entries, channels]: softmax over the slots of every channel, fp32."""
        e = exp(scores - scores.amax(0))
        return self.sum0(values * (e / self.sum0(e)))

    def compress_rows(self, p, x):
        return self.linear(p + "wkv.weight", x), self.linear(p + "wgate.weight", x)

    def pool_prefill(self, kv, gate, ape, ratio):
        """All complete windows of a sequence at once -> [n, c]."""
        n = kv.shape[0] // ratio
        v = kv[: n * ratio].view(n, ratio, -1).movedim(1, 0)  # [slot, entry, channel]
        s = (gate[: n * ratio].view(n, ratio, -1) + ape).movedim(1, 0)
        if ratio != 4:
            return self.pool(v, s)
        c = v.shape[-1] // 2  # first half of the channels: role of previous window; second half: of current window
        v_prev = torch.cat([torch.zeros(ratio, 1, c), v[:, :-1, :c]], 1)
        s_prev = torch.cat([torch.full((ratio, 1, c), -math.inf), s[:, :-1, :c]], 1)
        return self.pool(torch.cat([v_prev, v[:, :, c:]]), torch.cat([s_prev, s[:, :, c:]]))

    def finish(self, p, e, positions, freq, tag):
        """Pooled rows -> stored rows; tag is "ckv" (attention) or "ik" (indexer)."""
        e = self.pt("norm." + tag, self.norm(self.pt("pool." + tag, e), self.t[p + "norm.weight"]))
        e = self.pt("rope." + tag, self.rotate(e, positions, freq))
        if tag == "ckv":
            return self.simulate("sim.ckv", e)
        return self.pt("sim.ik", self.transform("had.ik", e))

    # ---- attention [3.3 - 3.5, 3.7] ----------------------------------------------------------------------------------

    def project(self, p, x, positions, ratio):
        """Rows -> (qr, q [S,H,c], kv [S,c])."""
        c, freq = self.config, self.freq[ratio]
        rows, heads, width = x.shape[0], c["num_attention_heads"], c["head_dim"]
        qr = self.pt("out.wq_a", self.linear(p + "wq_a.weight", self.pt("act.wq_a", x)))
        qr = self.pt("norm.q", self.norm(qr, self.t[p + "q_norm.weight"]))
        q = self.pt("out.wq_b", self.linear(p + "wq_b.weight", self.pt("act.wq_b", qr))).view(rows, heads, width)
        q = self.pt("norm.qhead", self.qhead(q))
        q = self.pt("rope.q", self.rotate(q, positions, freq))
        kv = self.pt("out.wkv", self.linear(p + "wkv.weight", self.pt("act.wkv", x)))
        kv = self.pt("norm.kv", self.norm(kv, self.t[p + "kv_norm.weight"]))
        kv = self.pt("rope.kv", self.rotate(kv, positions, freq))
        return qr, q, self.simulate("sim.kv", kv)

    def index_queries(self, p, x, qr, positions):
        """Rows -> (index queries [S,HI,cI], head weights [S,HI])."""
        heads, width = self.config["index_n_heads"], self.config["index_head_dim"]
        q = self.pt("out.iwq_b", self.linear(p + "wq_b.weight", self.pt("act.iwq_b", qr))).view(-1, heads, width)
        q = self.pt("rope.iq", self.rotate(q, positions, self.freq[4]))
        q = self.pt("sim.iq", self.transform("had.iq", q))
        w = self.pt("out.iw", self.linear(p + "weights_proj.weight", x)) * (width**-0.5 * heads**-0.5)
        return q, round_bf16(w) if self.index_scores == "bf16" else w

    def select(self, q, w, keys, visible, forced=None, layer=None):
        """One row: q [HI,cI], w [HI], keys [n,cI] -> chosen entries by descending score; equal scores: lower entry first.
        `forced` (ascending, -1 = unused) replaces the choice; the gap it leaves to the computed one is noted."""
        keep = min(self.config["index_topk"], visible)
        if keep == 0:
            return torch.zeros(0, dtype=torch.long)
        score = self.dot(q, keys[:visible])
        if self.index_scores == "bf16":
            score = round_bf16(self.sum0(round_bf16(round_bf16(score).clamp(min=0) * w[:, None])))
        else:
            score = self.sum0(score.clamp(min=0) * w[:, None])
        chosen = torch.sort(score, descending=True, stable=True).indices[:keep]
        if forced is not None:
            forced = forced[forced >= 0]
            gap = (score[chosen[-1]] - score[forced].min()) / score.abs().max()
            self.gaps.setdefault(("selected", layer), []).append(gap.item())
            return forced
        return chosen

    def key_blocks(self, window, compressed):
        """Row numbers of the window keys (oldest first) and of the compressed keys -> list of blocks of at most 64 rows.
        list: one list, by position within each part, cut every 64. parts: the two parts are cut separately."""
        compressed = compressed.sort().values
        if self.blocks == "parts":
            return [b for part in (window, compressed) if len(part) for b in part.split(64)]
        return torch.cat([window, compressed]).split(64)

    def attend(self, q, keys, blocks, sink):
        """One row: q [H,c], keys [n,c] (key = value), blocks of row numbers (-1 = absent) -> o [H,c], before rounding [3.5]."""
        scale = torch.tensor(q.shape[-1] ** -0.5, dtype=torch.float32)
        top = sink.clone() if self.sink_in_max == "yes" else torch.full_like(sink, -math.inf)
        denominator, o = torch.zeros_like(sink), torch.zeros_like(q)
        for rows in blocks:
            k = torch.where((rows >= 0)[:, None], keys[rows.clamp(min=0)], torch.zeros(()))
            s = (self.dot(q, k) * scale).masked_fill(rows < 0, -math.inf)
            new = torch.maximum(top, s.amax(1))
            safe = new.masked_fill(new == -math.inf, 0.0)  # a block without any key changes nothing
            shrink = exp(top - safe)
            prob = exp(s - safe[:, None])
            denominator = denominator * shrink + self.sum0(prob.T)
            o = o * shrink[:, None] + self.dot(self.pt("attn.p", prob), k.T)
            top = new
        return o / (denominator + exp(sink - top))[:, None]

    def output(self, p, o, positions, ratio):
        """Rows of o [S,H,c] -> [S,d]: rotate back, grouped wo_a, wo_b."""
        groups = self.config["o_groups"]
        o = self.pt("rope.o", self.rotate(o, positions, self.freq[ratio], inverse=True))
        o = o.reshape(o.shape[0], groups, -1)
        if self.wo_a_fp8 == "yes":
            o = quantise(o, 128, 448.0, fp8_scale, round_e4m3)
        wo_a = self.t[p + "wo_a.weight"].view(groups, -1, o.shape[-1])
        u = self.pt("out.wo_a", torch.cat([self.dot(o[:, g].contiguous(), wo_a[g]) for g in range(groups)], 1))
        return self.pt("out.wo_b", self.linear(p + "wo_b.weight", self.pt("act.wo_b", u)))

    def attention_inputs(self, p, x, ratio):
        """Normed rows of a whole sequence -> {q, kv, ckv, iq, iw, ik}, as the core meets them (the last four by ratio)."""
        S = x.shape[0]
        positions = torch.arange(S)
        qr, q, kv = self.project(p, x, positions, ratio)
        out = {"q": q, "kv": kv}

        def compressed(c, tag, width):
            rows, gate = self.compress_rows(c, x)
            e, ape = torch.zeros(0, width), self.t[c + "ape"]
            if S >= ratio:
                at = torch.arange(S // ratio) * ratio
                e = self.finish(c, self.pool_prefill(rows, gate, ape, ratio), at, self.freq[ratio], tag)
            return e

        if ratio:
            out["ckv"] = compressed(p + "compressor.", "ckv", kv.shape[1])
        if ratio == 4:
            out["iq"], out["iw"] = self.index_queries(p + "indexer.", x, qr, positions)
            out["ik"] = compressed(p + "indexer.compressor.", "ik", self.config["index_head_dim"])
        return out

    def attention_core(self, p, inputs, ratio, layer):
        """-> o [S,H,c], rounded, before the inverse rotation."""
        q, keys, S, o = inputs["q"], inputs["kv"], len(inputs["q"]), []
        if ratio:
            keys = torch.cat([keys, inputs["ckv"]])
        forced = self.replay.get(("selected", layer), [None] * S)
        for t in range(S):
            compressed = torch.arange((t + 1) // ratio if ratio else 0)
            if ratio == 4:
                compressed = self.select(inputs["iq"][t], inputs["iw"][t], inputs["ik"], len(compressed), forced[t], layer)
            blocks = self.key_blocks(torch.arange(max(0, t - self.window + 1), t + 1), S + compressed)
            o.append(self.attend(q[t], keys, blocks, self.t[p + "attn_sink"]))
        return self.pt("out.attn", torch.stack(o))

    # ---- mixture of experts [3.8] ------------------------------------------------------------------------------------

    def expert(self, p, x, weight, tag):
        """tag "w": routed, "s": shared. weight [rows] multiplies before w2."""
        limit = self.config["swiglu_limit"]
        a = self.pt(f"act.{tag}13", x)
        gate = self.pt(f"out.{tag}13", self.linear(p + "w1.weight", a))
        up = self.pt(f"out.{tag}13", self.linear(p + "w3.weight", a))
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = silu(gate) * up
        if weight is not None:
            hidden = weight[:, None] * hidden
        hidden = self.pt(f"act.{tag}2", self.pt(f"hid.{tag}2", hidden))
        return self.pt(f"out.{tag}2", self.linear(p + "w2.weight", hidden))

    def route(self, p, x, ids, layer):
        """-> (expert ids [S,K] in slot order, weights [S,K])."""
        a = sqrt_softplus(self.linear(p + "weight", x))
        if p + "tid2eid" in self.t:
            chosen = self.t[p + "tid2eid"][ids].long()
        else:
            score = a + self.t[p + "bias"]
            order = torch.sort(score, dim=1, descending=True, stable=True).indices  # equal scores: lower expert first
            chosen = order[:, : self.config["num_experts_per_tok"]]
            if ("routed", layer) in self.replay:
                last, chosen = score.gather(1, chosen[:, -1:])[:, 0], self.replay["routed", layer].long()
                self.gaps["routed", layer] = (last - score.gather(1, chosen).amin(1)).tolist()
        w = a.gather(1, chosen)
        total = w[:, 0]
        for k in range(1, w.shape[1]):
            total = total + w[:, k]
        return chosen, w / (total[:, None] + 1e-20) * self.config["routed_scaling_factor"]

    def moe(self, p, x, ids, layer):
        chosen, weights = self.route(p + "gate.", x, ids, layer)
        results = torch.zeros(*chosen.shape, x.shape[1])
        for e in chosen.unique().tolist():
            rows, slots = torch.where(chosen == e)
            results[rows, slots] = self.expert(f"{p}experts.{e}.", x[rows], weights[rows, slots], "w")
        total = torch.zeros_like(x)
        for k in range(chosen.shape[1]):
            total = total + results[:, k]
        return self.pt("moe.sum", total + self.expert(p + "shared_experts.", x, None, "s"))

    # ---- the model [3.0, 3.10] ---------------------------------------------------------------------------------------

    def attention_half(self, p, h, index, known, seen):
        """First half of a layer on streams h [S,n,d]. `known` replaces the stages q, kv, ckv, iq, iw, ik, o after they are computed;
        `seen` receives what was computed."""
        ratio, a = self.ratios[index], p + "attn."
        y, post, comb = self.hc_pre(h, p + "hc_attn")
        y = self.pt("norm.block", self.norm(y, self.t[p + "attn_norm.weight"]))
        seen.update(self.attention_inputs(a, y, ratio))
        seen["o"] = self.attention_core(a, {**seen, **known}, ratio, index)
        out = self.output(a, known.get("o", seen["o"]), torch.arange(len(h)), ratio)
        return self.hc_post(out, h, post, comb)

    def ffn_half(self, p, h, ids, index):
        y, post, comb = self.hc_pre(h, p + "hc_ffn")
        y = self.pt("norm.block", self.norm(y, self.t[p + "ffn_norm.weight"]))
        return self.hc_post(self.moe(p + "ffn.", y, ids, index), h, post, comb)

    def block(self, p, h, ids, index):
        return self.ffn_half(p, self.attention_half(p, h, index, {}, {}), ids, index)

    def embed(self, ids):
        return self.t["embed.weight"][ids]

    def start(self, ids):
        return self.embed(ids)[:, None].repeat(1, self.config["hc_mult"], 1)

    def mtp_input(self, h, next_ids):
        """Streams after the last layer and the ids one further -> input streams of the MTP block."""
        p, (rows, n, d) = "mtp.0.", h.shape
        e = self.pt("norm.mtp", self.norm(self.embed(next_ids), self.t[p + "enorm.weight"]))
        g = self.pt("norm.mtp", self.norm(h, self.t[p + "hnorm.weight"]))
        e = self.pt("out.mtp", self.linear(p + "e_proj.weight", self.pt("act.mtp", e)))
        g = self.pt("out.mtp", self.linear(p + "h_proj.weight", self.pt("act.mtp", g.reshape(-1, d)))).view(rows, n, d)
        return self.pt("mtp.sum", e[:, None] + g)

    def prefill(self, ids):
        """Token list -> logits [S,V] of the backbone."""
        h = self.start(ids)
        for i in range(self.layers):
            h = self.block(f"layers.{i}.", h, ids, i)
        return self.logits(h, "")

    STAGES = ("q", "kv", "ckv", "iq", "iw", "ik", "o")

    def redo(self, b, layers=None):
        """Recomputes every part of another program's dump from that dump's own earlier parts and with its own choices, so that
        differences do not pile up -> the parts that b has too. self.gaps tells how good the choices were. `layers`: only these."""
        ids, out, last = b["ids"].long(), {}, self.layers
        self.gaps, self.replay = {}, {}
        for name, v in b.items():
            kind, _, n = name.partition(".")
            if kind in ("routed", "selected"):
                self.replay[kind, int(n)] = v.long()

        def layer(p, i, h, ids):
            known, seen = {s: b[f"{s}.{i}"].float() for s in self.STAGES if f"{s}.{i}" in b}, {}
            mid = self.attention_half(p, h, i, known, seen)
            out.update({f"{s}.{i}": seen[s] for s in self.STAGES if s in seen})
            out[f"mid.{i}"] = mid
            out[f"streams.{i}"] = self.ffn_half(p, b.get(f"mid.{i}", mid).float(), ids, i)

        for i in range(last):
            if layers is None or i in layers:
                layer(f"layers.{i}.", i, b[f"streams.{i - 1}"].float() if i else self.start(ids), ids)
        h = b[f"streams.{last - 1}"].float()
        out["logits"] = self.logits(h, "")
        if "mtp_logits" in b and (layers is None or last in layers):
            layer("mtp.0.", last, self.mtp_input(h[:-1], ids[1:]), ids[1:])
            out["mtp_logits"] = self.logits(b.get(f"streams.{last}", out[f"streams.{last}"]).float(), "mtp.0.")
        self.replay = {}
        return {name: x for name, x in out.items() if name in b}
