"use strict";
const all = (what, where = document) => [...where.querySelectorAll(what)];
const boxes = all("[data-name]");
const head = box => box.tagName === "DETAILS" ? box.querySelector("summary") : box;

// What all boxes have, which the file leaves out: their paths, the scale of their bars, and that keys reach them.
for (const box of boxes) {  // outer ones first
  const around = box.parentElement.closest("[data-path]");
  box.dataset.path = around ? `${around.dataset.path}.${box.dataset.name}` : box.dataset.name;
  if (head(box) === box) box.tabIndex = 0;
}
const bars = all("progress"), most = Math.max(...bars.map(bar => +bar.getAttribute("value")), 1);
for (const bar of bars) bar.max = most;

// The wires that skip boxes, in lanes left of each list: drawn anew whenever a box is folded.
function draw() {
  for (const list of all(".list")) {
    list.querySelector(":scope > svg.wires")?.remove();
    const inside = all(":scope > [data-path]", list);
    const wires = JSON.parse(list.dataset.wires || "[]");
    if (!wires.length || !list.offsetParent) continue;
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    picture.setAttribute("class", "wires");
    for (const [maker, reader, lane] of wires) {
      const from = inside[maker], to = inside[reader], x = to.offsetLeft - 4 - 6 * lane;
      const start = maker < 0 ? 0 : from.offsetTop + from.offsetHeight - 5, end = to.offsetTop + 12;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M${to.offsetLeft} ${start}H${x}V${end}H${to.offsetLeft}m-4 -3l4 3l-4 3`);
      picture.append(path);
    }
    list.append(picture);
  }
}

function show(box) {
  for (let at = box; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  box.scrollIntoView({ block: "center" });
}

// Mark a box with its line, or a line with its boxes.
function mark(places) {
  for (const each of all(".here")) each.classList.remove("here");
  for (const each of places) each.classList.add("here");
}

function choose(box) {
  const line = box.dataset.at && document.getElementById(box.dataset.at);
  mark(line ? [box, line] : [box]);
  line?.scrollIntoView({ block: "nearest" });
  try { history.replaceState(null, "", "#" + encodeURIComponent(box.dataset.path)); } catch { /* in a notebook's frame */ }
}

for (const box of boxes) head(box).addEventListener("click", () => choose(box));
for (const line of all("pre a"))
  line.addEventListener("click", event => {
    event.preventDefault();
    const found = boxes.filter(box => box.dataset.at === line.id);
    mark([line, ...found]);
    found.forEach(show);
  });
document.addEventListener("toggle", draw, true);
addEventListener("resize", draw);

const search = document.getElementById("search"), count = document.getElementById("count");
let texts;  // of the boxes, in which a search looks: name, verb, shape, counts, wires
search.addEventListener("input", () => {
  texts ??= new Map(boxes.map(box => [box, `${box.dataset.path} ${head(box).textContent}`.toLowerCase()]));
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = boxes.filter(box => words.length && words.every(word => texts.get(box).includes(word)));
  for (const box of boxes) box.classList.toggle("found", found.includes(box));
  found.forEach(show);
  count.textContent = words.length ? `${found.length} found` : "";
});
const fold = open => { for (const box of all("details")) box.open = open; };
document.getElementById("expand").addEventListener("click", () => fold(true));
document.getElementById("fold").addEventListener("click", () => fold(false));
// Up and down go to the next box that can be seen, right and left open and close one, Enter shows a step's line.
function move(event) {
  const seen = boxes.filter(box => !box.parentElement.closest("details:not([open])")), at = seen.findIndex(box => head(box) === document.activeElement);
  const box = seen[at], steps = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (steps) head(seen[at < 0 ? 0 : Math.max(0, Math.min(seen.length - 1, at + steps))])?.focus();
  else if (!box) return;
  else if (event.key === "Enter") { choose(box); if (box.tagName !== "DETAILS") event.preventDefault(); return; }
  else if (box.tagName === "DETAILS") box.open = event.key === "ArrowRight";
  event.preventDefault();
}
document.addEventListener("keydown", event => {
  if (event.target === search || event.ctrlKey || event.metaKey || event.altKey) return;
  if (["ArrowDown", "ArrowUp", "ArrowRight", "ArrowLeft", "Enter"].includes(event.key)) move(event);
  if (event.key === "/") { event.preventDefault(); search.focus(); }
  if (event.key === "e") fold(true);
  if (event.key === "f") fold(false);
});
const wanted = decodeURIComponent(location.hash.slice(1));
const first = wanted && boxes.find(box => box.dataset.path === wanted);
if (first) { show(first); choose(first); }
draw();
