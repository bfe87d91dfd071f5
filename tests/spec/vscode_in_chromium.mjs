// The extension in VS Code: hints, an underlined fault, its repair by the light bulb, a rename by F2. Run by hand.
//     NODE_PATH=… CHROMIUM=… node vscode_in_chromium.mjs ADDRESS SHOTS
// ADDRESS: of code-server with the extension, opened at a folder with spec.yaml: the README's spec with `head_nrm` in
// the place of `head_norm`. editors/vscode/README.md has the commands.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const { chromium } = createRequire(`${process.env.NODE_PATH}/`)("playwright-core");
const [address, shots] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const page = await browser.newPage({ viewport: { width: 1280, height: 800 } });
page.setDefaultTimeout(60_000);
const lines = () => page.$$eval(".view-line", all => all.map(each => each.textContent.replaceAll("\u00a0", " ").trim()));

// Return the place of the first text like a pattern, which may be spread over the parts of a line.
const place = pattern => page.evaluate(pattern => {
  for (const line of document.querySelectorAll(".view-line")) {
    const parts = [], walk = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) parts.push(walk.currentNode);
    const found = new RegExp(pattern, "d").exec(parts.map(each => each.textContent.replaceAll("\u00a0", " ")).join(""));
    if (!found) continue;
    const range = document.createRange();
    let start = 0;
    for (const part of parts) {
      const end = start + part.length, [first, last] = found.indices[1];
      if (start <= first && first < end) range.setStart(part, first - start);
      if (start < last && last <= end) range.setEnd(part, last - start);
      start = end;
    }
    return range.getBoundingClientRect().toJSON();
  }
}, pattern);

await page.goto(address);
await page.locator(".explorer-viewlet .monaco-list-row", { hasText: "spec.yaml" }).dblclick();
await page.waitForFunction(() => [...document.querySelectorAll(".view-line")].some(each => each.textContent.includes("64\u00a0parameters\u00a0×\u00a04")));
const hints = (await lines()).filter(each => each.includes("[batch"));
assert.ok(hints.some(each => each.includes("as: x}") && each.endsWith("[batch, seq, 64] · 64 parameters × 4")), JSON.stringify(hints));

await page.waitForSelector(".squiggly-error");
const [line, ...others] = await page.$$eval(".squiggly-error", all => all.map(each => each.getBoundingClientRect().toJSON()));
assert.equal(others.length, 0);
const word = await place("(head_nrm)");
assert.deepEqual([line.left, line.right].map(Math.round), [word.left, word.right].map(Math.round));
await page.mouse.click(word.left + 20, word.top + 8);
await page.keyboard.press("Control+.");
await page.waitForSelector(".action-widget .monaco-list-row");
await page.waitForTimeout(500);
await page.screenshot({ path: `${shots}/vscode.png` });
await page.keyboard.press("Enter");
await page.waitForFunction(() => !document.querySelector(".squiggly-error"));

const wire = await place("as: (x)");
await page.mouse.click(wire.left + 3, wire.top + 8);
await page.keyboard.press("F2");
await page.waitForSelector(".rename-box input");
await page.waitForTimeout(500);
await page.keyboard.press("Control+A");
await page.keyboard.type("normed");
await page.keyboard.press("Enter");
await page.waitForFunction(() => document.querySelector(".view-lines").textContent.includes("from:\u00a0normed"));
const renamed = (await lines()).filter(each => each.includes("normed"));
assert.equal(renamed.length, 4);
assert.match(renamed[0], /^- layer_norm: \{bias: false, name: x, as: normed\}/);  // the names in the state_dict stay
console.log(JSON.stringify({ chromium: browser.version(), hints: hints.length }));
await browser.close();
