// One side of another queue under a campaign of faults. `fairlane-bench peers` starts it.
//
//   node campaign.mjs SYSTEM feed|work '{"socket":…,"history":…,…}'
//
//   feed  adds each event of the file when it is due, and repeats that until it is acknowledged.
//         It prints `ready` when it begins, and ends after the last acknowledgement.
//   work  handles events until it is killed, or until the bench has ended
//
// Each start, end and acknowledgement is a line of the history, written before anything else happens.
// All times are microseconds of the monotonic clock, which all processes of a machine share.

import { openSync, readFileSync, writeFileSync, writeSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

const [system, role, text] = process.argv.slice(2);
const options = JSON.parse(text);
const { open } = await import(system.startsWith("bullmq") ? "./bullmq.mjs" : "./groupmq.mjs");

// The bench writes nothing. The pipe ends with it.
process.stdin.on("end", () => process.exit(1)).resume();

const history = openSync(options.history, "a");
const now = () => Number(process.hrtime.bigint() / 1_000n);
const tenantOf = (event) => Number(event.botid.slice("bot-".length));
const note = (kind, ...fields) => writeSync(history, `${[kind, ...fields].join("\t")}\n`);

async function feed(queue) {
  const producer = await queue.producer(tenantOf);
  const tenants = new Map();
  for (const line of readFileSync(options.events, "utf8").split("\n").filter(Boolean)) {
    const due = JSON.parse(line);
    if (!tenants.has(due.tenant)) tenants.set(due.tenant, []);
    tenants.get(due.tenant).push(due);
  }
  process.stdout.write("ready\n");
  const started = now();
  const addAll = async (events) => {
    for (const { after, tenant, position, event } of events) {
      const early = started + after - now();
      if (early > 0) await sleep(early / 1_000);
      for (;;) {
        try {
          await producer.addOne(event, `bot-${tenant}-${position}`);
          break;
        } catch (error) {
          console.error(error);
          await sleep(50);
        }
      }
      note("S", tenant, position, started + after, now());
    }
  };
  await Promise.all([...tenants.values()].map(addAll));
  process.exit(0);
}

async function work(queue) {
  const handle = async (event) => {
    note("B", tenantOf(event), event.id, now());
    await sleep(options.handling_ms);
    note("E", tenantOf(event), event.id, now());
  };
  const worker = await queue.worker(tenantOf, handle, () => {});
  worker.start();
  writeFileSync(options.ready, "");
}

await { feed, work }[role](await open(system, role, options));
