// BullMQ: one queue for all tenants (`bullmq`), or a queue and a worker for each tenant
// (`bullmq-per-tenant`). Both handle one job of a queue at a time, because more would lose the order.

import { Queue, Worker } from "bullmq";
import { Redis } from "ioredis";

// With `lock_ms`, workers take over from others after this time, and a job that was added twice is one.
export async function open(system, role, { socket, batch, tenants, lock_ms }) {
  // A job that is removed is forgotten, and its id with it.
  const kept = lock_ms ? { age: 600 } : { count: 0 };
  const isPerTenant = system === "bullmq-per-tenant";
  const names = isPerTenant ? Array.from({ length: tenants }, (_, tenant) => `bot-${tenant}`) : ["bench"];
  const nameOf = (tenant) => (isPerTenant ? `bot-${tenant}` : "bench");
  // All queues share a connection. A worker opens another one for its blocking command.
  const connection = new Redis({ path: socket, maxRetriesPerRequest: null });
  connection.setMaxListeners(0);
  await connection.ping();
  const workers = isPerTenant ? "a worker per tenant" : "one worker";
  return {
    settings: {
      add: `addBulk, ${batch} events at a time`,
      pace: "addBulk of the due events",
      work: `${workers}, concurrency 1, removeOnComplete`,
    }[role],
    producer: async (tenantOf) => {
      const queues = new Map();
      for (const name of names) {
        const defaultJobOptions = { removeOnComplete: lock_ms ? kept : true, removeOnFail: true };
        const queue = new Queue(name, { connection, defaultJobOptions });
        queue.on("error", (error) => console.error(error));
        queues.set(name, queue);
      }
      await Promise.all([...queues.values()].map((queue) => queue.waitUntilReady()));
      // Several processes would handle jobs of a queue beside each other.
      if (lock_ms) await Promise.all([...queues.values()].map((queue) => queue.setGlobalConcurrency(1)));
      return {
        addOne: (data, jobId) => queues.get(nameOf(tenantOf(data))).add(data.type, data, { jobId }),
        add: (events) => {
          const jobs = new Map();
          for (const data of events) {
            const name = nameOf(tenantOf(data));
            const found = jobs.get(name);
            if (found) found.push({ name: data.type, data });
            else jobs.set(name, [{ name: data.type, data }]);
          }
          return Promise.all([...jobs].map(([name, bulk]) => queues.get(name).addBulk(bulk)));
        },
      };
    },
    worker: async (_, handle, completed) => {
      const workers = names.map((name) => {
        const worker = new Worker(name, (job) => handle(job.data), {
          connection,
          concurrency: 1,
          autorun: false,
          removeOnComplete: kept,
          removeOnFail: { count: 0 },
          // A job that faults hit often would otherwise be given up.
          ...(lock_ms ? { lockDuration: lock_ms, stalledInterval: lock_ms / 2, maxStalledCount: 100 } : {}),
        });
        worker.on("completed", (job) => completed(job.data));
        worker.on("failed", (_, error) => console.error(error));
        worker.on("error", (error) => console.error(error));
        return worker;
      });
      await Promise.all(workers.map((worker) => worker.waitUntilReady()));
      return { start: () => workers.forEach((worker) => void worker.run()) };
    },
  };
}
