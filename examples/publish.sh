#!/usr/bin/env bash
# Two ways to publish an event to Fairlane: one Redis command, and one HTTP request.
#
#     REDIS=redis-cli FAIRLANE=http://127.0.0.1:8080 ./publish.sh BOT TYPE [DATA]
#
# REDIS is the command that connects to the Redis of redis.url. Default: if this directory has a
# private Redis, redis-cli -s fairlane-data/redis/redis.sock; otherwise redis-cli. If auth.tokens
# has tokens, set TOKEN to one of them. DATA is JSON.
set -euo pipefail
bot=${1:?BOT} type=${2:?TYPE} data=${3:-null}
socket=fairlane-data/redis/redis.sock
[[ -S $socket ]] && private="redis-cli -s $socket"
redis=${REDIS:-${private:-redis-cli}} fairlane=${FAIRLANE:-http://127.0.0.1:8080}

# An event is a CloudEvent with the attribute botid. Its id must be new, because receivers recognise
# repeated events by their ids.
event() {
  printf '{"specversion":"1.0","id":"%s","source":"publish.sh","type":"%s","botid":"%s","data":%s}' \
    "$1-$(date +%s%N)-$$" "$type" "$bot" "$data"
}

# The entry has one field, `event`. Redis returns the id of the entry once it has the event.
$redis XADD fairlane:events '*' event "$(event redis)"

# 202: the event is on the bus. An array of events needs application/cloudevents-batch+json.
curl --fail-with-body --silent --show-error ${TOKEN:+--header "authorization: Bearer $TOKEN"} \
  --header 'content-type: application/cloudevents+json' --data "$(event http)" "$fairlane/v1/events"
