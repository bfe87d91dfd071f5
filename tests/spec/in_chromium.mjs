// The pages of `seqblocks serve` and `seqblocks draw` in Chromium, driven by playwright-core; print figures as JSON.
//     NODE_PATH=… CHROMIUM=… node in_chromium.mjs page ADDRESS CASE.json SHOTS
//     NODE_PATH=… CHROMIUM=… node in_chromium.mjs drawings DIR CASE.json SHOTS
// NODE_PATH: a node_modules with playwright-core. CHROMIUM: the program. SHOTS: a folder for pictures.
import assert from "node:assert/strict";
import fs from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { chromium } = createRequire(`${process.env.NODE_PATH}/`)("playwright-core");
const [what, address, file, shots] = process.argv.slice(2);
const given = JSON.parse(fs.readFileSync(file, "utf8"));
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const figures = { chromium: browser.version() };
const complaints = [], requests = [];

async function opened(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(120_000);
  page.on("console", each => { if (["error", "warning"].includes(each.type())) complaints.push(each.text()); });
  page.on("pageerror", each => complaints.push(String(each)));
  page.on("request", each => requests.push(each.url()));
  await page.goto(url);
  return page;
}

// Return the milliseconds until a condition of the page holds, looked at with each frame.
async function time(page, act, condition, argument) {
  const start = performance.now();
  await act();
  await page.waitForFunction(condition, argument, { polling: "raf" });
  return Math.round(performance.now() - start);
}

// Compare a picture of the page with the stored one: the mean colours of squares of 8 pixels. Fonts differ between
// machines, so a square may differ a little; missing boxes, wires, colours and shifted parts differ in many.
async function compare(page, name) {
  await page.evaluate(() => {  // the policy of the page forbids a style sheet
    for (const each of document.querySelectorAll("*")) each.style.setProperty("color", "transparent", "important");
  });
  const shot = (await page.screenshot({ path: `${shots}/${name}.png` })).toString("base64");
  if (given.shares) return;  // the same page without a server has more buttons
  const path = `${process.env.STORED}/${name}.png`, stored = fs.existsSync(path) && fs.readFileSync(path).toString("base64");
  const [small, shares] = await squares.evaluate(async ([shot, stored]) => {
    const load = async data => createImageBitmap(await (await fetch(`data:image/png;base64,${data}`)).blob());
    const pixels = image => {
      const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
      context.drawImage(image, 0, 0);
      return [canvas, context.getImageData(0, 0, image.width, image.height).data];
    };
    const image = await load(shot), [, data] = pixels(image), [width, height] = [image.width >> 3, image.height >> 3];
    const means = new ImageData(width, height);
    for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) for (let channel = 0; channel < 4; channel++) {
      let sum = 0;
      for (let at = 0; at < 64; at++) sum += data[4 * ((8 * y + (at >> 3)) * image.width + 8 * x + (at & 7)) + channel];
      means.data[4 * (y * width + x) + channel] = Math.round(sum / 64);
    }
    const canvas = new OffscreenCanvas(width, height);
    canvas.getContext("2d").putImageData(means, 0, 0);
    const bytes = new Uint8Array(await (await canvas.convertToBlob()).arrayBuffer());
    const small = btoa(String.fromCharCode(...bytes));
    if (!stored) return [small, null];
    const other = await load(stored), [, old] = pixels(other);
    if (other.width !== width || other.height !== height) return [small, 1];
    let far = 0;
    for (let at = 0; at < width * height; at++) far += [0, 1, 2].some(channel => Math.abs(means.data[4 * at + channel] - old[4 * at + channel]) > 5);
    return [small, far / (width * height)];
  }, [shot, stored]);
  if (process.env.UPDATE || !stored) fs.writeFileSync(path, Buffer.from(small, "base64"));
  (figures.pictures ??= {})[name] = shares;
}

const totals = page => page.textContent("#totals");
const table = page => page.$$eval("#table tr", rows => rows.slice(1).map(row => [...row.children].map(each => each.textContent)));
const has = count => document.getElementById("totals").textContent.includes(count);
async function replace(page, old, now) {
  await page.focus("#text");
  await page.$eval("#text", (each, old) => each.setSelectionRange(each.value.indexOf(old), each.value.indexOf(old) + old.length), old);
  await page.keyboard.insertText(now);
}

