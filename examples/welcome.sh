#!/usr/bin/env bash
# Welcome flow: who gets the tag "new" is reminded after ten minutes, unless they have replied by
# then. Two rules: one puts an event off, the other looks at the subscriber when it comes.
#
#   welcome.sh BOT URL        writes the rules; URL is called for those who did not reply
#   welcome.sh BOT URL try    the same, and what they would do for somebody who is new
#
# FAIRLANE  where Fairlane answers (http://localhost:8080)
# DELAY     how long it waits (10m)
# TOKEN     a token with the scopes operate and read, where auth.tokens are set up
# "Replied" is the tag `replied`: whoever takes replies in sets it. A URL on this machine needs
# callbacks.allow_nets, such as ["127.0.0.0/8"].
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: welcome.sh BOT URL [try]" >&2; exit 64; }
bot=$1 url=$2
fairlane=${FAIRLANE:-http://localhost:8080}
call() { # method, path, body
  curl --silent --show-error --fail-with-body --request "$1" "$fairlane/v1/bots/$bot/automations/$2" \
    ${TOKEN:+--header "authorization: Bearer $TOKEN"} \
    --header 'content-type: application/json' --data "$3"
  echo
}
call PUT 10-welcome '{
  "name": "New: look again later",
  "on": ["tag.applied"],
  "filter": "event.data.tag == \"new\" && !(\"replied\" in subscriber.tags)",
  "actions": [{"emit": {"type": "welcome.check", "delay": "'"${DELAY:-10m}"'"}}]
}'
call PUT 20-remind '{
  "name": "Still no reply: remind",
  "on": ["welcome.check"],
  "filter": "!(\"replied\" in subscriber.tags)",
  "actions": [{"notify": {"url": "'"$url"'", "type": "welcome"}}, {"set_tag": {"tag": "reminded"}}]
}'
if [ "${3:-}" = try ]; then
  call POST test '{
    "event": {"type": "tag.applied", "subject": "ann", "data": {"tag": "new"}},
    "subscriber": {"fields": {"gender": "female", "age": 31}}
  }'
fi
