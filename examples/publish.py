#!/usr/bin/env python3
"""Publishes an event to Fairlane, with Python's standard library only.

    FAIRLANE=http://127.0.0.1:8080 python3 publish.py BOT TYPE [DATA]

If auth.tokens has tokens, set TOKEN in the environment to one of them. DATA is JSON.
"""
import json, os, sys, time, urllib.error, urllib.request, uuid


def publish(events):
    """Returns once all events are on the bus, or raises. After a refusal, none of them is on it.
    After any other failure, send the same events again: receivers recognise repeated events by
    their ids."""
    headers = {"content-type": "application/cloudevents-batch+json"}
    if token := os.environ.get("TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    url = os.environ.get("FAIRLANE", "http://127.0.0.1:8080") + "/v1/events"
    request = urllib.request.Request(url, json.dumps(events).encode(), headers)
    for attempt in range(5):
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            # 429 and 503: retry later. Any other status: the answer says what is wrong with the
            # events.
            if refused.code not in (429, 503):
                raise SystemExit(f"{refused.code}: {refused.read().decode()}")
            pause = int(refused.headers.get("retry-after", 1))
        except OSError:
            pause = 2**attempt
        time.sleep(pause)
    raise SystemExit("no answer in five attempts")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    bot, kind = sys.argv[1:3]
    data = json.loads(sys.argv[3]) if len(sys.argv) == 4 else None
    event = {"specversion": "1.0", "id": str(uuid.uuid4()), "source": "publish.py", "type": kind, "botid": bot}
    print(publish([event | {"data": data}]))
