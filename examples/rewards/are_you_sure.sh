#!/bin/sh
# An environment in shell: asks once whether the model is sure, and rewards an answer that stays the same (docs/rewards.md).
content_of() { printf '%s\n' "$1" | sed -E 's/^\{"id":[0-9]+,"answer":\{"content":"(([^"\\]|\\.)*)".*/\1/'; }
value_of() { printf '%s\n' "$1" | sed -E "s/.*\"$2\":([0-9]+).*/\\1/"; }

while IFS= read -r line; do
  id=${line#'{"id":'}
  id=${id%%,*}
  session=$(value_of "$line" session)
  case $line in
    *'"type":"open"'*) reply='"messages":[]' ;;
    *'"type":"close"'*) reply='"reward":0' ;;
    *)
      content=$(content_of "$line")
      if [ "$(value_of "$line" turn)" = 0 ]; then
        eval "first_$session=\$content" # many conversations may be open at once
        reply='"messages":[{"role":"user","content":"Are you sure?"}]'
      else
        eval "first=\$first_$session; unset first_$session"
        [ "$content" = "$first" ] && reward=1 || reward=0
        reply="\"done\":true,\"reward\":$reward"
      fi
      ;;
  esac
  printf '{"id":%s,%s}\n' "$id" "$reply"
done
