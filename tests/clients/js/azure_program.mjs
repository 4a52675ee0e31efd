// npm's @azure/storage-queue, unmodified, through all that a queue does.
//
//     node azure_program.mjs CLIENTS CONNECTION_STRING
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [clients, connection] = process.argv.slice(2);
const { QueueServiceClient, RestError } = createRequire(`${clients}/`)("@azure/storage-queue");

// No second attempt: each answer is seen as it is.
const service = QueueServiceClient.fromConnectionString(connection, { retryOptions: { maxTries: 1 } });

async function refused(call, statusCode, code) {
  await assert.rejects(call, (error) => {
    assert.ok(error instanceof RestError, error);
    assert.deepEqual([error.statusCode, error.code], [statusCode, code]);
    assert.ok(error.details.message);
    return true;
  });
}

async function collect(iterator) {
  const found = [];
  for await (const each of iterator) found.push(each);
  return found;
}

async function queues() {
  const queue = service.getQueueClient("jobs");
  await refused(queue.getProperties(), 404, "QueueNotFound");
  assert.equal((await queue.create({ metadata: { team: "blue" } }))._response.status, 201);
  assert.equal((await queue.createIfNotExists({ metadata: { team: "blue" } })).succeeded, false);
  await refused(queue.create({ metadata: { team: "red" } }), 409, "QueueAlreadyExists");
  await queue.setMetadata({ team: "red", size: "2" });
  const properties = await queue.getProperties();
  assert.deepEqual([properties.metadata, properties.approximateMessagesCount], [{ team: "red", size: "2" }, 0]);
  assert.equal(await queue.exists(), true);
  await refused(service.createQueue("Not-A-Name"), 400, "InvalidResourceName");

  for (const number of [1, 2, 3, 4, 5]) await service.createQueue(`page-${number}`);
  const sizes = [];
  const names = [];
  for await (const page of service.listQueues({ prefix: "page-" }).byPage({ maxPageSize: 2 })) {
    sizes.push(page.queueItems.length);
    names.push(...page.queueItems.map((each) => each.name));
  }
  assert.deepEqual([sizes, names], [[2, 2, 1], ["page-1", "page-2", "page-3", "page-4", "page-5"]]);
  const [listed] = await collect(service.listQueues({ prefix: "jobs", includeMetadata: true }));
  assert.deepEqual(listed.metadata, { team: "red", size: "2" });
  await service.deleteQueue("page-1");
  await refused(service.getQueueClient("page-1").sendMessage("x"), 404, "QueueNotFound");
}

