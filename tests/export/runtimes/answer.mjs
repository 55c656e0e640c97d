// As answer.py, for the packages onnxruntime-node and onnxruntime-web: PACKAGE MODEL CASES, in a folder with node_modules.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [name, model, cases] = process.argv.slice(2);
const require = createRequire(pathToFileURL(process.cwd() + "/"));
const ort = require(name);
if (name === "onnxruntime-web") ort.env.wasm.numThreads = 1;
const types = { float32: Float32Array, int64: BigInt64Array };
const session = await ort.InferenceSession.create(name === "onnxruntime-node" ? model : new Uint8Array(readFileSync(model)));
const answers = [];
for (const one of JSON.parse(readFileSync(cases))) {
  const feeds = {};
  for (const [input, { dtype, shape, data }] of Object.entries(one)) {
    feeds[input] = new ort.Tensor(dtype, types[dtype].from(data), shape);
  }
  const found = await session.run(feeds);
  answers.push(Object.fromEntries(["logits", "probabilities"].map((n) => [n, Array.from(found[n].data)])));
}
console.log(JSON.stringify({ version: JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version, answers }));
