// GroupMQ: one queue, with a group for each tenant.

import { Queue, Worker } from "groupmq";
import { Redis } from "ioredis";

// With `lock_ms`, workers take over from others after this time, and a job that was added twice is one.
export async function open(_, role, { socket, batch, concurrency, lock_ms }) {
  // Only bulk enqueueing waits for a full batch. A single event would wait for nothing.
  const isBulk = role === "add";
  const redis = new Redis({ path: socket, maxRetriesPerRequest: null });
  const queue = new Queue({
    redis,
    namespace: "bench",
    // A job that is removed is forgotten, and its id with it.
    keepCompleted: lock_ms ? 100_000 : 0,
    keepFailed: 0,
    // A job that faults hit often would otherwise be given up.
    ...(lock_ms ? { jobTimeoutMs: lock_ms, maxAttempts: 100 } : {}),
    ...(isBulk ? { autoBatch: { size: batch, maxWaitMs: 1 } } : {}),
  });
  await redis.ping();
  return {
    settings: {
      add: `autoBatch of ${batch}`,
      pace: "add, one call per event",
      work: `one worker, concurrency ${concurrency}, keepCompleted 0`,
    }[role],
    producer: async (tenantOf) => ({
      addOne: (data, jobId) => queue.add({ groupId: `bot-${tenantOf(data)}`, data, jobId }),
      add: (events) =>
        Promise.all(events.map((data) => queue.add({ groupId: `bot-${tenantOf(data)}`, data }))),
    }),
    worker: async (_, handle, completed) => ({
      // A worker starts when it is made.
      start: () => {
        const worker = new Worker({
          queue,
          concurrency,
          handler: (job) => handle(job.data),
          onError: (error) => console.error(error),
          ...(lock_ms ? { stalledInterval: 1_000, stalledGracePeriod: 0, maxStalledCount: 100 } : {}),
        });
        worker.on("completed", (job) => completed(job.data));
        worker.on("error", (error) => console.error(error));
      },
    }),
  };
}
