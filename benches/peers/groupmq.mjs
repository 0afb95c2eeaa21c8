// GroupMQ: one queue, with a group for each tenant.

import { Queue, Worker } from "groupmq";
import { Redis } from "ioredis";

// With `lock_ms`, workers take over from others after this time, and a job that was added twice is one.
export async function open(_, role, { socket, batch, concurrency, lock_ms }) {
  // Only bulk enqueueing waits for a full batch. A single event would wait for nothing.
  const isBulk = role === "add";
  const connect = () => {
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
    return { redis, queue };
  };
  let { redis, queue } = connect();
  await redis.ping();
  // GroupMQ loads its scripts once for each connection. After a restart of Redis, every call fails with
  // NOSCRIPT. Without help, producers and workers would stand still from then on.
  const isForgotten = (error) => String(error).includes("NOSCRIPT");
  if (lock_ms && role === "work") {
    const watch = (client) => {
      const [evalsha, duplicate] = [client.evalsha.bind(client), client.duplicate.bind(client)];
      client.evalsha = (...call) =>
        evalsha(...call).catch((error) => {
          console.error(error);
          // The bench starts the worker again, as a service manager does.
          if (isForgotten(error)) process.exit(1);
          throw error;
        });
      // The worker makes further connections from this one.
      client.duplicate = (...options) => watch(duplicate(...options));
      return client;
    };
    watch(redis);
  }
  const addOne = async (job) => {
    const used = queue;
    try {
      await used.add(job);
    } catch (error) {
      if (isForgotten(error) && used === queue) {
        redis.disconnect();
        ({ redis, queue } = connect());
      }
      throw error;
    }
  };
  return {
    settings: {
      add: `autoBatch of ${batch}`,
      pace: "add, one call per event",
      work: `one worker, concurrency ${concurrency}, keepCompleted 0`,
    }[role],
    producer: async (tenantOf) => ({
      addOne: (data, jobId) => addOne({ groupId: `bot-${tenantOf(data)}`, data, jobId }),
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
