"use strict";
const at = name => document.getElementById(name);
const text = at("text"), WAIT = 40, POLL = 500, MOST = 2000;  // milliseconds after a key; between looks at the file; rows shown
let file = { text: "", changed: "" }, values = {}, asked = 0, timer;

function element(tag, content, kind) {
  const made = document.createElement(tag);
  if (content !== undefined) made.textContent = content;
  if (kind) made.className = kind;
  return made;
}

// Return a function from lines and columns to offsets in the text. Columns count characters, not units of UTF-16.
function places() {
  const lines = text.value.split("\n"), before = [0];
  for (const each of lines) before.push(before.at(-1) + each.length + 1);
  return (line, column) => (before[line - 1] ?? text.value.length) + [...(lines[line - 1] || "")].slice(0, column - 1).join("").length;
}

function select(line, column, endLine, endColumn) {
  const place = places();
  text.focus();
  text.setSelectionRange(place(line, column), place(endLine, endColumn));
  text.scrollTop = Math.max(0, (line - 5) * 19.5);
}

function number(problems = []) {
  const bad = new Set(problems.filter(each => each.severity === "error" && each.file === file.name).map(each => each.line));
  at("numbers").replaceChildren(...text.value.split("\n").flatMap((_, n) => [element("span", `${n + 1}\n`, bad.has(n + 1) ? "error" : "")]));
  scroll();
}

// Underline the places of problems, in a copy of the text that lies under it. A place in another one is not marked twice.
function mark(problems = []) {
  const place = places(), parts = [];
  const spans = problems.filter(each => each.line && each.file === file.name)
    .map(each => [place(each.line, each.column), place(each.end_line, each.end_column), each.severity]).sort((a, b) => a[0] - b[0]);
  let done = 0;
  for (const [start, end, severity] of spans) {
    if (start < done) continue;
    parts.push(text.value.slice(done, start), element("span", text.value.slice(start, end), severity));
    done = end;
  }
  at("marks").replaceChildren(...parts, `${text.value.slice(done)}\n`);
  scroll();
}

function scroll() {
  at("numbers").scrollTop = at("marks").scrollTop = text.scrollTop;
  at("marks").scrollLeft = text.scrollLeft;
}

function showProblems(found) {
  at("problems").replaceChildren(...found.problems.map(problem => {
    const own = problem.file === file.name, place = `${own ? "" : `${problem.file}:`}${problem.line}:${problem.column} `;
    const item = element("li", `${problem.line ? place : ""}${problem.code}: ${problem.message}`, problem.severity);
    if (problem.hint) item.append(element("div", problem.hint));
    if (problem.line && own) item.addEventListener("click", () => select(problem.line, problem.column, problem.end_line, problem.end_column));
    if (problem.fix && problem.fix.line && problem.fix.file === file.name) {
      const edits = [problem.fix, ...(problem.fix.more || [])];
      edits.sort((a, b) => b.line - a.line || b.column - a.column);  // from the end: positions before stay
      const button = element("button", `use ${problem.fix.text}`);
      button.addEventListener("click", event => {
        event.stopPropagation();
        for (const edit of edits) {
          select(edit.line, edit.column, edit.end_line, edit.end_column);
          text.setRangeText(edit.text);
        }
        typed();
      });
      item.append(button);
    }
    return item;
  }));
  if (found.dropped) at("problems").append(element("li", `and ${found.dropped} more`));
}

function showPicture(found) {
  const old = !found.svg || (!found.ok && moved());  // a slider shows no picture of what cannot be
  at("picture").classList.toggle("old", old);
  if (old) return;
  const made = new DOMParser().parseFromString(found.svg, "image/svg+xml").documentElement;
  for (const group of made.querySelectorAll("g[data-line]"))
    group.addEventListener("click", event => {
      event.stopPropagation();
      const line = Number(group.dataset.line);
      select(line, 1, line, 1e6);
    });
  at("picture").replaceChildren(document.importNode(made, true));
}

function showTable(rows) {
  const keys = ["output", "params", "macs", "state"];
  const head = element("tr");
  head.append(element("th", "step"), ...keys.map(key => element("th", key)));
  at("table").replaceChildren(head, ...rows.slice(0, MOST).map(row => {
    const made = element("tr");
    const name = "  ".repeat(row.depth) + row.step.split(".").pop();
    made.append(element("td", name), ...keys.map(key => element("td", row[key] == null ? "" : row[key].toLocaleString("en"))));
    return made;
  }));
}

// Return the largest divisor of a number that is at most a sixteenth of it: sliders then stop at the number itself.
function stride(size) {
  let step = 1;
  for (let part = 1; part * part <= size && part < 1e6; part++)
    if (size % part === 0)
      for (const each of [part, size / part]) if (each <= size / 16 && each > step) step = each;
  return step;
}

