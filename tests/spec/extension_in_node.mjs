// Load the extension of VS Code with stand-ins for the editor and its client, and print what it starts.
// Arguments: the file of the extension, and the state of the editor as JSON.

import Module, { createRequire } from "node:module";

const [file, given] = process.argv.slice(2);
const state = JSON.parse(given);
const said = { started: [], stopped: 0, warnings: [] };
const listeners = {};

const vscode = {
  extensions: {
    getExtension: (name) =>
      name === "ms-python.python" && state.python
        ? { isActive: true, exports: { environments: { getActiveEnvironmentPath: () => ({ path: state.python }) } } }
        : undefined,
  },
  workspace: {
    isTrusted: state.trusted ?? true,
    workspaceFolders: [],
    createFileSystemWatcher: (pattern) => pattern,
    getConfiguration: () => ({ get: (key) => state[key] ?? [] }),
    onDidChangeConfiguration: (run) => (listeners.changed = run),
    onDidGrantWorkspaceTrust: (run) => (listeners.trusted = run),
  },
  window: {
    createOutputChannel: (_, options) => ({ logLevel: options.log ? 2 : undefined, appendLine: () => {} }),
    showWarningMessage: async (text) => void said.warnings.push(text),
  },
  commands: { registerCommand: (name, run) => (listeners[name] = run), executeCommand: async () => {} },
};

class LanguageClient {
  constructor(id, name, server, options) {
    this.words = [server.command, ...server.args];
    said.selector = options.documentSelector;
    said.isLog = options.outputChannel.logLevel !== undefined; // the client takes no other channel
  }
  async start() {
    if (state.fails) throw new Error("no such file");
    said.started.push(this.words);
  }
  async stop() {
    if (state.fails) throw new Error("it does not run");
    said.stopped += 1;
  }
}

const stands = { vscode, "vscode-languageclient/node": { LanguageClient, RevealOutputChannelOn: { Never: 4 } } };
const load = Module._load;
Module._load = (name, ...more) => stands[name] ?? load(name, ...more);
const extension = createRequire(import.meta.url)(file);
await extension.activate({ subscriptions: [] });
await listeners["seqblocks.restart"]();
await listeners.changed({ affectsConfiguration: (name) => name === "editor" });
await extension.deactivate();
process.stdout.write(JSON.stringify(said));
