"""Defects of other implementations that only a whole process shows (memory), and the list of all tests of such defects,
docs/testing.md."""
import json
import os
import pathlib
import re
import subprocess
import sys

import torch

from released import make


# The peak of a child counts what its parent held at the fork, so a small process is put between.
LAUNCHER = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); " \
           "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"


def peak(model, where, tokens):
    """Largest resident memory of plumb score on one document, bytes."""
    ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    (where / "in.jsonl").write_text(json.dumps({"tokens": ids}) + "\n")
    command = [os.environ["PLUMB"], "score", "--model", model, "--input", where / "in.jsonl", "--output", where / "out.jsonl",
               "--row-tokens", str(tokens)]  # in one step
    return int(subprocess.run([sys.executable, "-c", LAUNCHER, *command], check=True, capture_output=True, text=True).stdout)


def test_memory_of_a_long_document_grows_with_its_length_only(tmp_path):
    """T45: index scores of all rows against all entries at once would be 4 bytes * tokens * tokens/4 a head. The top-k is small, so that
    everything else is linear in the length."""
    make.build(tmp_path / "model", "ratios", num_hidden_layers=2, compress_ratios=[4, 128, 0], max_position_embeddings=65536)
    small, medium, large = (peak(tmp_path / "model", tmp_path, n) for n in (2000, 4000, 8000))
    first, second = medium - small, large - medium  # for 2000 and for 4000 tokens more
    assert second < 2.5 * first + (8 << 20), (small, medium, large)  # 4 times if quadratic; 8 MB: what the allocator keeps
    assert large < 600 << 20  # the scores of 16 index heads would take 1 GB


def test_documentation_names_tests_that_exist():
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs" / "testing.md").read_text()
    cpp = "\n".join(p.read_text() for p in (root / "tests").glob("*/*_test.cpp"))
    names = set(re.findall(r"`([A-Z]\w+)\.([A-Z]\w+)`", text))
    missing = [f"{a}.{b}" for a, b in names if not re.search(rf"TEST(_F|_P)?\({a},\s*{b}\)", cpp)]
    scripts = set(re.findall(r"`(test_\w+\.py)::(\w+)`", text))
    missing += [f"{a}::{b}" for a, b in scripts if f"def {b}(" not in (root / "tests" / "oracle" / a).read_text()]
    assert len(names) > 40 and len(scripts) > 10 and missing == []
