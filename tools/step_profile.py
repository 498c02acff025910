#!/usr/bin/env python3
"""Where the GPU's time of a training step goes, by the folders of src/kernels.

    tools/step_profile.py RESULT.json PICTURE.svg DEVICE NAME=REPORT.csv ...

A report is the output of `ncu --csv --metrics gpu__time_duration.sum --clock-control none`; each is a bar, NAME its label;
DEVICE is where they were made. Kernels are told apart by their names in the sources; what is in no folder (copies, clearing) is "other".
"""
import collections
import csv
import datetime
import io
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLORS = ["#2f6fb5", "#d9762b", "#4a9a57", "#b5483f", "#8465ad", "#8a6a52", "#c978a8", "#6f7780", "#b0a13a", "#3aa6b0", "#1f3f66",
          "#e0b080", "#a7d3ae", "#d9a5a1"]


def declarations():
    """{name of a __global__ function: [(folder, its parameters), ...]}; folders may use the same name."""
    found = collections.defaultdict(list)
    for path in sorted((ROOT / "src/kernels").glob("*/*.cu*")):
        if path.parent.name == "portable":  # not on the GPUs whose time this shows
            continue
        for text in re.findall(r"__global__([^;{]*)\{", path.read_text()):
            text = re.sub(r"(__launch_bounds__|__cluster_dims__|PLUMB_CLUSTER)\((?:[^()]|\([^()]*\))*\)", "", text)
            if match := re.search(r"(\w+)\s*\((.*)\)\s*$", text, re.S):
                found[match[1]].append((path.parent.name, match[2]))
    return found


def folder_of(signature, found):
    """Of the folders that have a kernel of this name, the one whose parameters are most alike."""
    while (shorter := re.sub(r"<[^<>]*>", "", signature)) != signature:  # template arguments, inner ones first
        signature = shorter
    name, _, parameters = signature.partition("(")
    words = set(re.findall(r"\w+", parameters))
    alike = lambda declared: len(words & set(re.findall(r"\w+", declared))) - 0.1 * abs(parameters.count(",") - declared.count(","))
    candidates = found.get(re.split(r"::|\s", name)[-1], [])
    return max(candidates, key=lambda c: alike(c[1]))[0] if candidates else "other"


def milliseconds(report, found):
    """{folder: ms} of a report."""
    text = report.read_text()
    rows = csv.DictReader(io.StringIO(text[text.index('"ID"'):]))
    scale = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1, "msecond": 1}
    sums = collections.Counter()
    for row in rows:
        if row["Metric Name"] == "gpu__time_duration.sum":
            value = float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]]
            sums[folder_of(row["Kernel Name"], found)] += value
    return sums


def svg(bars, order):
    left, width, height, gap = 170, 760, 34, 16
    longest = max(sum(b.values()) for _, b in bars)
    rows = (len(order) + 2) // 3
    total = 20 + len(bars) * (height + gap) + 22 * rows + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {total}" font-family="sans-serif" font-size="13">',
           f'<rect width="1000" height="{total}" fill="white"/>']
    for i, (name, bar) in enumerate(bars):
        y, x = 20 + i * (height + gap), left
        out.append(f'<text x="{left - 10}" y="{y + height / 2 + 5}" text-anchor="end">{name}</text>')
        for k, part in enumerate(order):
            w = width * bar[part] / longest
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}" fill="{COLORS[k % len(COLORS)]}">'
                       f"<title>{part}: {bar[part]:.2f} ms</title></rect>")
            if w > 38:
                out.append(f'<text x="{x + w / 2:.1f}" y="{y + height / 2 + 5}" text-anchor="middle" fill="white">{bar[part]:.1f}</text>')
            x += w
        out.append(f'<text x="{x + 6:.1f}" y="{y + height / 2 + 5}">{sum(bar.values()):.1f} ms</text>')
    for k, part in enumerate(order):
        x, y = 170 + 260 * (k % 3), 20 + len(bars) * (height + gap) + 22 * (k // 3)
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLORS[k % len(COLORS)]}"/><text x="{x + 20}" y="{y + 12}">{part}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main(result, picture, device, *reports):
    found = declarations()
    bars = [(name, milliseconds(pathlib.Path(path), found)) for name, path in (r.split("=", 1) for r in reports)]
    sums = sum((b for _, b in bars), collections.Counter())
    order = [part for part, _ in sums.most_common()]
    pathlib.Path(picture).write_text(svg(bars, order))
    figures = [{"kernels of": part} | {name: round(bar[part], 3) for name, bar in bars} for part in order]
    figures.append({"kernels of": "all"} | {name: round(sum(bar.values()), 3) for name, bar in bars})
    pathlib.Path(result).write_text(json.dumps(
        {"name": "step_profile", "title": "Where a training step's time goes", "date": datetime.date.today().isoformat(),
         "device": device, "command": "tools/step_profile.py (ncu, kernel by kernel)",
         "note": "Milliseconds by folder of src/kernels, 16,384 rows, outputs kept (Keep::outputs). ![](images/step_time.svg)", "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
