"""Defects of other implementations that only a whole process shows: memory. The other tests of such defects are listed in
docs/testing.md."""
import json
import os
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
    command = [os.environ["PLUMB"], "score", "--model", model, "--input", where / "in.jsonl", "--output", where / "out.jsonl"]
    return int(subprocess.run([sys.executable, "-c", LAUNCHER, *command], check=True, capture_output=True, text=True).stdout)


def test_memory_of_a_long_document_grows_with_its_length_only(tmp_path):
    """T45: index scores of all rows against all entries at once would be 4 bytes * tokens * tokens/4 a head. The top-k is small, so that
    everything else is linear in the length."""
    make.build(tmp_path / "model", "ratios", num_hidden_layers=2, compress_ratios=[4, 128, 0], max_position_embeddings=65536)
    small, medium, large = (peak(tmp_path / "model", tmp_path, n) for n in (2000, 4000, 8000))
    first, second = medium - small, large - medium  # for 2000 and for 4000 tokens more
    assert second < 2.5 * first + (8 << 20), (small, medium, large)  # 4 times if quadratic; 8 MB: what the allocator keeps
    assert large < 600 << 20  # far below the 16 * 64 MB that the scores of 16 index heads would take
