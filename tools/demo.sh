#!/usr/bin/env bash
# The main jobs on the embedded model: fine-tune a LoRA adapter on examples/labels.jsonl and ask questions about words that
# are not in that file, without and with the adapter; then let a reward teach it to say maybe where it cannot know.
# Everything is written to runs/demo and runs/demo_rl.
#   tools/demo.sh build/plumb
set -euo pipefail
cd "$(dirname "$0")/.."
plumb=${1:-build/plumb}
model=assets/tiny questions=examples/label_questions.jsonl answers=examples/label_answers.txt out=runs/demo
rm -rf $out ${out}_rl

echo "== Fine-tuning $model on examples/labels.jsonl"
"$plumb" train examples/sft_tiny.toml
adapter=$(ls -d $out/checkpoints/step_* | tail -1)

echo
echo "== Answering $questions without and with the adapter"
ask() { "$plumb" sample --model $model --input $questions --temperature 0 --max-tokens 32 "$@"; }
ask --output $out/without.jsonl
ask --output $out/with.jsonl --adapter "$adapter"

# The texts of one key of a JSONL file, as they are escaped there.
texts() { sed -E 's/.*"'"$1"'": ?"(([^"\\]|\\.)*)".*/\1/' "$2"; }
paste <(texts content $questions) $answers <(texts text $out/without.jsonl) <(texts text $out/with.jsonl) |
  awk -F '\t' '
    BEGIN { printf "   %-30s %-24s %s\n", "question", "without", "with" }
    { without += $3 == $2; with += $4 == $2 }
    NR <= 8 { printf "   %-30s %-24.24s %-16.24s %s\n", $1, $3, $4, $4 == $2 ? "right" : "wrong" }
    END {
      printf "   ...\n\n%d questions: %d right without the adapter (%d %%), %d with it (%d %%)\n", NR, without,
             100 * without / NR, with, 100 * with / NR
      exit with <= without
    }' || { echo "demo: the score did not rise" >&2; exit 1; }

echo
echo "== Reinforcement learning: questions that nobody can answer, only maybe counts (examples/rl/demo.toml)"
"$plumb" rl examples/rl/demo.toml
awk '
  { match($0, /"eval\/reward":[0-9.]+/) }
  RSTART { reward = substr($0, RSTART + 14, RLENGTH - 14); if (first == "") first = reward }
  match($0, /"mismatch_max":[^,]+/) { mismatch = substr($0, RSTART + 15, RLENGTH - 15); if (mismatch + 0 > most) most = mismatch + 0 }
  END {
    printf "\nheld-out reward %.2f before, %.2f after; sampled and trained log-probabilities differ by at most %g\n", first, reward, most
    exit reward <= first
  }' ${out}_rl/metrics.jsonl || { echo "demo: the reward did not rise" >&2; exit 1; }

echo
echo "Talk to it: $plumb chat --model $model --adapter $adapter, or in a browser: $plumb serve --model $model --adapter label=$adapter"
