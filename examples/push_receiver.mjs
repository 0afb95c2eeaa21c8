#!/usr/bin/env node
// A receiver for Fairlane's pushes, with Node's standard library only (18.3 or later).
//
// fairlane.toml:                              then:
//     [callbacks]                                 node push_receiver.mjs --port 9000 \
//     secrets = ["whsec_…"]                           --secret "$(fairlane secret --bot shop-7)"
//     [pipelines.orders]
//     handler = "push"                            Without --secret no signature is checked: for
//     events = ["order.*"]                        tests only. A receiver of many bots needs the
//     url = "http://127.0.0.1:9000/"              operator's secret: --operator-secret whsec_…
//
// Put your own work into handle(). It gets the events of one bot in order, and never two calls for
// one bot concurrently. An event may arrive again after a crash, with the same id: see done().
//
// --async http://FAIRLANE:8080 answers 202 and completes the lease later.
import { createHmac, timingSafeEqual } from "node:crypto";
import { createWriteStream } from "node:fs";
import { createServer } from "node:http";
import { parseArgs } from "node:util";

const TOLERANCE = 300; // maximum difference between the request's time and ours, in seconds
const ID = /^[A-Za-z0-9_-]{1,128}$/; // no dot: "id.time.body" would have a second reading
const KNOWN = 100_000; // ids that are remembered

// Handles one event: put your own work here. Throw if the event cannot be handled now: Fairlane
// then sends it and the events after it again.
async function handle(bot, event) {
  console.log(bot, event.type, event.id, JSON.stringify(event.data ?? null));
}

// The ids of the last handled events, which are lost when the process ends. If an effect must not
// happen twice, store the id and the effect in one transaction.
const seen = new Set();

function done(name) {
  seen.add(name);
  if (seen.size > KNOWN) seen.delete(seen.values().next().value);
}

const { values: options } = parseArgs({
  options: {
    port: { type: "string", default: "9000" }, // 0: a free port, which is printed
    secret: { type: "string", multiple: true, default: [] }, // from `fairlane secret --bot B`
    "operator-secret": { type: "string", multiple: true, default: [] }, // from callbacks.secrets
    async: { type: "string" }, // answer 202, and complete at this Fairlane
    fail: { type: "string", default: "0" }, // share of calls that fail, 0 to 1
    log: { type: "string" }, // append a line of JSON per push
  },
});
const key = (secret) => Buffer.from(secret.replace(/^whsec_/, ""), "base64");
const KEYS = options.secret.flatMap((text) => text.split(/\s+/)).filter(Boolean).map(key);
const OPERATORS = options["operator-secret"].map(key);
const log = options.log && createWriteStream(options.log, { flags: "a" });

// Whether Fairlane sent this (Standard Webhooks): one of its signatures is valid and recent.
function isSigned(headers, body, bot) {
  const keys = KEYS.concat(OPERATORS.map((secret) => createHmac("sha256", secret).update(bot).digest()));
  if (keys.length === 0) return true;
  const id = headers["webhook-id"] ?? "";
  const stamp = headers["webhook-timestamp"] ?? "";
  if (!ID.test(id) || !/^\d+$/.test(stamp)) return false;
  if (Math.abs(Date.now() / 1000 - Number(stamp)) > TOLERANCE) return false;
  const given = (headers["webhook-signature"] ?? "").split(" ").map((text) => Buffer.from(text));
  return keys.some((secret) => {
    const hmac = createHmac("sha256", secret).update(`${id}.${stamp}.`).update(body);
    const ours = Buffer.from(`v1,${hmac.digest("base64")}`);
    return given.some((text) => text.length === ours.length && timingSafeEqual(text, ours));
  });
}

// Handles the events of a push in order. Returns how many are handled, and why it stopped early.
async function work(push) {
  const started = Date.now() * 1000;
  const outcomes = [];
  const unlucky = Math.random() < options.fail ? Math.floor(Math.random() * push.events.length) : -1;
  let reason = null;
  for (const [index, event] of push.events.entries()) {
    const name = JSON.stringify([push.pipeline, push.bot, event.source, event.id]);
    let outcome = seen.has(name) ? "repeat" : "done";
    try {
      if (index === unlucky) throw new Error("no luck");
      if (outcome === "done") {
        await handle(push.bot, event);
        done(name);
      }
    } catch (error) {
      outcome = "failed";
      reason = error.message || String(error);
    }
    outcomes.push({ id: event.id, outcome });
    if (reason !== null) break;
  }
  const { pipeline, bot, fence, attempt } = push;
  const line = { pipeline, bot, fence, attempt, started, ended: Date.now() * 1000, events: outcomes };
  if (log) await new Promise((written) => log.write(`${JSON.stringify(line)}\n`, written));
  return { ack: outcomes.length - (reason === null ? 0 : 1), reason };
}

// Handles a push that was answered with 202, and then completes or fails its lease.
async function complete(push) {
  const { ack, reason } = await work(push);
  const url = `${options.async}/v1/leases/${push.lease}/${reason === null ? "complete" : "fail"}`;
  for (const pause of [1, 2, 4, 8, null]) {
    let failure;
    try {
      const answer = await fetch(url, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(reason === null ? { ack } : { ack, reason }),
        signal: AbortSignal.timeout(10_000),
      });
      if (answer.ok) return;
      failure = `${answer.status} ${await answer.text()}`;
      // 409: the lease has ended, and Fairlane sends the events again.
      if (answer.status !== 429 && answer.status < 500) return console.error(`${push.bot}: ${failure}`);
    } catch (error) {
      failure = error.message;
    }
    if (pause === null) return console.error(`${push.bot}: ${failure}`);
    // A repeated call does no harm.
    await new Promise((resume) => setTimeout(resume, pause * 1000));
  }
}

async function answer(request, body) {
  let push;
  try {
    push = JSON.parse(body);
  } catch {}
  if (typeof push?.bot !== "string" || !Array.isArray(push.events)) {
    return [400, { error: "this is no push" }];
  }
  if (!isSigned(request.headers, body, push.bot)) return [401, { error: "the signature is wrong" }];
  if (options.async) {
    complete(push);
    return [202, {}];
  }
  const { ack, reason } = await work(push);
  return reason !== null && ack === 0 ? [500, { error: reason }] : [200, { ack }];
}

const server = createServer(async (request, response) => {
  try {
    const parts = [];
    for await (const part of request) parts.push(part);
    const [status, value] = await answer(request, Buffer.concat(parts));
    response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(value));
  } catch {
    response.destroy(); // the connection broke: Fairlane sends the events again
  }
});
server.listen(Number(options.port), "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}/`);
});
