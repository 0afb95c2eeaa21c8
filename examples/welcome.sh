#!/usr/bin/env bash
# Welcome flow: a subscriber that gets the tag "new" is reminded after ten minutes, unless it has
# replied by then. The first rule emits a delayed event. The second rule checks the subscriber when
# this event arrives.
#
#   welcome.sh BOT URL        stores the rules, which call URL for each subscriber without a reply
#   welcome.sh BOT URL try    also shows what the rules would do for a new subscriber
#
# FAIRLANE  the address of Fairlane (default: http://localhost:8080)
# DELAY     the time until the reminder (default: 10m)
# TOKEN     a token with the scopes operate and read, if auth.tokens has tokens
#
# The tag `replied` marks a reply: the program that receives the replies must set it. A URL on this
# machine needs callbacks.allow_nets, such as ["127.0.0.0/8"].
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
