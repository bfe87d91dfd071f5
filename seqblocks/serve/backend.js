"use strict";
// What the page asks of `seqblocks serve`. playground.js answers the same without a server.
// Answers of `analyse` are what seqblocks/serve/shown.py returns, or null if a newer text arrived meanwhile.
const backend = {
  starting: "",  // a remark until the first answer
  follows: true,  // whether the file may change by itself
  examples: async () => [],
  read: () => backend.ask("file"),
  analyse: (text, set) => backend.ask("analyse", { text, set }),
  save: (text, changed) => backend.ask("save", { text, changed }),
  async ask(name, body) {
    const options = body && { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
    const answer = await fetch(name, options);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  },
};
