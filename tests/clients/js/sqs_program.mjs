// Calls SQS through @aws-sdk/client-sqs: a call a line in, its answer a line out.
//
//     node sqs_program.mjs CLIENTS ENDPOINT
//
// Run by tests/clients/sqs_clients.py, which says what the lines are.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [clients, endpoint] = process.argv.slice(2);
const sdk = createRequire(`${clients}/`)("@aws-sdk/client-sqs");
const sqs = new sdk.SQSClient({ endpoint });

const wrapped = (key, value) =>
  value instanceof Uint8Array ? { bytes: Buffer.from(value).toString("base64") } : value;
const unwrapped = (key, value) => (value?.bytes === undefined ? value : Buffer.from(value.bytes, "base64"));

for await (const line of createInterface({ input: process.stdin })) {
  const [operation, members] = JSON.parse(line, unwrapped);
  let said;
  try {
    const { $metadata, ...answer } = await sqs.send(new sdk[`${operation}Command`](members));
    said = { answer };
  } catch (error) {
    if (!(error instanceof sdk.SQSServiceException)) throw error;
    said = { code: error.Code ?? error.name, message: error.message };
  }
  console.log(JSON.stringify(said, wrapped));
}
