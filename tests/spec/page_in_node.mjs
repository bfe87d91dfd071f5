// Run the script of `seqblocks serve` against a server, with just enough of a page; print what it shows as JSON.
//     node page_in_node.mjs ADDRESS SCRIPT…
import fs from "fs";
import vm from "vm";

const [address, ...scripts] = process.argv.slice(2);

function element() {
  const listeners = {};
  return {
    children: [], dataset: {}, textContent: "", value: "", selectionStart: 0, selectionEnd: 0,
    classList: { toggle() {} },
    addEventListener(type, run) { (listeners[type] ??= []).push(run); },
    fire(type) { for (const run of listeners[type] ?? []) run({ preventDefault() {}, stopPropagation() {} }); },
    append(...more) { this.children.push(...more); },
    replaceChildren(...all) { this.children = all; },
    focus() {},
    setSelectionRange(start, end) { [this.selectionStart, this.selectionEnd] = [start, end]; },
    setRangeText(text) { this.value = this.value.slice(0, this.selectionStart) + text + this.value.slice(this.selectionEnd); },
    querySelectorAll() { return []; },
  };
}

const page = {};
const at = name => page[name] ??= element();
class DOMParser {
  parseFromString(text) { return { documentElement: Object.assign(element(), { text }) }; }
}
const document = { getElementById: at, createElement: element, addEventListener() {}, importNode: node => node };
const request = (name, options) => fetch(address + name, options);
const names = { document, DOMParser, fetch: request, setTimeout, clearTimeout, addEventListener() {}, console };
vm.createContext(names);
for (const script of scripts) vm.runInContext(fs.readFileSync(script, "utf8"), names);

async function until(what) {
  for (let turn = 0; turn < 200; turn++) {
    if (what()) return;
    await new Promise(done => setTimeout(done, 50));
  }
  throw new Error(`did not happen: ${what}`);
}

const shown = {};
const totals = () => at("totals").textContent;
await until(totals);
Object.assign(shown, { totals: totals(), rows: at("table").children.length, text: at("text").value });
shown.sliders = at("sliders").children.map(each => each.dataset.name);
shown.picture = at("picture").children[0].text.startsWith("<svg");

at("text").value = at("text").value.replace("linear", "liner");
at("text").fire("input");
await until(() => at("problems").children.length);
const [problem] = at("problems").children;
shown.problem = problem.textContent;
problem.children.find(each => each.textContent.startsWith("use ")).fire("click");
await until(() => !at("problems").children.length);
shown.repaired = at("text").value;

at("text").value = shown.text.replace("\n", "\nuse: [./blocks.yaml]\n");  // a file with a fault
at("text").fire("input");
await until(() => at("problems").children.length);
shown.elsewhere = at("problems").children[0].textContent;
shown.marked = at("numbers").children.filter(each => each.className === "error").length;
at("text").value = shown.text;
at("text").fire("input");
await until(() => !at("problems").children.length);

shown.strides = [8, 16, 96, 50257, 2147483647, 2 ** 53 - 111].map(names.stride);  // the last two are primes
const slider = at("sliders").children[0].children[1];
slider.value = 32;
slider.fire("input");
await until(() => totals() !== shown.totals);
shown.moved = totals();
at("text").fire("input");  // what is typed counts again
await until(() => totals() === shown.totals);

at("text").value += "# mine\n";
at("text").fire("input");
at("save").fire("click");
await until(() => at("remark").textContent === "saved");
console.log(JSON.stringify(shown));
process.exit(0);
