// One side of another queue: adds events to it, or handles them. `fairlane-bench peers` starts it.
//
//   node main.mjs SYSTEM add|pace|work '{"socket":…,"events":…,"log":…,…}'
//
//   add   adds all events of the file in batches, and reports when Redis has confirmed the last
//   pace  adds each event of the file when it is due, and writes the due time into the event
//   work  handles events until it is told to stop, and writes its log
//
// It prints a JSON object per line: {"state":"ready",…} when its connections are open,
// {"state":"progress","done":N}, and {"state":"done","done":N,"seconds":S}. It starts to work after
// the line `go`. A worker writes its log and ends after the line `stop`.

import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

const [system, role, text] = process.argv.slice(2);
const options = JSON.parse(text);
const { open } = await import(system.startsWith("bullmq") ? "./bullmq.mjs" : "./groupmq.mjs");

const say = (state, fields = {}) => process.stdout.write(`${JSON.stringify({ state, ...fields })}\n`);
const version = (name) => createRequire(import.meta.url)(`${name}/package.json`).version;
const versions = {
  node: process.versions.node,
  ioredis: version("ioredis"),
  [system.startsWith("bullmq") ? "bullmq" : "groupmq"]: version(system.startsWith("bullmq") ? "bullmq" : "groupmq"),
};
// Microseconds since 1970. The same clock in the process that adds and in the one that handles.
const now = () => (performance.timeOrigin + performance.now()) * 1_000;
const tenantOf = (event) => Number(event.botid.slice("bot-".length));

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const told = async (word) => {
  const line = await lines.next();
  // The bench has ended, perhaps with an error.
  if (line.done) process.exit(1);
  if (line.value !== word) throw new Error(`told ${line.value} instead of ${word}`);
};

const load = () =>
  readFileSync(options.events, "utf8").split("\n").filter(Boolean).map((line) => JSON.parse(line));

async function add(queue) {
  const events = load();
  const producer = await queue.producer(tenantOf);
  say("ready", { versions, settings: queue.settings });
  await told("go");
  const started = performance.now();
  for (let at = 0; at < events.length; at += options.batch) {
    await producer.add(events.slice(at, at + options.batch));
  }
  say("done", { done: events.length, seconds: (performance.now() - started) / 1_000 });
}

async function pace(queue) {
  const events = load();
  const producer = await queue.producer(tenantOf);
  say("ready", { versions, settings: queue.settings });
  await told("go");
  const [started, origin, step] = [performance.now(), now(), 1_000_000 / options.rate];
  const added = [];
  for (let at = 0; at < events.length; ) {
    const early = origin + at * step - now();
    if (early > 0) await sleep(early / 1_000);
    const due = [];
    for (; at < events.length && origin + at * step <= now(); at++) {
      events[at].data.sent = Math.floor(origin + at * step);
      due.push(events[at]);
    }
    // The next events do not wait for these. Otherwise a slow answer would delay them.
    if (due.length > 0) added.push(producer.add(due));
  }
  await Promise.all(added);
  say("done", { done: events.length, seconds: (performance.now() - started) / 1_000 });
}

async function work(queue) {
  // Four numbers for each start and each end of a handling: the tenant, twice the position (plus 1
  // for an end), the microseconds since the event was due, and those since the worker started.
  let [log, length] = [new Uint32Array(8 * options.total), 0];
  const note = (tenant, step, wait) => {
    if (length + 4 > log.length) {
      const longer = new Uint32Array(2 * log.length + 4);
      longer.set(log);
      log = longer;
    }
    log[length++] = tenant;
    log[length++] = step;
    log[length++] = wait;
    log[length++] = (performance.now() - started) * 1_000;
  };
  const seen = new Uint8Array(options.tenants * options.stride);
  let [done, started, last] = [0, 0, 0];

  const handle = async (event) => {
    const [tenant, step] = [tenantOf(event), 2 * Number(event.id)];
    note(tenant, step, Math.max(0, now() - event.data.sent));
    if (options.handling_ms > 0) await sleep(options.handling_ms);
    note(tenant, step + 1, 0);
  };
  const completed = (event) => {
    const place = tenantOf(event) * options.stride + Number(event.id);
    if (seen[place]) return;
    seen[place] = 1;
    done += 1;
    last = performance.now();
    if (done === options.total) say("done", { done, seconds: (last - started) / 1_000 });
  };

  const worker = await queue.worker(tenantOf, handle, completed);
  say("ready", { versions, settings: queue.settings });
  await told("go");
  started = performance.now();
  worker.start();
  const progress = setInterval(() => done < options.total && say("progress", { done }), 200);
  await told("stop");
  clearInterval(progress);
  writeFileSync(options.log, new Uint8Array(log.buffer, 0, 4 * length));
  say("done", { done, seconds: last > 0 ? (last - started) / 1_000 : 0 });
}

await { add, pace, work }[role](await open(system, role, options));
// Connections and timers of the queue would keep the process alive. Its Redis is removed next.
process.exit(0);