async function edit(page) {
  figures.first_result = await time(page, () => {}, has, "parameters");
  await page.focus("#text");
  await page.keyboard.press("Control+A");
  await page.keyboard.press("Delete");
  figures.whole_spec = await time(page, () => page.keyboard.insertText(given.text), has, given.count);
  await page.click("#show-table");
  assert.deepEqual(await table(page), given.table);
  await page.click("#show-picture");
  const before = await page.innerHTML("#picture");

  const misspelt = () => document.querySelector("#marks .error")?.textContent === "head_nrm" && document.querySelector("#problems li");
  const times = [];
  for (let turn = 0; turn < 5; turn++) {
    times.push(await time(page, () => replace(page, "head_norm", "head_nrm"), misspelt));
    assert.match(await page.textContent("#problems"), /E301.*head_nrm.*head_norm/s);
    if (!turn) await underline(page);
    assert.notEqual(await page.innerHTML("#picture"), before);
    if (turn === 4) await compare(page, "fault");
    await page.click("#problems button");
    await page.waitForFunction(() => !document.querySelector("#problems li") && !document.querySelector("#marks .error"));
    assert.equal(await page.inputValue("#text"), given.text);
    assert.equal(await page.innerHTML("#picture"), before);
  }
  figures.misspelt = times.sort((a, b) => a - b);  // from the key to underline and message
}

// The underlined word lies under the word of the text: both have the same metrics and scroll alike.
async function underline(page) {
  const found = await page.evaluate(() => {
    const [text, marks] = ["text", "marks"].map(name => document.getElementById(name));
    text.scrollTop = 40;
    text.dispatchEvent(new Event("scroll"));
    const size = each => { const style = getComputedStyle(each); return [style.font, style.padding, style.lineHeight, style.letterSpacing, style.tabSize, each.clientWidth, each.scrollTop]; };
    const result = [size(text), size(marks)];
    text.scrollTop = 0;
    return result;
  });
  assert.deepEqual(found[0], found[1]);
  assert.ok(found[0].at(-1) > 0);
}

// A slider changes counts, never shows a problem on the way, and keeps the last picture at an invalid value, greyed.
async function slide(page) {
  await page.evaluate(() => {
    globalThis.flashes = 0;
    new MutationObserver(() => { if (document.querySelector("#problems li, #picture.old")) flashes++; }).observe(document.body, { childList: true, subtree: true, attributes: true });
  });
  const slider = page.locator("#sliders input").first(), seen = new Set([await totals(page)]);
  assert.equal(await slider.inputValue(), "64");
  await slider.focus();
  const times = [];
  for (let turn = 0; turn < 6; turn++) {
    const now = await totals(page);
    times.push(await time(page, () => page.keyboard.press("ArrowRight"), old => document.getElementById("totals").textContent !== old, now));
    seen.add(await totals(page));
  }
  figures.slider = times.sort((a, b) => a - b);
  assert.equal(seen.size, 7);
  assert.equal(await page.evaluate("flashes"), 0);
  await page.click("#command");
  const picture = await page.innerHTML("#picture");
  await slider.evaluate(each => { each.step = 1; each.value = 65; each.dispatchEvent(new Event("input")); });
  await page.waitForSelector("#picture.old");
  assert.equal(await page.innerHTML("#picture"), picture);
  assert.match(await page.textContent("#problems"), /heads/);
  await compare(page, "invalid");
  await slider.evaluate(each => { each.value = 64; each.dispatchEvent(new Event("input")); });
  await page.waitForSelector("#picture:not(.old)");
}

