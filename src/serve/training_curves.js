// Curves of the training view (training.html): helpers that the whole page uses, and the charts. A run is {name, colour, times,
// figures: name -> {step, time, value}}: three lists of one length.
"use strict";
const $ = (id) => document.getElementById(id);
function element(name, properties = {}, ...children) {
  const e = Object.assign(document.createElement(name), properties);
  e.append(...children);
  return e;
}
function swatch(run) {
  const e = element("span", { className: "swatch" });
  e.style.setProperty("--colour", run.colour);
  return e;
}

// ---- Numbers -------------------------------------------------------------------------------------------------------

function format(v) {
  if (v === undefined || v === null || Number.isNaN(v)) return "–";
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size >= 1e7 || size < 1e-4) return v.toExponential(2).replace("e+", "e");
  if (Number.isInteger(v) || size >= 1e4) return Math.round(v).toLocaleString("en");
  return String(Number(v.toPrecision(4)));
}
function duration(seconds) {
  const s = Math.max(0, Math.round(seconds)), h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60);
  return h >= 48 ? `${Math.round(h / 24)} days` : h > 0 ? `${h} h ${m} min` : m > 0 ? `${m} min ${s % 60} s` : `${s} s`;
}

// ---- Curves --------------------------------------------------------------------------------------------------------

// Shown first, in this order, and what docs/metrics.md says of them.
const FIRST = {
  reward: "mean reward of the step's answers",
  mismatch_tokens: "tokens whose log-probability in training differs from the recorded one in any bit",
  loss: "of the step, before its update",
  kl3_reference: "divergence from the reference, nats",
  teacher_kl: "divergence from the teacher, nats",
  completion_tokens: "sampled tokens of an answer",
  grad_norm: "norm of all gradients before they are clipped",
  sampled_tokens_per_second: "sampling speed",
  tokens_per_second: "training speed",
};
const EDGE = { left: 52, right: 8, top: 8, bottom: 20 };
const charts = new Map();
let shown = [];     // runs
let cursor = null;  // place on the x axis under the pointer

// Colours of the style sheet as the canvas wants them (light-dark() is resolved for properties only).
function colourOf(variable) {
  $("tooltip").style.color = `var(${variable})`;
  const colour = getComputedStyle($("tooltip")).color;
  $("tooltip").style.color = "";
  return colour;
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((s) => s * power >= rough), list = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) list.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return list;
}
// Exponential moving average without a pull towards its start.
function smoothed(values, factor) {
  let sum = 0, weight = 0;
  return factor ? values.map((v) => (sum = factor * sum + (1 - factor) * v) / (weight = factor * weight + 1 - factor)) : values;
}