async function messages() {
  const queue = service.getQueueClient("jobs");
  const text = "h\u00e9llo <&> \"'\u{1F600}\n";
  const sent = await queue.sendMessage(text, { messageTimeToLive: 3600 });
  assert.equal(sent.expiresOn - sent.insertedOn, 3_600_000);
  const [peeked] = (await queue.peekMessages({ numberOfMessages: 32 })).peekedMessageItems;
  assert.deepEqual([peeked.messageId, peeked.messageText, peeked.dequeueCount], [sent.messageId, text, 0]);

  const [held] = (await queue.receiveMessages({ visibilityTimeout: 60 })).receivedMessageItems;
  assert.deepEqual([held.messageId, held.messageText, held.dequeueCount], [sent.messageId, text, 1]);
  assert.equal((await queue.receiveMessages()).receivedMessageItems.length, 0);
  await refused(queue.deleteMessage(sent.messageId, sent.popReceipt), 404, "MessageNotFound");

  const updated = await queue.updateMessage(held.messageId, held.popReceipt, "step 2", 600);
  assert.notEqual(updated.popReceipt, held.popReceipt);
  await refused(queue.updateMessage(held.messageId, held.popReceipt, "lost", 600), 404, "MessageNotFound");
  const released = await queue.updateMessage(held.messageId, updated.popReceipt, undefined, 0);
  const [again] = (await queue.receiveMessages()).receivedMessageItems;
  assert.deepEqual([again.messageText, again.dequeueCount], ["step 2", 2]);
  await refused(queue.deleteMessage(again.messageId, released.popReceipt), 404, "MessageNotFound");
  assert.equal((await queue.deleteMessage(again.messageId, again.popReceipt))._response.status, 204);
  await refused(queue.deleteMessage(again.messageId, again.popReceipt), 404, "MessageNotFound");

  const put = await queue.sendMessage("taken back", { visibilityTimeout: 600, messageTimeToLive: -1 });
  assert.equal(put.expiresOn.getUTCFullYear(), 9999);
  await queue.deleteMessage(put.messageId, put.popReceipt);

  for (let number = 0; number < 40; number += 1) await queue.sendMessage(String(number));
  const first = (await queue.receiveMessages({ numberOfMessages: 32 })).receivedMessageItems;
  const rest = (await queue.receiveMessages({ numberOfMessages: 32 })).receivedMessageItems;
  assert.deepEqual([...first, ...rest].map((each) => Number(each.messageText)), [...Array(40).keys()]);
  assert.equal(new Set([...first, ...rest].map((each) => each.popReceipt)).size, 40);
  await queue.clearMessages();
  await refused(queue.deleteMessage(first[0].messageId, first[0].popReceipt), 404, "MessageNotFound");
  assert.equal((await queue.getProperties()).approximateMessagesCount, 0);

  const range = [400, "OutOfRangeQueryParameterValue"];
  await refused(queue.receiveMessages({ numberOfMessages: 33 }), ...range);
  await refused(queue.receiveMessages({ visibilityTimeout: 0 }), ...range);
  await refused(queue.sendMessage("x", { visibilityTimeout: 604_801 }), ...range);
  await refused(queue.sendMessage("x".repeat(65_537)), 413, "RequestBodyTooLarge");
  await refused(queue.sendMessage("\u0001"), 400, "InvalidXmlDocument");
  await refused(queue.deleteMessage(sent.messageId, "garbage"), 400, "InvalidQueryParameterValue");
}

async function services() {
  const queue = service.getQueueClient("jobs");
  const rule = {
    allowedOrigins: "https://example.com", allowedMethods: "GET", allowedHeaders: "x-ms-*", exposedHeaders: "x-ms-*",
    maxAgeInSeconds: 5,
  };
  await service.setProperties({ cors: [rule] });
  assert.deepEqual((await service.getProperties()).cors, [rule]);
  const policy = { startsOn: new Date("2026-01-01"), expiresOn: new Date("2100-01-01"), permissions: "raup" };
  await queue.setAccessPolicy([{ id: "one", accessPolicy: policy }]);
  assert.deepEqual((await queue.getAccessPolicy()).signedIdentifiers, [{ id: "one", accessPolicy: policy }]);

  const { QueueClient, AnonymousCredential } = createRequire(`${clients}/`)("@azure/storage-queue");
  const shared = new QueueClient(queue.generateSasUrl({ identifier: "one" }), new AnonymousCredential());
  await shared.sendMessage("by SAS");
  assert.equal((await shared.peekMessages()).peekedMessageItems[0].messageText, "by SAS");
  const reader = new QueueClient(
    service.getQueueClient("jobs").generateSasUrl({ permissions: "r", expiresOn: new Date("2100-01-01") }),
    new AnonymousCredential(),
  );
  await refused(reader.sendMessage("x"), 403, "AuthorizationPermissionMismatch");
  const forged = connection.replace(/AccountKey=[^;]*/, `AccountKey=${Buffer.alloc(64).toString("base64")}`);
  const stranger = QueueServiceClient.fromConnectionString(forged, { retryOptions: { maxTries: 1 } });
  await refused(stranger.getProperties(), 403, "AuthenticationFailed");
  assert.equal((await queue.deleteIfExists()).succeeded, true);
  assert.equal(await queue.exists(), false);
}

await queues();
await messages();
await services();
console.log("done");
