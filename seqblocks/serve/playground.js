"use strict";
// What the page asks without a server: worker.mjs answers, in which Pyodide runs seqblocks. Nothing leaves the browser.
const backend = (() => {
  const open = new Map();  // requests without an answer, by number
  let worker = null, number = 0, running = null, next = null, files = {}, name = "spec.yaml";

  // A worker that failed is replaced at the next request.
  function fail(message) {
    worker?.terminate();
    worker = null;
    for (const each of open.values()) each.reject(new Error(message));
    open.clear();
  }

  function send(name, given) {
    if (!worker) {
      worker = new Worker("worker.mjs", { type: "module" });
      worker.onerror = event => fail(event.message || "the worker cannot be loaded");
      worker.onmessage = ({ data }) => {
        if (data.error) { fail(data.error); return; }
        open.get(data.number)?.resolve(JSON.parse(data.text));
        open.delete(data.number);
      };
    }
    return new Promise((resolve, reject) => {
      open.set(++number, { resolve, reject });
      worker.postMessage({ number, name, given: JSON.stringify(given) });
    });
  }

  // One text at a time; of those that wait, the newest.
  async function turn() {
    if (running || !next) return;
    running = next;
    next = null;
    const { text, set, resolve, reject } = running;
    await send("analyse", { text, set, name, files }).then(resolve, reject);
    running = null;
    turn();
  }

  async function pick(chosen) {
    files = {};
    const found = await send("example", { name: chosen });
    name = found.name;
    return found;
  }

  async function read() {
    const shared = new URLSearchParams(location.hash.slice(1)).get("spec");
    if (shared) return { name, text: await unpack(shared), changed: "", saves: false };
    const found = await (await fetch("start.json")).json();
    ({ files, name } = found);
    return { name, text: found.text, changed: "", saves: false };
  }

  return {
    starting: "Python is loading (about 9 MB, once) …",
    follows: false,
    examples: () => send("examples", {}),
    read,
    pick,
    analyse(text, set) {
      next?.resolve(null);
      return new Promise((resolve, reject) => { next = { text, set, resolve, reject }; turn(); });
    },
    // Return the address of the page with a text in it.
    async share(text) {
      const address = new URL(location.href);
      address.hash = `spec=${await pack(text)}`;
      return address.href;
    },
  };
})();

const LARGEST = 2e6;  // bytes of a spec

async function through(bytes, stream) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader(), parts = [];
  for (let size = 0, part; !(part = await reader.read()).done; parts.push(part.value))
    if ((size += part.value.length) > LARGEST) throw new Error("the text in the address is too large");
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function pack(text) {
  const bytes = await through(new TextEncoder().encode(text), new CompressionStream("deflate-raw"));
  return btoa(Array.from(bytes, each => String.fromCharCode(each)).join("")).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpack(code) {
  const bytes = Uint8Array.from(atob(code.replaceAll("-", "+").replaceAll("_", "/")), each => each.charCodeAt(0));
  return new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw")));
}
