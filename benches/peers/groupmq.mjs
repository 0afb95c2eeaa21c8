// GroupMQ: one queue, with a group for each tenant.

import { Queue, Worker } from "groupmq";
import { Redis } from "ioredis";

export async function open(_, role, { socket, batch, concurrency }) {
  // Only bulk enqueueing waits for a full batch. A single event would wait for nothing.
  const isBulk = role === "add";
  const redis = new Redis({ path: socket, maxRetriesPerRequest: null });
  const queue = new Queue({
    redis,
    namespace: "bench",
    keepCompleted: 0,
    keepFailed: 0,
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
        });
        worker.on("completed", (job) => completed(job.data));
        worker.on("error", (error) => console.error(error));
      },
    }),
  };
}