function showSliders(numbers) {
  const names = Object.keys(numbers);
  if (names.join() === [...at("sliders").children].map(each => each.dataset.name).join()) return;
  values = {};
  at("sliders").replaceChildren(...names.map(name => {
    const label = element("label"), slider = element("input"), shown = element("output", numbers[name]);
    label.dataset.name = name;
    const size = Math.abs(numbers[name]) || 1, step = Number.isInteger(numbers[name]) ? stride(size) : size / 16;
    Object.assign(slider, { type: "range", min: numbers[name] < 0 ? -4 * size : numbers[name] && step, max: 4 * size, step });
    slider.value = numbers[name];
    slider.addEventListener("input", () => {
      values[`let.${name}`] = Number(slider.value);
      shown.textContent = slider.value;
      changed();
    });
    label.append(name, slider, shown);
    return label;
  }));
}

async function analyse() {
  const own = ++asked;
  try {
    const found = await backend.analyse(text.value, values);
    if (!found || own !== asked) return;
    if (at("remark").textContent === backend.starting) at("remark").textContent = "";
    if (found.error) { at("remark").textContent = found.error; return; }
    at("totals").textContent = [...found.totals, found.reason].filter(Boolean).join(", ");
    number(found.problems);
    mark(found.problems);
    showProblems(found);
    showPicture(found);
    at("table").classList.toggle("old", !found.rows.length);
    if (found.rows.length) showTable(found.rows);
    showSliders(found.let);
  } catch (error) {
    at("remark").textContent = `no answer: ${error.message}`;
  }
}

const moved = () => Object.keys(values).length > 0;

function changed() {
  at("save").disabled = !file.saves || text.value === file.text;
  if (!moved()) { number(); mark(); }
  clearTimeout(timer);
  timer = setTimeout(analyse, WAIT);
}

async function save() {
  const found = await backend.save(text.value, file.changed);
  if (found.error) at("remark").textContent = found.error;
  else if (found.written) { file = found; at("remark").textContent = "saved"; changed(); }
  else at("remark").textContent = "not saved: the file was changed by another program. Copy your text, and load the page again";
}

// Follow the file, so that one can edit it elsewhere.
async function follow() {
  try {
    const now = await backend.read();
    if (now.error) at("remark").textContent = now.error;
    else if (now.changed !== file.changed) {
      const own = text.value === file.text;
      if (own) { file = now; text.value = now.text; typed(); }
      else at("remark").textContent = "the file was changed by another program";
      at("name").textContent = now.name;
    }
  } catch { at("remark").textContent = "the server has ended"; }
  if (backend.follows) setTimeout(follow, POLL);
}

function show(found) {
  file = found;
  text.value = file.text;
  at("name").textContent = file.name;
  typed();
}

// Without a server: begin with the text in the address, or the page's own, and offer others.
async function begin() {
  at("remark").textContent = backend.starting;
  addEventListener("hashchange", async () => show(await backend.read()));
  try { show(await backend.read()); }
  catch (error) { at("remark").textContent = `the text in the address cannot be read: ${error.message}`; }
  try {
    const names = await backend.examples();
    at("examples").replaceChildren(element("option", "examples"), ...names.map(each => element("option", each)));
    at("examples").hidden = at("share").hidden = false;
  } catch (error) { at("remark").textContent = `no answer: ${error.message}`; }
}

async function copy(what, content) {
  try {
    await navigator.clipboard.writeText(content);
    at("remark").textContent = `${what} is copied`;
  } catch { at("remark").textContent = content; }  // without permission
}

// Return a command of a shell that builds what is shown.
function command() {
  const quoted = each => /^[\w.\-/]+$/.test(each) ? each : `'${each.replaceAll("'", `'\\''`)}'`;
  const sets = Object.entries(values).map(([name, value]) => ` --set ${name.replace("let.", "")}=${value}`);
  return `seqblocks build ${quoted(file.name)} --summary${sets.join("")}`;
}

// What is typed counts: sliders begin anew with its numbers.
function typed() {
  values = {};
  at("sliders").replaceChildren();
  changed();
}

text.addEventListener("input", typed);
text.addEventListener("scroll", scroll);
text.addEventListener("keydown", event => {
  if (event.key !== "Tab" || event.shiftKey) return;
  event.preventDefault();
  text.setRangeText("  ", text.selectionStart, text.selectionEnd, "end");
  typed();
});
document.addEventListener("keydown", event => {
  if ((event.ctrlKey || event.metaKey) && event.key === "s") { event.preventDefault(); if (!at("save").disabled) save(); }
});
at("save").addEventListener("click", save);
const choose = picture => { at("picture").hidden = !picture; at("table").hidden = picture; };
at("show-picture").addEventListener("click", () => choose(true));
at("show-table").addEventListener("click", () => choose(false));
at("command").addEventListener("click", () => copy("the command", command()));
at("share").addEventListener("click", async () => {
  const address = await backend.share(text.value);
  history.replaceState(null, "", address);
  copy("a link with the text", address);
});
at("download").addEventListener("click", () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text.value], { type: "application/yaml" }));
  link.download = file.name;
  link.click();
  URL.revokeObjectURL(link.href);
});
at("examples").addEventListener("change", async () => {
  if (!at("examples").selectedIndex) return;
  const found = await backend.pick(at("examples").value);
  show({ ...found, changed: "", saves: false });
  at("examples").selectedIndex = 0;
});
addEventListener("beforeunload", event => { if (text.value !== file.text) event.preventDefault(); });
if (backend.follows) follow();
else begin();