class Chart {
  constructor(name) {
    this.name = name;
    this.values = element("span");
    this.canvas = element("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    this.line = element("div", { className: "cursor", hidden: true });
    const caption = element("figcaption", { title: FIRST[name] ?? "" }, element("h3", { textContent: name }), this.values);
    this.view = element("figure", {}, caption, this.canvas, this.line);
    this.view.dataset.name = name;
    this.canvas.addEventListener("pointermove", (e) => {
      const { left } = this.canvas.getBoundingClientRect();
      this.point(this.low + ((e.clientX - left - EDGE.left) / this.width) * (this.high - this.low), e.clientX, e.clientY);
    });
    for (const kind of ["pointerleave", "blur"]) this.canvas.addEventListener(kind, () => leave());
    this.canvas.addEventListener("keydown", (e) => this.key(e));
  }
  // Curves of this chart: {run, x, value, evaluation}; those with log scale that are not positive are left out.
  curves() {
    const axis = $("axis").value, list = [];
    for (const run of shown)
      for (const name of [this.name, `eval/${this.name}`]) {
        const f = run.figures.get(name);
        if (!f) continue;
        const x = axis === "step" ? f.step : f.time.map((t) => (t - run.times[0]) / 3600);
        list.push({ run, x, step: f.step, value: f.value, evaluation: name !== this.name });
      }
    return list;
  }
  draw() {
    const list = this.curves(), log = $("log").checked, scale = log ? Math.log10 : (v) => v;
    this.list = list;
    const { clientWidth: w, clientHeight: h } = this.canvas, ratio = devicePixelRatio;
    if (!w) return;  // folded away
    this.canvas.width = w * ratio, this.canvas.height = h * ratio;
    const c = this.canvas.getContext("2d");
    c.scale(ratio, ratio);
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { x, value } of list)
      for (let i = 0; i < x.length; ++i) {
        const y = scale(value[i]);
        if (!Number.isFinite(y)) continue;
        x0 = Math.min(x0, x[i]), x1 = Math.max(x1, x[i]), y0 = Math.min(y0, y), y1 = Math.max(y1, y);
      }
    if (x0 > x1) [x0, x1, y0, y1] = [0, 1, 0, 1];
    if (x0 === x1) x1 = x0 + 1;
    if (y0 === y1) y0 -= Math.abs(y0) / 10, y1 += Math.abs(y1) / 10 || 1;
    else [y0, y1] = [y0 - 0.05 * (y1 - y0), y1 + 0.05 * (y1 - y0)];
    this.low = x0, this.high = x1, this.width = w - EDGE.left - EDGE.right;
    const height = h - EDGE.top - EDGE.bottom;
    const px = (x) => EDGE.left + ((x - x0) / (x1 - x0)) * this.width;
    const py = (y) => EDGE.top + (1 - (scale(y) - y0) / (y1 - y0)) * height;
    this.axes(c, log ? this.powers(y0, y1) : ticks(y0, y1, 4), ticks(x0, x1, Math.max(2, w / 90)), px, py);
    const factor = Number($("smooth").value);
    for (const curve of list) {
      c.strokeStyle = c.fillStyle = curve.run.colour;
      c.setLineDash(curve.evaluation ? [4, 3] : []);
      if (!curve.evaluation && factor) {
        c.globalAlpha = 0.25;
        this.trace(c, curve.x, curve.value, px, py);
        c.globalAlpha = 1;
      }
      this.trace(c, curve.x, curve.evaluation ? curve.value : smoothed(curve.value, factor), px, py);
      if (curve.evaluation || curve.x.length === 1)
        curve.x.forEach((x, i) => Number.isFinite(scale(curve.value[i])) && c.fillRect(px(x) - 3, py(curve.value[i]) - 3, 6, 6));
    }
    c.setLineDash([]);
    this.caption(list);
    this.place();
  }
  powers(y0, y1) {
    const list = ticks(y0, y1, 4).filter((e) => y1 - y0 < 1 || Number.isInteger(e));
    return list.map((e) => 10 ** e);
  }
  axes(c, ys, xs, px, py) {
    c.font = "11px system-ui, sans-serif";
    c.fillStyle = colourOf("--quiet"), c.strokeStyle = colourOf("--line"), c.lineWidth = 1;
    c.textAlign = "right", c.textBaseline = "middle";
    for (const y of ys) {
      c.beginPath(), c.moveTo(EDGE.left, py(y)), c.lineTo(EDGE.left + this.width, py(y)), c.stroke();
      c.fillText(format(Number(y.toPrecision(6))), EDGE.left - 6, py(y));
    }
    c.textAlign = "center", c.textBaseline = "bottom";
    for (const x of xs)
      if ($("axis").value !== "step" || Number.isInteger(x)) {
        const text = format(Number(x.toPrecision(6))), most = this.canvas.clientWidth - c.measureText(text).width / 2 - 1;
        c.fillText(text, Math.min(px(x), most), this.canvas.clientHeight - 2);
      }
    c.lineWidth = 1.6, c.lineJoin = "round";
  }
  // Any number of points: of those in one column of pixels the least, the greatest and the last are drawn.
  trace(c, x, value, px, py) {
    c.beginPath();
    let column = NaN, low = 0, high = 0, begun = false;
    for (let i = 0; i < x.length; ++i) {
      const at = px(x[i]), y = py(value[i]);
      if (!Number.isFinite(y)) continue;
      if (Math.round(at) === column) {
        if (y < low) c.lineTo(at, low = y);
        if (y > high) c.lineTo(at, high = y);
        if (i + 1 === x.length) c.lineTo(at, y);
        continue;
      }
      begun ? c.lineTo(at, y) : c.moveTo(at, y);
      [column, low, high, begun] = [Math.round(at), y, y, true];
    }
    c.stroke();
  }
  caption(list) {
    const zero = this.name === "mismatch_tokens" && list.length && list.every((l) => l.value.every((v) => v === 0));
    const parts = list.flatMap(({ run, value, evaluation }) => {
      const text = `${evaluation ? "evaluation " : ""}${format(value.at(-1))}`;
      return [element("span", {}, ...(shown.length > 1 && !evaluation ? [swatch(run), " "] : []), text), " "];
    });
    const allEqual = element("span", { className: "good", textContent: "0, all equal, in every step" });
    this.values.replaceChildren(...(zero ? [allEqual] : parts));
    this.canvas.ariaLabel = `${this.name}: ${this.values.textContent.trim()}. Left and right arrow keys walk through the steps.`;
  }
  place() {
    this.line.hidden = cursor === null || cursor < this.low || cursor > this.high;
    if (this.line.hidden) return;
    const { offsetLeft: left, offsetTop: top, clientHeight: h } = this.canvas;
    this.line.style.left = `${left + EDGE.left + ((cursor - this.low) / (this.high - this.low)) * this.width}px`;
    this.line.style.top = `${top + EDGE.top}px`;
    this.line.style.height = `${h - EDGE.top - EDGE.bottom}px`;
  }
  // The points nearest to a place: table and words.
  point(x, left, top) {
    const nearest = (list) => {
      let [a, b] = [0, list.length - 1];
      while (b - a > 1) {
        const middle = (a + b) >> 1;
        if (list[middle] < x) a = middle;
        else b = middle;
      }
      return Math.abs(list[b] - x) < Math.abs(list[a] - x) ? b : a;
    };
    const train = this.list.find((l) => !l.evaluation && l.x.length) ?? this.list.find((l) => l.x.length);
    if (!train) return;
    cursor = train.x[nearest(train.x)];
    for (const chart of charts.values()) chart.place();
    const rows = this.list.filter((l) => l.x.length).map((l) => ({ l, i: nearest(l.x) }));
    showTooltip(left, top, element("strong", { textContent: `${this.name}, step ${train.step[nearest(train.x)]}` }),
      element("table", {}, ...rows.map(({ l, i }) => element("tr", {}, element("td", {}, swatch(l.run)),
        element("td", { textContent: shown.length > 1 ? l.run.name : "" }), element("td", { textContent: format(l.value[i]) }),
        element("td", { className: "quiet", textContent: l.evaluation ? `evaluation, step ${l.step[i]}` : "" })))));
    return rows.map(({ l, i }) => `${l.evaluation ? "evaluation " : ""}${format(l.value[i])}`).join(", ");
  }
  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], first = this.list?.find((l) => !l.evaluation) ?? this.list?.[0];
    if (!step || !first) return;
    event.preventDefault();
    const at = cursor === null ? (step > 0 ? 0 : first.x.length - 1) : first.x.indexOf(cursor) + step;
    const i = Math.min(Math.max(at, 0), first.x.length - 1), box = this.canvas.getBoundingClientRect();
    const left = box.left + EDGE.left + ((first.x[i] - this.low) / (this.high - this.low)) * this.width;
    const words = this.point(first.x[i], left, box.top + 30);
    $("spoken").textContent = `step ${first.step[i]}: ${words}`;
  }
}
function leave() {
  cursor = null;
  $("tooltip").hidden = true;
  for (const chart of charts.values()) chart.place();
}
function showTooltip(left, top, ...content) {
  const box = $("tooltip");
  box.replaceChildren(...content);
  box.hidden = false;
  box.style.left = `${Math.max(4, Math.min(left + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${top + 16 + box.offsetHeight < innerHeight ? top + 16 : Math.max(4, top - box.offsetHeight - 10)}px`;
}

