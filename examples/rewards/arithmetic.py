#!/usr/bin/env python3
"""A reward program: one JSON request a line on stdin, one JSON answer a line on stdout (docs/rewards.md).

The dataset's lines have a key "answer" with a whole number. 1 for that number alone, 0.5 if it is the last word of a longer
text, 0 otherwise. What this program prints to stderr goes to the log of the run; stdout belongs to the protocol.
"""
import json
import sys

for text in sys.stdin:
    request = json.loads(text)
    words = request["answer"]["content"].split()
    wanted = str(request["line"]["answer"])
    right = bool(words) and words[-1].strip(".") == wanted
    reward = 0.0 if not right else 1.0 if len(words) == 1 else 0.5
    print(json.dumps({"id": request["id"], "reward": reward, "metrics": {"words": len(words)}}), flush=True)
