// npm's @alicloud/mns, unmodified, through the life of a queue and a topic.
// node alicloud_mns.cjs ENDPOINT ACCESS_KEY_ID ACCESS_KEY_SECRET
'use strict';
const assert = require('assert');
const MNSClient = require('@alicloud/mns');

const [endpoint, accessKeyID, accessKeySecret] = process.argv.slice(2);
const client = new MNSClient('123456', { endpoint, accessKeyID, accessKeySecret });
const NAME = 'node-queue';

async function fails(call, name) {
  await assert.rejects(call, (error) => {
    assert.strictEqual(error.name, `MNS${name}Error`);
    assert.match(error.message, /requestid: .{24}, hostid: http/);
    return true;
  });
}

async function main() {
  const made = await client.createQueue(NAME, { VisibilityTimeout: 40, LoggingEnabled: true });
  assert.strictEqual(made.code, 201);
  assert.strictEqual(made.headers.location, `${endpoint}/queues/${NAME}`);
  assert.strictEqual((await client.createQueue(NAME, { VisibilityTimeout: 40, LoggingEnabled: true })).code, 204);
  await fails(client.createQueue(NAME), 'QueueAlreadyExist');
  assert.strictEqual((await client.setQueueAttributes(NAME, { VisibilityTimeout: 50 })).code, 204);
  const attributes = await client.getQueueAttributes(NAME);
  assert.strictEqual(attributes.body.VisibilityTimeout, '50');
  assert.strictEqual(attributes.body.QueueName, NAME);

  const listed = await client.listQueue(undefined, 1, 'node-');
  assert.deepStrictEqual(listed.body.map((each) => each.QueueName), [NAME]);
  await fails(client.getQueueAttributes('none'), 'QueueNotExist');

  const sent = await client.sendMessage(NAME, { MessageBody: 'h\u00e9llo', Priority: 2, DelaySeconds: 0 });
  assert.strictEqual(sent.code, 201);
  assert.match(sent.body.MessageId, /^[0-9A-F]{32}$/);
  const peeked = await client.peekMessage(NAME);
  assert.strictEqual(peeked.body.MessageBody, 'h\u00e9llo');
  const got = await client.receiveMessage(NAME, 5);
  assert.deepStrictEqual([got.body.MessageId, got.body.DequeueCount], [sent.body.MessageId, '1']);
  const changed = await client.changeMessageVisibility(NAME, got.body.ReceiptHandle, 60);
  assert.strictEqual(changed.code, 200);
  await fails(client.deleteMessage(NAME, got.body.ReceiptHandle), 'MessageNotExist');
  assert.strictEqual((await client.deleteMessage(NAME, changed.body.ReceiptHandle)).code, 204);
  await fails(client.receiveMessage(NAME), 'MessageNotExist');
  await fails(client.deleteMessage(NAME, '1-ODU4OTkzNDU5My0xNTI0MTIzMzQ4LTEtOA=='), 'ReceiptHandleError');

  const batch = await client.batchSendMessage(NAME, [
    { Message: { MessageBody: 'a' } }.Message,
    { MessageBody: 'b', Priority: 1 },
  ]);
  assert.strictEqual(batch.code, 201);
  assert.strictEqual(batch.body.length, 2);
  assert.strictEqual((await client.batchPeekMessage(NAME, 16)).body.length, 2);
  const both = await client.batchReceiveMessage(NAME, 16, 5);
  assert.deepStrictEqual(both.body.map((each) => each.MessageBody), ['b', 'a']);
  const handles = both.body.map((each) => each.ReceiptHandle);
  const failed = await client.batchDeleteMessage(NAME, [...handles, 'garbage']);
  assert.strictEqual(failed.code, 404);
  assert.deepStrictEqual(failed.body.map((each) => each.ErrorCode), ['ReceiptHandleError']);
  await fails(client.batchReceiveMessage(NAME, 16), 'MessageNotExist');

  const partial = await client.batchSendMessage(NAME, [{ MessageBody: 'good' }, { MessageBody: 'bad', Priority: 99 }]);
  assert.ok(partial.code >= 400);
  assert.deepStrictEqual(partial.body.map((each) => each.ErrorCode), [undefined, 'InvalidArgument']);

  assert.strictEqual((await client.createTopic('node-topic')).headers.location, `${endpoint}/topics/node-topic`);
  assert.strictEqual((await client.setTopicAttributes('node-topic', { MaximumMessageSize: 2048 })).code, 204);
  assert.strictEqual((await client.getTopicAttributes('node-topic')).body.MaximumMessageSize, '2048');
  assert.deepStrictEqual((await client.listTopic(undefined, 1, 'node')).body.map((each) => each.TopicName), ['node-topic']);
  assert.strictEqual((await client.publishMessage('node-topic', { MessageBody: 'news' })).code, 201);
  assert.strictEqual((await client.deleteQueue(NAME)).code, 204);

  const stranger = new MNSClient('123456', { endpoint, accessKeyID: 'AKIDNOBODY', accessKeySecret });
  if (process.argv[5] === 'checked') {
    await fails(stranger.getQueueAttributes(NAME), 'InvalidAccessKeyId');
  }
  console.log('done');
}

main().catch((error) => { console.error(error); process.exit(1); });
