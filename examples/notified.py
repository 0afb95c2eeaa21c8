#!/usr/bin/env python3
"""Receives Fairlane's delayed notifications, and accepts only those with a valid signature.

    FAIRLANE_SECRET="$(fairlane secret --bot shop-7)" python3 notified.py 9000

A notification may arrive again after a crash, with the same webhook-id: store the id together with
its effect.
"""
import base64
import hashlib
import hmac
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOLERANCE = 300  # maximum difference between the request's time and ours, in seconds
SECRETS = os.environ["FAIRLANE_SECRET"].split()


def is_signed(headers, body: bytes) -> bool:
    """Whether Fairlane sent this (Standard Webhooks): one of its signatures is valid and recent."""
    name, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not stamp.isdigit() or abs(time.time() - int(stamp)) > TOLERANCE:
        return False
    text = f"{name}.{stamp}.".encode() + body
    for secret in SECRETS:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        ours = "v1," + base64.b64encode(hmac.digest(key, text, hashlib.sha256)).decode()
        for given in headers.get("webhook-signature", "").split():
            if hmac.compare_digest(ours, given):
                return True
    return False


class Receiver(BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        good = is_signed(self.headers, body)
        if good:
            print(self.headers["webhook-id"], self.command, self.path, body.decode(), flush=True)
        # 2xx: delivered. 410: never send it again. Any other status: retry, with growing pauses.
        self.send_response(204 if good else 401)
        self.end_headers()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
