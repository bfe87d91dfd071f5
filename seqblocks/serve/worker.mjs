// Run seqblocks in Pyodide: {number, name, given} is answered with {number, text}, or with {number, error}.
import { loadPyodide } from "./pyodide/pyodide.mjs";

async function start() {
  const archive = fetch(new URL("packages.zip", import.meta.url)).then(answer => answer.arrayBuffer());
  const python = await loadPyodide();
  python.unpackArchive(await archive, "zip", { extractDir: "/packages" });
  python.runPython("import sys; sys.path.insert(0, '/packages')");
  return python.pyimport("seqblocks.serve.shown").answer;
}

const answering = start();

self.onmessage = async ({ data: { number, name, given } }) => {
  try {
    self.postMessage({ number, text: (await answering)(name, given) });
  } catch (error) {
    self.postMessage({ number, error: String(error.message).trim().split("\n").at(-1) || "Python failed" });
  }
};