// While a text takes long, the page answers within two frames, and of the texts after it only the newest counts.
async function busy(page) {
  await page.evaluate(() => {
    globalThis.gaps = [];
    let last = performance.now();
    setInterval(() => { const now = performance.now(); gaps.push(now - last); last = now; }, 10);
  });
  const load = text => page.$eval("#text", (each, text) => { each.value = text; each.dispatchEvent(new Event("input")); }, text);
  const pause = async () => Math.round(Math.max(...await page.evaluate("gaps.splice(0)")));
  await load(given.slow);
  await page.waitForTimeout(400);
  await pause();
  for (let turn = 0; turn < 5; turn++) { await load(given.text + "#".repeat(turn)); await page.waitForTimeout(150); }
  await load(given.small);
  figures.after_slow = await time(page, () => {}, has, given.small_count);
  figures.longest_pause = await pause();
  await load(given.slow);
  figures.slow = await time(page, () => {}, () => document.querySelector("#problems li"));
  figures.pause_of_slow = await pause();
}

async function share(page) {
  await page.click("#share");
  await page.waitForFunction(() => location.hash.startsWith("#spec="));
  const other = await opened(page.url());
  await other.waitForFunction(has, given.count);
  assert.equal(await other.inputValue("#text"), given.text);
  await other.selectOption("#examples", "vil_tiny");
  await other.waitForFunction(has, "6,088,360");
  await other.context().close();
}

async function page() {
  const page = await opened(address);
  await edit(page);
  await slide(page);
  await page.emulateMedia({ colorScheme: "dark" });
  await compare(page, "dark");
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize({ width: 400, height: 800 });
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= 400), "wider than 400 px");
  await compare(page, "narrow");
  await page.setViewportSize({ width: 1280, height: 800 });
  if (given.shares) await share(page);
  await busy(page);
  const origin = new URL(address).origin;
  assert.deepEqual(requests.filter(each => !each.startsWith(`${origin}/`) && !each.startsWith("blob:")), []);
}

// Every drawing: no request, no complaint, a box for each row, folding, search, lines, keys.
async function drawings() {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 } });
  figures.files = figures.boxes = figures.labels = 0;
  figures.slowest_fold = 0;
  for (const { name, boxes, words } of given) {
    const page = await context.newPage();
    page.on("console", each => complaints.push(`${name}: ${each.text()}`));
    page.on("pageerror", each => complaints.push(`${name}: ${each}`));
    const asked = [];
    page.on("request", each => asked.push(each.url()));
    const url = pathToFileURL(`${address}/${name}.html`).href;
    await page.goto(url);
    assert.deepEqual(asked, [url]);
    assert.equal(await page.locator("[data-path]").count(), boxes, name);
    await page.keyboard.press("e");
    assert.equal(await page.locator("details:not([open])").count(), 0);
    for (const key of ["f", "e"]) {  // the time of the page, with layout
      const fold = await page.evaluate(key => {
        const start = performance.now();
        document.dispatchEvent(new KeyboardEvent("keydown", { key }));
        document.body.offsetHeight;
        draw();
        return performance.now() - start;
      }, key);
      figures.slowest_fold = Math.max(figures.slowest_fold, Math.round(fold));
    }
    await page.keyboard.press("/");
    await page.keyboard.insertText(words);
    assert.match(await page.textContent("#count"), /^[1-9]\d* found$/, name);
    await page.locator("[data-path][data-at]").last().evaluate(box => (box.querySelector("summary") ?? box).click());
    assert.ok(await page.locator("pre a.here").count() === 1, name);
    await page.locator("pre a.here").click();
    assert.ok(await page.locator("[data-path].here").count() >= 1, name);
    figures.files++;
    figures.boxes += boxes;
    // Labels of the SVG lie inside its picture, and each in the box that it begins in.
    await page.goto(pathToFileURL(`${address}/${name}.svg`).href);
    const [labels, cut] = await page.evaluate(() => {
      const root = document.documentElement.getBoundingClientRect(), rects = [...document.querySelectorAll("rect")].map(each => each.getBoundingClientRect());
      const texts = [...document.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
      const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 2 && a.bottom <= b.bottom + 2;
      const cut = texts.filter(([, each]) => {
        const own = rects.filter(rect => rect.left <= each.left + 1 && rect.right > each.left && rect.top <= each.top + 2 && rect.bottom >= each.bottom - 2);
        return !inside(each, root) || own.some(rect => !inside(each, rect));
      });
      return [texts.length, cut.map(([text]) => text)];
    });
    assert.deepEqual(cut, [], `${name}: labels that leave their box`);
    figures.labels += labels;
    await page.close();
  }
  const page = await context.newPage();
  const first = given.find(each => each.name === "hybrid_small");
  await keys(page, first);
  await page.goto(pathToFileURL(`${address}/${first.name}.html`).href);
  await page.keyboard.press("e");
  await page.evaluate(() => document.querySelectorAll("svg.wires")[1].parentElement.scrollIntoView());
  await compare(page, "drawing");
  await page.emulateMedia({ colorScheme: "dark" });
  await compare(page, "drawing_dark");
  await page.setViewportSize({ width: 400, height: 800 });
  await compare(page, "drawing_narrow");
}

