"use strict";
const at = name => document.getElementById(name);
const text = at("text"), WAIT = 120, POLL = 500;  // milliseconds after a key; between looks at the file
let file = { text: "", changed: "" }, values = {}, asked = 0, timer;

async function ask(name, body) {
  const options = body && { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const answer = await fetch(name, options);
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

function element(tag, content, kind) {
  const made = document.createElement(tag);
  if (content !== undefined) made.textContent = content;
  if (kind) made.className = kind;
  return made;
}

function select(line, column, endLine, endColumn) {
  const lines = text.value.split("\n");
  const place = (line, column) => {  // columns count characters, not units of UTF-16
    const before = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    return before + [...(lines[line - 1] || "")].slice(0, column - 1).join("").length;
  };
  text.focus();
  text.setSelectionRange(place(line, column), place(endLine, endColumn));
  text.scrollTop = Math.max(0, (line - 5) * 19.5);
}

function number(problems = []) {
  const bad = new Set(problems.filter(each => each.severity === "error").map(each => each.line));
  at("numbers").replaceChildren(...text.value.split("\n").flatMap((_, n) => [element("span", `${n + 1}\n`, bad.has(n + 1) ? "error" : "")]));
  at("numbers").scrollTop = text.scrollTop;
}

function showProblems(found) {
  at("problems").replaceChildren(...found.problems.map(problem => {
    const item = element("li", `${problem.line ? `${problem.line}:${problem.column} ` : ""}${problem.code}: ${problem.message}`, problem.severity);
    if (problem.hint) item.append(element("div", problem.hint));
    if (problem.line) item.addEventListener("click", () => select(problem.line, problem.column, problem.end_line, problem.end_column));
    if (problem.fix && problem.fix.line && problem.fix.file === file.name) {
      const button = element("button", `use ${problem.fix.text}`);
      button.addEventListener("click", event => {
        event.stopPropagation();
        select(problem.fix.line, problem.fix.column, problem.fix.end_line, problem.fix.end_column);
        text.setRangeText(problem.fix.text);
        typed();
      });
      item.append(button);
    }
    return item;
  }));
}

function showPicture(found) {
  at("picture").classList.toggle("old", !found.svg);
  if (!found.svg) return;
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
  at("table").replaceChildren(head, ...rows.map(row => {
    const made = element("tr");
    const name = "  ".repeat(row.depth) + row.step.split(".").pop();
    made.append(element("td", name), ...keys.map(key => element("td", row[key] == null ? "" : row[key].toLocaleString("en"))));
    return made;
  }));
}

function showSliders(numbers) {
  const names = Object.keys(numbers);
  if (names.join() === [...at("sliders").children].map(each => each.dataset.name).join()) return;
  values = {};
  at("sliders").replaceChildren(...names.map(name => {
    const label = element("label"), slider = element("input"), shown = element("output", numbers[name]);
    label.dataset.name = name;
    const whole = Number.isInteger(numbers[name]), size = Math.abs(numbers[name]) || 1;
    Object.assign(slider, { type: "range", min: whole ? Math.min(1, numbers[name]) : 0, max: 4 * size, step: whole ? Math.max(1, Math.round(size / 16)) : size / 16 });
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
    const found = await ask("analyse", { text: text.value, set: values });
    if (!found || own !== asked) return;
    if (found.error) { at("remark").textContent = found.error; return; }
    at("totals").textContent = found.totals.join(", ") || found.reason || "";
    number(found.problems);
    showProblems(found);
    showPicture(found);
    if (found.rows.length) showTable(found.rows);
    showSliders(found.let);
  } catch (error) {
    at("remark").textContent = `no answer: ${error.message}`;
  }
}

function changed() {
  at("save").disabled = !file.saves || text.value === file.text;
  number();
  clearTimeout(timer);
  timer = setTimeout(analyse, WAIT);
}

async function save() {
  const found = await ask("save", { text: text.value, changed: file.changed });
  if (found.error) at("remark").textContent = found.error;
  else if (found.written) { file = found; at("remark").textContent = "saved"; changed(); }
  else at("remark").textContent = "not saved: the file was changed by another program. Copy your text, and load the page again";
}

// Follow the file, so that one can edit it elsewhere.
async function follow() {
  try {
    const now = await ask("file");
    if (now.error) at("remark").textContent = now.error;
    else if (now.changed !== file.changed) {
      const own = text.value === file.text;
      if (own) { file = now; text.value = now.text; typed(); }
      else at("remark").textContent = "the file was changed by another program";
      at("name").textContent = now.name;
    }
  } catch { at("remark").textContent = "the server has ended"; }
  setTimeout(follow, POLL);
}

// What is typed counts: sliders begin anew with its numbers.
function typed() {
  values = {};
  at("sliders").replaceChildren();
  changed();
}

text.addEventListener("input", typed);
text.addEventListener("scroll", () => { at("numbers").scrollTop = text.scrollTop; });
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
addEventListener("beforeunload", event => { if (text.value !== file.text) event.preventDefault(); });
follow();
