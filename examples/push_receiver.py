#!/usr/bin/env python3
"""A receiver for Fairlane's pushes, with Python's standard library only.

fairlane.toml:                              then:
    [callbacks]                                 python3 push_receiver.py --port 9000 \\
    secrets = ["whsec_…"]                           --secret "$(fairlane secret --bot shop-7)"
    [pipelines.orders]
    handler = "push"                            Without --secret no signature is checked: for
    events = ["order.*"]                        tests only. A receiver of many bots needs the
    url = "http://127.0.0.1:9000/"              operator's secret: --operator-secret whsec_…

Put your own work into handle(). It gets the events of one bot in order, and never two calls for
one bot concurrently. An event may arrive again after a crash, with the same id: see Seen.

--async http://FAIRLANE:8080 answers 202 and completes the lease later, in another thread.
"""
import argparse, base64, collections, hashlib, hmac, json, queue, random, re, threading, time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOLERANCE = 300  # maximum difference between the request's time and ours, in seconds
ID = re.compile(r"[A-Za-z0-9_-]{1,128}")  # no dot: "id.time.body" would have a second reading
KNOWN = 100_000  # ids that are remembered


class Failed(Exception):
    """The event cannot be handled now. Fairlane sends it and the events after it again."""


def handle(bot, event):
    """Handles one event: put your own work here. Raise Failed if it cannot be handled now."""
    data = json.dumps(event.get("data"), ensure_ascii=False, separators=(",", ":"))
    print(bot, event["type"], event["id"], data, flush=True)


class Seen:
    """The ids of the last handled events, which are lost when the process ends. If an effect must
    not happen twice, store the id and the effect in one transaction."""

    def __init__(self):
        self.lock, self.ids = threading.Lock(), collections.OrderedDict()

    def __contains__(self, key):
        with self.lock:
            return key in self.ids

    def add(self, key):
        with self.lock:
            self.ids[key] = True
            if len(self.ids) > KNOWN:
                self.ids.popitem(last=False)


def is_signed(headers, body, bot):
    """Whether Fairlane sent this (Standard Webhooks): one of its signatures is valid and recent."""
    keys = [base64.b64decode(secret.removeprefix("whsec_")) for secret in " ".join(options.secret).split()]
    for secret in options.operator_secret:
        operators = base64.b64decode(secret.removeprefix("whsec_"))
        keys.append(hmac.digest(operators, bot.encode(), "sha256"))
    if not keys:
        return True
    sent, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not ID.fullmatch(sent) or not stamp.isdecimal() or abs(time.time() - int(stamp)) > TOLERANCE:
        return False
    signed = f"{sent}.{stamp}.".encode() + body
    given = headers.get("webhook-signature", "").encode().split(b" ")
    ours = [b"v1," + base64.b64encode(hmac.digest(key, signed, "sha256")) for key in keys]
    return any(hmac.compare_digest(one, other) for one in ours for other in given)


def work(push):
    """Handles the events of a push in order. Returns how many it handled, and why it stopped."""
    started, outcomes, reason = time.time_ns() // 1000, [], None
    unlucky = random.choice(push["events"]) if random.random() < options.fail else None
    for event in push["events"]:
        key = (push["pipeline"], push["bot"], event["source"], event["id"])
        outcome = "repeat" if key in seen else "done"
        try:
            if event is unlucky:
                raise Failed("no luck")
            if outcome == "done":
                handle(push["bot"], event)
                seen.add(key)
        except Failed as failed:
            outcome, reason = "failed", str(failed)
        outcomes.append({"id": event["id"], "outcome": outcome})
        if reason:
            break
    log(push, started, outcomes)
    return len(outcomes) - bool(reason), reason


def log(push, started, outcomes):
    """Appends one line of JSON per push, before the answer."""
    if options.log:
        line = {name: push[name] for name in ("pipeline", "bot", "fence", "attempt")}
        line |= {"started": started, "ended": time.time_ns() // 1000, "events": outcomes}
        with log_lock:
            log_file.write(json.dumps(line) + "\n")
            log_file.flush()


def complete_accepted():
    """Handles pushes that were answered with 202, and completes or fails their leases."""
    while True:
        push = accepted.get()
        done, reason = work(push)
        what = "fail" if reason else "complete"
        body = {"ack": done, "reason": reason} if reason else {"ack": done}
        url = f"{options.fairlane}/v1/leases/{push['lease']}/{what}"
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        for pause in (1, 2, 4, 8, None):
            try:
                urllib.request.urlopen(request, timeout=10).close()
            except OSError as error:  # 409: the lease has ended, and the events come again
                code = getattr(error, "code", 503)
                if pause and (code == 429 or code >= 500):
                    time.sleep(pause)  # a repeated call does no harm
                    continue
                print(f"{push['bot']}: {error}", flush=True)
            break


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True  # headers and body are two writes
    timeout = 60

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            pass  # the connection broke: Fairlane sends the events again

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            push = json.loads(body)
            genuine = is_signed(self.headers, body, push["bot"])
        except (ValueError, KeyError, TypeError):
            return self.answer(400, {"error": "this is no push"})
        if not genuine:
            return self.answer(401, {"error": "the signature is wrong"})
        if options.fairlane:
            accepted.put(push)
            return self.answer(202, {})
        done, reason = work(push)
        if reason and done == 0:
            return self.answer(500, {"error": reason})
        self.answer(200, {"ack": done})

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # connections that wait to be accepted


parser = argparse.ArgumentParser(description="Receives Fairlane's pushes.")
parser.add_argument("--port", type=int, default=9000, help="0: any free one, which is printed")
parser.add_argument("--secret", action="append", default=[], help="of `fairlane secret --bot B`")
parser.add_argument("--operator-secret", action="append", default=[], help="of callbacks.secrets")
parser.add_argument("--async", metavar="URL", dest="fairlane", help="answer 202, and complete at this Fairlane")
parser.add_argument("--fail", type=float, default=0, help="share of calls that fail, 0 to 1")
parser.add_argument("--log", metavar="FILE", help="append a line of JSON per push")
options = parser.parse_args()
seen, accepted, log_lock = Seen(), queue.Queue(), threading.Lock()
log_file = open(options.log, "a") if options.log else None
for _ in range(4):
    threading.Thread(target=complete_accepted, daemon=True).start()
server = Server(("127.0.0.1", options.port), Receiver)
print(f"listening on http://127.0.0.1:{server.server_port}/", flush=True)
server.serve_forever()
