// Send requests to the worker of the playground, in Node; print what it answers to each as a line.
//     node playground_in_node.mjs DIR < lines of {"name": …, "given": …}
import fs from "fs";
import path from "path";
import readline from "readline";
import { pathToFileURL } from "url";

const folder = pathToFileURL(path.resolve(process.argv[2]) + "/");
globalThis.self = { postMessage: answer => { console.log(JSON.stringify(answer)); next(); } };
globalThis.fetch = async url => new Response(fs.readFileSync(new URL(url)));  // Node's own refuses files
await import(new URL("worker.mjs", folder).href);

const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
let number = 0;
async function next() {
  const { value, done } = await lines.next();
  if (done) process.stdout.write("", () => process.exit(0));  // after all lines
  else self.onmessage({ data: { number: ++number, ...JSON.parse(value) } });
}
next();
