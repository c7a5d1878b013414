// A client of attencode for Node: one call, a stream, an error with its details, a deadline.
//   node client.js 127.0.0.1:50051
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const PROTO = path.join(__dirname, "../../proto/attencode/v1/encoder.proto");
const OPTIONS = { longs: Number, defaults: true, oneofs: true };
const { Encoder } = grpc.loadPackageDefinition(loader.loadSync(PROTO, OPTIONS)).attencode.v1;
const client = new Encoder(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure());

// The part of google/rpc/status.proto and error_details.proto that is read here.
const rpc = protobuf.parse(`
  syntax = "proto3";
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
`).root;

const inSeconds = (seconds) => ({ deadline: Date.now() + 1000 * seconds });
const encode = (request, options) =>
  new Promise((resolve, reject) => {
    client.encode(request, options, (error, answer) => (error ? reject(error) : resolve(answer)));
  });

// A tensor is its shape and raw little-endian numbers; the copy puts them where a Float32Array may begin.
function vectors({ shape: [rows, size], data }) {
  const numbers = new Float32Array(Uint8Array.from(data).buffer);
  return Array.from({ length: rows }, (_, row) => numbers.subarray(row * size, (row + 1) * size));
}

async function unary() {
  const request = { inputs: [{ text: "time flies like an arrow" }, { text: "fruit flies like a banana" }], pooled: {} };
  const { pooled, results } = await encode(request, inSeconds(30));
  const [a, b] = vectors(pooled);
  const cosine = a.reduce((sum, number, place) => sum + number * b[place], 0); // the vectors have length 1
  console.log(`unary: ${pooled.shape.join(" x ")}, ${results.map((item) => item.numTokens)} tokens, cosine ${cosine.toFixed(2)}`);
}

// Items are answered in their order, and one that fails does not end the stream. Answers of more than 1 MiB come
// in chunks behind their `response` (outcome "chunk"), which vectors never are.
async function stream() {
  const call = client.encodeStream();
  ["time flies", "", "like an arrow"].forEach((text, id) => call.write({ id, request: { inputs: [{ text }], pooled: {} } }));
  call.end();
  for await (const item of call) {
    const told = item.outcome === "error" ? `error ${item.error.code}: ${item.error.message}` : item.response.pooled.shape.join(" x ");
    console.log(`stream: item ${item.id}: ${told}`);
  }
}

// With more than fits into the queue, some of these are refused, with the time after which to try again: as
// google.rpc.RetryInfo in grpc-status-details-bin, and for plain eyes under a name of its own.
async function error() {
  const request = { inputs: Array(64).fill({ text: "time flies like an arrow" }), pooled: {} };
  const calls = await Promise.allSettled(Array.from({ length: 16 }, () => encode(request, inSeconds(60))));
  const refused = calls.find((call) => call.status === "rejected");
  if (refused === undefined) return console.log("error: none, the queue took all");
  const { code, details, metadata } = refused.reason;
  console.log(`error: ${grpc.status[code]}: ${details}`);
  for (const { typeUrl: type, value } of rpc.lookupType("Status").decode(metadata.get("grpc-status-details-bin")[0]).details) {
    const { seconds, nanos } = rpc.lookupType("RetryInfo").decode(value).retryDelay;
    console.log(`error: ${type}: ${(Number(seconds) + nanos / 1e9).toFixed(3)} s`);
  }
  console.log(`error: attencode-retry-delay-seconds: ${metadata.get("attencode-retry-delay-seconds")[0]}`);
}

async function deadline() {
  try {
    await encode({ inputs: [{ text: "time flies" }], pooled: {} }, inSeconds(0));
  } catch ({ code }) {
    console.log(`deadline: ${grpc.status[code]}`);
  }
}

(async () => {
  await unary();
  await stream();
  await error();
  await deadline();
  client.close();
})();
