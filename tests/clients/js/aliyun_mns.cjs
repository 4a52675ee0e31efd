// npm's aliyun-mns, unmodified, through the life of a queue and a topic. It sends no Content-Type, with a body neither, and
// writes the names of parameters with a small letter first.
// node aliyun_mns.cjs ENDPOINT ACCESS_KEY_ID ACCESS_KEY_SECRET
'use strict';
const assert = require('assert');
const MNS = require('aliyun-mns');

const [endpoint, accessKeyId, secretAccessKey] = process.argv.slice(2);
const mns = new MNS({ accessKeyId, secretAccessKey, endpoint, apiVersion: '2015-06-06' });
const NAME = 'aliyun-queue';

async function fails(call, code) {
  await assert.rejects(call, (error) => {
    assert.strictEqual(error.Code, code);
    assert.match(error.RequestId, /^[0-9A-F]{24}$/);
    return true;
  });
}

async function main() {
  const queue = mns.queue(NAME, { VisibilityTimeout: 40 });
  assert.strictEqual((await queue.create()).Code, 'Created');
  assert.strictEqual((await queue.create()).status, 204);
  await fails(mns.queue(NAME, { VisibilityTimeout: 41 }).create(), 'QueueAlreadyExist');
  assert.strictEqual((await mns.queue(NAME, { VisibilityTimeout: 50 }).create(true)).status, 204);
  const attributes = await queue.get();
  assert.deepStrictEqual([attributes.QueueName, attributes.VisibilityTimeout], [NAME, '50']);
  await mns.queue('aliyun-second').create();
  const first = await queue.list({ 'x-mns-prefix': 'aliyun-', 'x-mns-ret-number': '1' });
  assert.deepStrictEqual(first.queues, [NAME]);
  const second = await queue.list({ 'x-mns-prefix': 'aliyun-', 'x-mns-marker': first.nextMarker });
  assert.deepStrictEqual([second.queues, second.nextMarker], [['aliyun-second'], undefined]);
  await fails(mns.queue('none').get(), 'QueueNotExist');

  const messages = queue.message();
  const sent = await messages.send({ MessageBody: 'h\u00e9llo <&>', Priority: 2, DelaySeconds: 0 });
  assert.strictEqual(sent.status, 201);
  assert.strictEqual((await messages.peek()).MessageBody, 'h\u00e9llo <&>');
  const got = await messages.receive();
  assert.deepStrictEqual([got.MessageId, got.MessageBody, got.DequeueCount], [sent.MessageId, 'h\u00e9llo <&>', '1']);
  const changed = await messages.visibility(got.ReceiptHandle, 60);
  assert.strictEqual(changed.status, 200);
  await fails(messages.delete(got.ReceiptHandle), 'MessageNotExist');
  assert.strictEqual((await messages.delete(changed.ReceiptHandle)).status, 204);
  await fails(messages.receive(), 'MessageNotExist');

  const batch = await messages.send(['a', { MessageBody: 'b', Priority: 1 }]);
  assert.strictEqual(batch.Message.length, 2);
  assert.strictEqual((await messages.peek(16)).length, 2);
  const both = await messages.receive(16, 5);
  assert.deepStrictEqual(both.map((each) => each.MessageBody), ['b', 'a']);
  await assert.rejects(messages.delete(['garbage']), (error) => error.ErrorCode === 'ReceiptHandleError');
  assert.strictEqual((await messages.delete(both.map((each) => each.ReceiptHandle))).status, 204);
  await fails(messages.receive(16), 'MessageNotExist');

  const topic = mns.topic('aliyun-topic', { MaximumMessageSize: 2048 });
  assert.strictEqual((await topic.create()).status, 201);
  assert.strictEqual((await topic.get()).MaximumMessageSize, '2048');
  const subscription = topic.subscription('sub', {
    Endpoint: `acs:mns:cn:1:queues/${NAME}`, NotifyContentFormat: 'SIMPLIFIED',
  });
  assert.strictEqual((await subscription.subscribe()).status, 201);
  assert.strictEqual((await subscription.get()).NotifyContentFormat, 'SIMPLIFIED');
  assert.deepStrictEqual((await subscription.list()).subscriptions, ['sub']);
  assert.strictEqual((await topic.message().publish('news')).status, 201);
  assert.strictEqual((await messages.receive()).MessageBody, 'news');
  assert.strictEqual((await subscription.unsubscribe()).status, 204);
  assert.deepStrictEqual((await topic.list({ 'x-mns-prefix': 'aliyun' })).topics, ['aliyun-topic']);
  assert.strictEqual((await topic.delete()).status, 204);
  await fails(topic.get(), 'TopicNotExist');
  assert.strictEqual((await queue.delete()).status, 204);

  if (process.argv[5] === 'checked') {
    const stranger = new MNS({ accessKeyId: 'AKIDNOBODY', secretAccessKey, endpoint, apiVersion: '2015-06-06' });
    await fails(stranger.queue(NAME).get(), 'InvalidAccessKeyId');
  }
  console.log('done');
}

main().catch((error) => { console.error(error); process.exit(1); });
