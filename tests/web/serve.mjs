// Runs models in onnxruntime-web for benchmarks/trial.py: a JSON line in, a JSON line out.
// Usage: node serve.mjs FOLDER, the folder that holds node_modules/onnxruntime-web.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.argv[2]}/`));
const ort = await import(pathToFileURL(require.resolve("onnxruntime-web")));
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";

const kinds = {
  float32: [Float32Array, 4],
  float16: [Uint16Array, 2],
  int64: [BigInt64Array, 8],
  bool: [Uint8Array, 1],
};
let session = null;

function tensor({ type, dims, data }) {
  const bytes = Buffer.from(data, "base64");
  const [Kind, size] = kinds[type];
  const copy = new Uint8Array(bytes); // aligned, unlike a Buffer's part of its pool
  return new ort.Tensor(type, new Kind(copy.buffer, 0, copy.length / size), dims);
}

function written(value) {
  const { buffer, byteOffset, byteLength } = value.data;
  return { type: value.type, dims: value.dims, data: Buffer.from(buffer, byteOffset, byteLength).toString("base64") };
}

async function answer({ model, feeds }) {
  if (model !== undefined) {
    await session?.release();
    session = await ort.InferenceSession.create(new Uint8Array(Buffer.from(model, "base64")), {
      executionProviders: ["wasm"],
    });
    return { version: ort.env.versions.web };
  }
  const given = Object.fromEntries(Object.entries(feeds).map(([name, value]) => [name, tensor(value)]));
  const results = await session.run(given);
  return { results: session.outputNames.map((name) => written(results[name])) };
}

for await (const line of createInterface({ input: process.stdin })) {
  let told;
  try {
    told = await answer(JSON.parse(line));
  } catch (error) {
    told = { error: String(error) };
  }
  process.stdout.write(`${JSON.stringify(told)}\n`);
}
