#!/usr/bin/env bash
# Two ways to give Fairlane an event: one Redis command, and one HTTP request.
#
#     REDIS=redis-cli FAIRLANE=http://127.0.0.1:8080 ./publish.sh BOT TYPE [DATA]
#
# REDIS is how to reach the Redis of redis.url; left out, the private one of this directory, if it has
# one: redis-cli -s fairlane-data/redis/redis.sock. TOKEN is a bearer token of auth.tokens, if
# there are any. DATA is JSON.
set -euo pipefail
bot=${1:?BOT} type=${2:?TYPE} data=${3:-null}
socket=fairlane-data/redis/redis.sock
[[ -S $socket ]] && private="redis-cli -s $socket"
redis=${REDIS:-${private:-redis-cli}} fairlane=${FAIRLANE:-http://127.0.0.1:8080}

# An event is a CloudEvent with the attribute botid. Its id must be new: receivers know repeats by it.
event() {
  printf '{"specversion":"1.0","id":"%s","source":"publish.sh","type":"%s","botid":"%s","data":%s}' \
    "$1-$(date +%s%N)-$$" "$type" "$bot" "$data"
}

# One field, `event`. Redis answers the id of the entry: it has the event.
$redis XADD fairlane:events '*' event "$(event redis)"

# 202 means that the bus has it. An array of events is a batch: application/cloudevents-batch+json.
curl --fail-with-body --silent --show-error ${TOKEN:+--header "authorization: Bearer $TOKEN"} \
  --header 'content-type: application/cloudevents+json' --data "$(event http)" "$fairlane/v1/events"
