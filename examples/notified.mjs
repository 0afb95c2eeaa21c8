#!/usr/bin/env node
// Receives Fairlane's delayed notifications, and accepts only those with a valid signature.
//
//     FAIRLANE_SECRET="$(fairlane secret --bot shop-7)" node notified.mjs 9000
//
// A notification may arrive again after a crash, with the same webhook-id: store the id together
// with its effect.
import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const TOLERANCE = 300; // maximum difference between the request's time and ours, in seconds
const SECRETS = process.env.FAIRLANE_SECRET.trim().split(/\s+/);

// Whether Fairlane sent this (Standard Webhooks): one of its signatures is valid and recent.
function isSigned(headers, body) {
  const id = headers["webhook-id"] ?? "";
  const stamp = headers["webhook-timestamp"] ?? "";
  if (!/^\d+$/.test(stamp) || Math.abs(Date.now() / 1000 - Number(stamp)) > TOLERANCE) return false;
  const given = (headers["webhook-signature"] ?? "").split(" ").map((text) => Buffer.from(text));
  return SECRETS.some((secret) => {
    const key = Buffer.from(secret.replace(/^whsec_/, ""), "base64");
    const hmac = createHmac("sha256", key).update(`${id}.${stamp}.`).update(body);
    const ours = Buffer.from(`v1,${hmac.digest("base64")}`);
    return given.some((text) => text.length === ours.length && timingSafeEqual(text, ours));
  });
}

const server = createServer(async (request, response) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  const body = Buffer.concat(parts);
  const good = isSigned(request.headers, body);
  if (good) console.log(request.headers["webhook-id"], request.method, request.url, body.toString());
  // 2xx: delivered. 410: never send it again. Any other status: retry, with growing pauses.
  response.writeHead(good ? 204 : 401).end();
});
server.listen(Number(process.argv[2]), "127.0.0.1");
