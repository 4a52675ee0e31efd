// npm's ali-mns, unmodified. It knows only names below aliyuncs.com: run it with http_proxy set to the server's URL, so
// that every request line has the absolute form.
// http_proxy=URL node ali_mns.cjs ACCESS_KEY_ID ACCESS_KEY_SECRET
'use strict';
const assert = require('assert');
const AliMNS = require('ali-mns');

const [keyId, secret] = process.argv.slice(2);
const account = new AliMNS.Account('123456', keyId, secret);
account.setGA(false);
const region = new AliMNS.Region(AliMNS.City.Hangzhou);
const HOST = 'http://123456.mns.cn-hangzhou.aliyuncs.com';
const NAME = 'ali-queue';

async function fails(call, code) {
  await assert.rejects(Promise.resolve(call), (error) => {
    assert.strictEqual(error.Error && error.Error.Code, code, JSON.stringify(error));
    return true;
  });
}

async function main() {
  const mns = new AliMNS.MNS(account, region);
  await mns.createP(NAME, { VisibilityTimeout: 40 });
  const listed = await mns.listP('ali-', 10);
  assert.strictEqual(listed.Queues.Queue.QueueURL, `${HOST}/queues/${NAME}`);

  const queue = new AliMNS.MQ(NAME, account, region);
  assert.strictEqual((await queue.getAttrsP()).Queue.VisibilityTimeout, '40');
  await queue.setAttrsP({ VisibilityTimeout: 50 });
  assert.strictEqual((await queue.getAttrsP()).Queue.VisibilityTimeout, '50');
  const sent = await queue.sendP('h\u00e9llo', 5, 0);
  assert.match(sent.Message.MessageId, /^[0-9A-F]{32}$/);
  assert.strictEqual((await queue.peekP(0)).Message.MessageBody, 'h\u00e9llo');
  const got = await queue.recvP(5);
  assert.deepStrictEqual([got.Message.MessageBody, got.Message.Priority], ['h\u00e9llo', '5']);
  const kept = await queue.reserveP(got.Message.ReceiptHandle, 60);
  await fails(queue.deleteP(got.Message.ReceiptHandle), 'MessageNotExist');
  await queue.deleteP(kept.ChangeVisibility.ReceiptHandle);
  await fails(queue.recvP(0), 'MessageNotExist');

  const batch = new AliMNS.MQBatch(NAME, account, region);
  await batch.sendP([new AliMNS.Msg('a'), new AliMNS.Msg('b', 1)]);
  assert.strictEqual((await batch.peekP(16)).Messages.Message.length, 2);
  const both = await batch.recvP(5, 16);
  assert.deepStrictEqual(both.Messages.Message.map((each) => each.MessageBody), ['b', 'a']);
  await batch.deleteP(both.Messages.Message.map((each) => each.ReceiptHandle));
  await fails(batch.recvP(0, 16), 'MessageNotExist');

  const topics = new AliMNS.MNSTopic(account, region);
  await topics.createTopicP('ali-topic');
  assert.strictEqual((await topics.listTopicP('ali-', 10)).Topics.Topic.TopicURL, `${HOST}/topics/ali-topic`);
  const topic = new AliMNS.Topic('ali-topic', account, region);
  await topic.subscribeP('s', `acs:mns:cn-hangzhou:123456:queues/${NAME}`, AliMNS.Subscription.NotifyStrategy.BACKOFF_RETRY,
    AliMNS.Subscription.NotifyContentFormat.SIMPLIFIED);
  assert.strictEqual((await topic.getAttrsP()).Topic.TopicName, 'ali-topic');
  await topic.listP('', 10);
  const subscription = new AliMNS.Subscription('s', topic);
  assert.strictEqual((await subscription.getAttrsP()).Subscription.NotifyContentFormat, 'SIMPLIFIED');
  await topic.publishP('news', true);
  assert.strictEqual((await queue.recvP(5)).Message.MessageBody, 'news');
  await topic.unsubscribeP('s');
  await topics.deleteTopicP('ali-topic');
  await mns.deleteP(NAME);
  console.log('done');
}

main().catch((error) => { console.error(JSON.stringify(error), error); process.exit(1); });
