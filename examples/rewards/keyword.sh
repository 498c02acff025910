#!/bin/sh
# A reward program in shell: 1 if the answer contains the word given as argument, else 0 (docs/rewards.md).
# A request begins with {"id":N,"answer":{"content":"..." so that two cuts find both; the content keeps its JSON escapes.
while IFS= read -r line; do
  id=${line#'{"id":'}
  id=${id%%,*}
  content=$(printf '%s\n' "$line" | sed -E 's/^\{"id":[0-9]+,"answer":\{"content":"(([^"\\]|\\.)*)".*/\1/')
  case $content in
    *"$1"*) reward=1 ;;
    *) reward=0 ;;
  esac
  printf '{"id":%s,"reward":%s}\n' "$id" "$reward"
done
