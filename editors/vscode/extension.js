// Start `seqblocks lsp` and connect the editor to it.

const { existsSync } = require("fs");
const path = require("path");
const vscode = require("vscode");
const { LanguageClient, RevealOutputChannelOn } = require("vscode-languageclient/node");

let client;
let channel;
let watcher;

// Return the interpreter that the Python extension has selected, if that extension is installed.
async function interpreter() {
  const extension = vscode.extensions.getExtension("ms-python.python");
  if (!extension) return undefined;
  const python = extension.isActive ? extension.exports : await extension.activate();
  const folder = vscode.workspace.workspaceFolders?.[0]?.uri;
  return python?.environments?.getActiveEnvironmentPath?.(folder)?.path;
}

// Return the words of the command: the user's own, that of the selected interpreter, or the one on the path.
async function command() {
  const configured = vscode.workspace.getConfiguration("seqblocks").get("command");
  if (configured.length) return configured;
  // An interpreter in a folder that is not trusted would run code of that folder.
  const python = vscode.workspace.isTrusted ? await interpreter().catch(() => undefined) : undefined;
  if (python) {
    const beside = path.join(path.dirname(python), process.platform === "win32" ? "seqblocks.exe" : "seqblocks");
    if (existsSync(beside)) return [beside];
  }
  return ["seqblocks"];
}

async function start() {
  const [program, ...first] = await command();
  const settings = vscode.workspace.getConfiguration("seqblocks"), more = settings.get("arguments");
  const server = { command: program, args: [...first, "lsp", ...more] };
  client = new LanguageClient("seqblocks", "seqblocks", server, {
    documentSelector: [{ language: "yaml" }],
    initializationOptions: { hints: settings.get("hints") },
    synchronize: { fileEvents: watcher, configurationSection: "seqblocks" }, // other specs may use a file that changes
    outputChannel: channel,
    revealOutputChannelOn: RevealOutputChannelOn.Never,
  });
  try {
    await client.start();
  } catch (error) {
    const words = [program, ...server.args].join(" ");
    const text = `\`${words}\` does not start. Install it with: pip install 'seqblocks[lsp]', or set seqblocks.command.`;
    channel.appendLine(`${text}\n${error}`);
    if ((await vscode.window.showWarningMessage(text, "Settings")) === "Settings") {
      await vscode.commands.executeCommand("workbench.action.openSettings", "seqblocks.command");
    }
  }
}

async function stop() {
  const running = client;
  client = undefined;
  // A client that never started cannot be stopped.
  await running?.stop().catch(() => undefined);
}

async function restart() {
  await stop();
  await start();
}

exports.activate = async (context) => {
  channel = vscode.window.createOutputChannel("seqblocks", { log: true });
  watcher = vscode.workspace.createFileSystemWatcher("**/*.{yaml,yml}");
  const changed = (event) => event.affectsConfiguration("seqblocks") && restart();
  context.subscriptions.push(
    channel,
    watcher,
    vscode.commands.registerCommand("seqblocks.restart", restart),
    vscode.workspace.onDidChangeConfiguration(changed),
    vscode.workspace.onDidGrantWorkspaceTrust(restart),
  );
  await start();
};

exports.deactivate = stop;
