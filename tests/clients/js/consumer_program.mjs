// A worker of sqs-consumer with its heartbeat.
//
//     node consumer_program.mjs CLIENTS SETTINGS
//
// SETTINGS is JSON; tests/clients/test_sqs_workers.py says what is in it, and what a job is.
import { appendFileSync, existsSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const [clients, given] = process.argv.slice(2);
const load = createRequire(`${clients}/`);
const { Consumer } = load("sqs-consumer");
const { SQSClient } = load("@aws-sdk/client-sqs");
const settings = JSON.parse(given);

const record = (kind, job) => appendFileSync(settings.record, `${kind} ${job.id} ${process.pid}\n`);

const consumer = Consumer.create({
  queueUrl: settings.url,
  sqs: new SQSClient({ endpoint: settings.endpoint }),
  batchSize: 5,
  waitTimeSeconds: 20,
  visibilityTimeout: settings.visibility_seconds,
  heartbeatInterval: 1,
  pollingCompleteWaitTimeMs: 10_000,
  handleMessage: async (message) => {
    const job = JSON.parse(message.Body);
    record("begin", job);
    if (job.crash && !existsSync(job.crash)) {
      writeFileSync(job.crash, "");
      process.kill(process.pid, "SIGKILL");
    }
    await sleep(1000 * (job.seconds ?? 0));
    record("done", job);
    return message;
  },
});

// An error that sqs-consumer reports ends the worker, and so the test: the server gave no cause for one.
for (const event of ["error", "processing_error", "timeout_error"]) {
  consumer.on(event, (error) => {
    if (!consumer.status.isRunning) return;
    console.error(error);
    process.exit(1);
  });
}
process.once("SIGTERM", () => {
  consumer.on("stopped", () => process.exit(0));
  consumer.stop({ abort: true });
});
consumer.start();
