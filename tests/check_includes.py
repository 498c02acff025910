#!/usr/bin/env python3
"""The include rule of docs/architecture.md: each room of src/ includes only the rooms listed for it. usage: check_includes.py ROOT"""
import pathlib
import re
import sys

# room -> rooms that it may name directly; what those may include follows.
USES = {
    "base": [],
    "config": ["base"],
    "reward": ["config"],
    "checkpoint": ["config"],
    "tokenizer": ["base"],
    "plan": ["config"],
    "kernels": [],
    "ops": ["kernels", "plan"],
    "model": ["ops", "plan", "checkpoint"],
    "memory": ["model"],
    "data": ["tokenizer", "plan"],
    "rollout": ["model", "memory", "tokenizer"],
    "train": ["model", "data", "rollout", "reward", "memory"],
    "parallel": ["base"],
    "serve": ["rollout", "train"],
    "validate": ["serve"],
    "cli": ["validate"],
}


def closure(room):
    seen, todo = {room}, list(USES[room])
    while todo:
        r = todo.pop()
        if r not in seen:
            seen.add(r)
            todo += USES[r]
    return seen


def main(root):
    bad, files = [], 0
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh") or path.parent == root / "src":
            continue
        files += 1
        room = path.relative_to(root / "src").parts[0]
        if room not in USES:
            bad.append(f"{path}: folder {room} is no room: add it to tests/check_includes.py and docs/architecture.md")
            continue
        allowed = closure(room)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            m = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
            if not m:
                continue
            target = m.group(1)
            first = target.split("/")[0]
            if first in USES and "/" in target and first not in allowed:
                bad.append(f"{path}:{number}: {room} may not include {target} (allowed: {', '.join(sorted(allowed))})")
            if re.match(r"(torch|ATen|c10)/", target) and room != "parallel":
                bad.append(f"{path}:{number}: {target}: only src/parallel may include LibTorch")
    print("\n".join(bad) if bad else f"{files} files keep the include rule")
    assert files > 0, "no source file found"
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