// Charts of all figures that these runs have; an evaluation belongs to the chart of what is trained.
function showCharts(runs = shown) {
  shown = runs;
  const names = new Set(runs.flatMap((r) => [...r.figures.keys()]));
  for (const name of names)
    if (name.startsWith("eval/")) {
      names.delete(name);
      names.add(name.slice(5));
    }
  const order = [...Object.keys(FIRST).filter((n) => names.has(n)), ...[...names].filter((n) => !(n in FIRST)).sort()];
  for (const [name, chart] of charts) if (!names.has(name)) chart.view.remove(), charts.delete(name);
  for (const name of order) {
    if (!charts.has(name)) charts.set(name, new Chart(name));
    const { view } = charts.get(name), parent = name in FIRST ? $("first") : $("others");
    if (view.parentElement !== parent) parent.append(view);
    charts.get(name).draw();
  }
  const first = order.filter((n) => n in FIRST).map((n) => charts.get(n).view);
  if (first.some((view, i) => $("first").children[i] !== view)) $("first").replaceChildren(...first);
  $("more").hidden = !$("others").children.length;
}
for (const id of ["axis", "log", "smooth"]) $(id).addEventListener("input", () => {
  $("smoothing").textContent = $("smooth").value;
  showCharts();
});
$("more").addEventListener("toggle", () => showCharts());
new ResizeObserver(() => showCharts()).observe($("first"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showCharts());
