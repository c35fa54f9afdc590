// A decoder of decoder_to_onnx in onnxruntime-web: tokens in, tokens out.

import * as ort from "./ort/ort.webgpu.bundle.min.mjs";

ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need headers that few servers send, and one token is too little for them
ort.env.logLevel = "error";

export function likeliest(logits) {
  return logits.indexOf(Math.max(...logits));
}

// Draws one of the likeliest tokens: the hotter, the more by chance.
export function drawn(temperature, top = 8, random = Math.random) {
  return (logits) => {
    const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a]).slice(0, top);
    const weights = order.map((token) => Math.exp((logits[token] - logits[order[0]]) / temperature));
    let left = random() * weights.reduce((sum, weight) => sum + weight);
    return order[Math.max(0, weights.findIndex((weight) => (left -= weight) < 0))];
  };
}

export class Decoder {
  // `provider` is "wasm" or "webgpu". What does not run there is an error: whoever calls decides what to do then.
  static async open(url, provider) {
    if (provider === "webgpu") {
      if (!navigator.gpu) throw new Error("this browser has no WebGPU");
      if (!(await navigator.gpu.requestAdapter())) throw new Error("WebGPU finds no device here");
    }
    return new Decoder(await ort.InferenceSession.create(url, { executionProviders: [provider] }), provider);
  }

  constructor(session, provider) {
    this.session = session;
    this.provider = provider;
    this.caches = session.inputMetadata.filter(({ name }) => name !== "input_ids");
  }

  // Yields `n` tokens, one by one, each as soon as it is made.
  async *generate(prompt, n, choose = likeliest) {
    let past = this.caches.map(({ shape }) => new ort.Tensor("float32", [], [1, shape[1], 0, shape[3]]));
    let tokens = prompt;
    for (let made = 0; made < n; made++) {
      const feeds = { input_ids: new ort.Tensor("int64", tokens.map(BigInt), [1, tokens.length]) };
      this.caches.forEach(({ name }, i) => (feeds[name] = past[i]));
      const results = await this.session.run(feeds);
      past = this.caches.map(({ name }) => results[name.replace("past_key_values", "present")]);
      const [, length, size] = results.logits.dims;
      const token = choose(results.logits.data.subarray((length - 1) * size));
      yield token;
      tokens = [token];
    }
  }

  async close() {
    await this.session.release();
  }
}