// A drawing by its keys alone, a search, the link to a box, dark and narrow.
async function keys(page, { name, paths }) {
  const url = pathToFileURL(`${address}/${name}.html`).href;
  await page.goto(url);
  assert.deepEqual(await page.$$eval("[data-path]", all => all.map(each => each.dataset.path)), paths);
  const here = () => page.evaluate(() => document.activeElement.closest("[data-path]")?.dataset.path);
  await page.keyboard.press("e");
  for (const path of paths) { await page.keyboard.press("ArrowDown"); assert.equal(await here(), path); }
  await page.keyboard.press("ArrowUp");
  assert.equal(await here(), paths.at(-2));
  const outer = paths.find(path => paths.some(other => other.startsWith(`${path}.`)));
  while (await here() !== outer) await page.keyboard.press("ArrowUp");
  const open = () => page.$eval(`[data-path="${outer}"]`, each => each.open);
  await page.keyboard.press("ArrowLeft");
  assert.equal(await open(), false);
  await page.keyboard.press("ArrowDown");
  assert.ok(!(await here()).startsWith(`${outer}.`));
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("ArrowRight");
  assert.equal(await open(), true);
  while (!await page.evaluate(() => document.activeElement.matches(".leaf[data-at]"))) await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  const chosen = await here();
  assert.equal(await page.locator("pre a.here").count(), 1);
  assert.equal(decodeURIComponent(new URL(page.url()).hash.slice(1)), chosen);
  await page.goto("about:blank");
  await page.goto(`${url}#${encodeURIComponent(chosen)}`);  // the link to a box shows it
  assert.equal(await page.$eval("[data-path].here", each => each.dataset.path), chosen);
  await page.keyboard.press("/");
  await page.keyboard.insertText("mlstm");
  const wanted = await page.$$eval("[data-path]", all => all.filter(each => (each.querySelector("summary") ?? each).textContent.includes("mlstm") || each.dataset.path.includes("mlstm")).length);
  assert.equal(await page.locator(".found").count(), wanted);
  assert.ok(wanted > 0);
  const colours = [];
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    colours.push(await page.evaluate(() => getComputedStyle(document.body).backgroundColor));
  }
  assert.notEqual(colours[0], colours[1]);
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize({ width: 400, height: 800 });
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= 400), "wider than 400 px");
  await page.setViewportSize({ width: 1280, height: 800 });
}

async function mermaid() {
  const page = await (await browser.newContext()).newPage();
  await page.addScriptTag({ path: address });
  figures.refused = {};
  figures.read = 0;
  for (const [name, text] of Object.entries(given)) {
    const message = await page.evaluate(text => globalThis.mermaid.parse(text).then(() => "", error => String(error)), text);
    if (message) figures.refused[name] = message; else figures.read++;
  }
}

const squares = await (await browser.newContext()).newPage();
figures.letters = await squares.evaluate(() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  const button = document.body.appendChild(document.createElement("button"));  // whose font is the browser's own
  const ofButtons = getComputedStyle(button).font;
  return ["13px system-ui", "12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace", ofButtons].map(font => {
    context.font = font;
    return Math.round(100 * context.measureText("letters of the page").width);
  });
});
await { page, drawings, mermaid }[what]();
assert.deepEqual(complaints, []);
await browser.close();
console.log(JSON.stringify(figures));
process.exit(0);
