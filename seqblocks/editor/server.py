"""The language server: answer the requests of an editor with what the other files of this folder find."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams, JsonRpcInvalidRequest, JsonRpcParseError
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol
from pygls.uris import from_fs_path, to_fs_path

from seqblocks._version import __version__
from seqblocks.analysis.analyse import Folders
from seqblocks.editor import diagnostics, fixes, folding, hints, lens, navigation, rename, symbols
from seqblocks.editor.completion import Completion, complete
from seqblocks.editor.edits import Edit
from seqblocks.editor.hover import hover
from seqblocks.editor.opened import Opened, is_spec
from seqblocks.editor.positions import Place, Spot, lines_of
from seqblocks.errors import Diagnostic, Span, unwritable
from seqblocks.language.spec_files import bundled

REFUSED = -32803  # RequestFailed of the protocol: the request is valid, and cannot be met
NO_MESSAGE = 'a message is one object with "jsonrpc": "2.0" and a method, a result or an error'
LOG_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
DELAY = 0.1  # seconds without a change before diagnostics are published
LENGTH = re.compile(rb"(?i)content-length[ \t]*:[ \t]*(\d+)\s*")  # a header, as HTTP lets a client write it
KINDS = {
    "section": types.SymbolKind.Namespace,
    "name": types.SymbolKind.Constant,
    "block": types.SymbolKind.Class,
    "argument": types.SymbolKind.Property,
    "step": types.SymbolKind.Function,
}


ITEM_KINDS = {
    "key": types.CompletionItemKind.Property,
    "word": types.CompletionItemKind.EnumMember,
    "verb": types.CompletionItemKind.Function,
    "block": types.CompletionItemKind.Class,
    "wire": types.CompletionItemKind.Variable,
    "name": types.CompletionItemKind.Constant,
    "file": types.CompletionItemKind.File,
    "function": types.CompletionItemKind.Operator,
}


class Headers:
    """What a client sends, with its headers written in the only way that pygls reads them."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.read = stream, stream.read

    def readline(self) -> bytes:
        line = self.stream.readline()
        found = LENGTH.fullmatch(line)
        return b"Content-Length: %s\r\n" % found[1] if found else line


class Protocol(LanguageServerProtocol):
    """Answers also what pygls leaves unanswered: invalid messages, and requests after `shutdown`."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """Return a message, or None for a request that has been refused and for an invalid notification."""
        if "jsonrpc" not in data:  # a part of a message
            return data
        if "method" in data:
            data.setdefault("params", None)  # may be left out, which pygls reads only for methods of the protocol
        try:
            return super().structure_message(data)
        except JsonRpcException:
            if not isinstance(data.get("method"), str):
                raise JsonRpcInvalidRequest(NO_MESSAGE) from None
            if isinstance(data.get("id"), int | str):
                text = f"the parameters of {data['method']} are not those of the protocol"
                self._send_response(data["id"], error=JsonRpcInvalidParams(text).to_response_error())
            return None

    def handle_message(self, message: Any) -> None:
        """Handle a message. Raises JsonRpcInvalidRequest if it is none."""
        if message is None:
            return
        if getattr(message, "jsonrpc", "") != self.VERSION or not isinstance(getattr(message, "method", ""), str):
            raise JsonRpcInvalidRequest(NO_MESSAGE)
        if isinstance(message, types.DidChangeTextDocumentNotification) and not self._is_open(message.params):
            logging.warning("a file that is not open has changed: %s", message.params.text_document.uri)
            return
        if self._shutdown and hasattr(message, "method") and hasattr(message, "id"):
            error = JsonRpcInvalidRequest("the server is shutting down: it takes no more requests")
            self._send_response(message.id, error=error.to_response_error())
        else:
            super().handle_message(message)

    def _is_open(self, params: types.DidChangeTextDocumentParams) -> bool:
        return params.text_document.uri in self.workspace.text_documents


class Server(LanguageServer):
    """A server over the standard streams, with the specs that are open in the editor."""

    def __init__(self, allow_use: Folders = (), delay: float = DELAY) -> None:
        # Whole texts, not changes: pygls and YAML do not agree on what ends a line.
        kind = types.TextDocumentSyncKind.Full
        super().__init__("seqblocks", __version__, text_document_sync_kind=kind, protocol_cls=Protocol)
        self.allow_use, self.delay = allow_use, delay
        self.hints: tuple[str, ...] = hints.SHOWN  # a setting: what inlay hints show
        self.opened: dict[str, Opened] = {}
        self.newest: dict[str, int] = {}  # number of the last change of each file
        self.published: dict[str, dict[str, list[types.Diagnostic]]] = {}  # by file, then by the spec that caused them

    @property
    def encoding(self) -> str:
        found = self.workspace.position_encoding
        return str(getattr(found, "value", found) or "utf-16")

    def spec(self, uri: str) -> Opened | None:
        """Return the analysis of an open file as it is now, or None if it is not a spec."""
        if uri not in self.workspace.text_documents:
            return None
        text = self.workspace.text_documents[uri].source
        last = self.opened.get(uri)
        if last is not None and last.text == text:
            return last
        if not is_spec(text):
            self.opened.pop(uri, None)
            return None
        self.opened[uri] = found = Opened(text, _path(uri), self.allow_use, last, uri)
        return found

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Answer what is no message, which has no id; show other errors to the user."""
        refusal = _refusal(error)
        if source is JsonRpcException and refusal:  # in the loop that reads messages
            self.protocol._send_data({"jsonrpc": "2.0", "id": None, "error": refusal.to_response_error()})
        else:
            super().report_server_error(error, source)

    # --- positions ----------------------------------------------------------------------------------------------------

    def spot(self, opened: Opened, position: types.Position) -> Spot:
        return lines_of(opened.text, self.encoding).spot(Place(position.line, position.character))

    def position(self, opened: Opened, spot: Spot) -> types.Position:
        return types.Position(*lines_of(opened.text, self.encoding).place(spot))

    def range(self, span: Span) -> types.Range:
        start, end = lines_of(span.source.text, self.encoding).area(span)
        return types.Range(types.Position(*start), types.Position(*end))

    def uri(self, opened_uri: str, opened: Opened, source_name: str) -> str | None:
        """Return the address of the file of a source: this one, another one, or a bundled one."""
        if source_name == opened.name:
            return opened_uri
        if source_name.startswith("<"):
            known = bundled().get(source_name.removeprefix("<bundled ").removesuffix(">"))
            source_name = str(known) if known else ""
        found: str | None = from_fs_path(source_name) if source_name else None
        return found

    def changes(self, uri: str, opened: Opened, edits: list[Edit]) -> types.WorkspaceEdit:
        """Return edits of the protocol, by file."""
        found: dict[str, list[types.TextEdit]] = {}
        for span, text in edits:
            where = self.uri(uri, opened, span.source.name)
            if where:
                found.setdefault(where, []).append(types.TextEdit(self.range(span), text))
        return types.WorkspaceEdit(changes=found)

    def location(self, opened_uri: str, opened: Opened, span: Span) -> types.Location | None:
        uri = self.uri(opened_uri, opened, span.source.name)
        return types.Location(uri, self.range(span)) if uri else None

    # --- diagnostics --------------------------------------------------------------------------------------------------

    async def changed(self, uri: str) -> None:
        """Publish the diagnostics of a file after a while without further changes."""
        self.newest[uri] = own = self.newest.get(uri, 0) + 1
        await asyncio.sleep(self.delay)
        if self.newest.get(uri) == own and uri in self.workspace.text_documents:
            self.publish(uri)

    def publish(self, uri: str) -> None:
        """Publish the diagnostics of a spec, at the files that they are about."""
        opened = self.spec(uri)
        found: dict[str, list[types.Diagnostic]] = {}
        if opened:
            for name, each in diagnostics.by_file(opened).items():
                where = self.uri(uri, opened, name)
                if where:
                    found[where] = [self.diagnostic(uri, opened, *one) for one in each]
        before = [other for other, causes in self.published.items() if uri in causes]
        for where in {*before, *found}:
            causes = self.published.setdefault(where, {})
            causes.pop(uri, None)
            if found.get(where):
                causes[uri] = found[where]
            self._send(where)

    def _send(self, uri: str) -> None:
        """Send the diagnostics of a file: its own if it is open, else those that other specs found in it."""
        causes = self.published.get(uri, {})
        own = uri in self.workspace.text_documents
        shown = causes.get(uri, []) if own else [one for each in causes.values() for one in each]
        document = self.workspace.text_documents.get(uri)
        version = document.version if document else None
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, shown, version))

    def diagnostic(self, uri: str, opened: Opened, span: Span, each: Diagnostic) -> types.Diagnostic:
        related = []
        for note in each.notes:
            where = self.location(uri, opened, note.span) if note.span else None
            if where:
                related.append(types.DiagnosticRelatedInformation(where, note.text))
        severity = types.DiagnosticSeverity.Error if each.severity == "error" else types.DiagnosticSeverity.Warning
        return types.Diagnostic(
            self.range(span), diagnostics.message(each), severity, each.code, source="seqblocks",
            related_information=related or None,
        )  # fmt: skip

    def analyse_again(self, uris: set[str]) -> None:
        """Analyse specs again that may use a file that has changed, and ask the editor to show what it found."""
        for uri in sorted(uris):
            self.opened.pop(uri, None)
            self.publish(uri)
        if uris:
            self.refresh()

    def configure(self, settings: Any) -> bool:
        """Take the user's settings, {"hints": ["shapes", …]}; return whether they changed. Others are ignored."""
        wanted = settings.get("hints") if isinstance(settings, dict) else None
        if not isinstance(wanted, list):
            return False
        before, self.hints = self.hints, tuple(each for each in hints.PARTS if each in wanted)
        return before != self.hints

    def refresh(self) -> None:
        able = self.client_capabilities.workspace
        if able and able.inlay_hint and able.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)
        if able and able.code_lens and able.code_lens.refresh_support:
            self.workspace_code_lens_refresh(None)

    def closed(self, uri: str) -> None:
        """Forget a file, and its diagnostics."""
        self.opened.pop(uri, None)
        self.newest.pop(uri, None)
        for where, causes in [*self.published.items()]:
            if causes.pop(uri, None) is not None or where == uri:
                self._send(where)
            if not causes:
                del self.published[where]


def _path(uri: str) -> Path | None:
    """Return the path of a file, or None for a text that has none, such as an unsaved one."""
    if not uri.startswith("file:"):
        return None
    found = to_fs_path(uri)
    return Path(found) if found else None


def server(allow_use: Folders = (), delay: float = DELAY) -> Server:
    """Return a server with all its features."""
    made = Server(allow_use, delay)
    for add in (_changes, _descriptions, _navigation, _completion, _changes_of_text):
        add(made)
    return made


def serve(reading: BinaryIO, writing: BinaryIO, allow_use: Folders = (), log: Path | None = None) -> None:
    """Serve an editor until it ends the connection. log: a file for what pygls reports.

    Raises UsageError if it cannot be written.
    """
    if log is not None:
        try:
            logging.basicConfig(filename=log, encoding="utf-8", level=logging.INFO, format=LOG_LINE)
        except OSError as error:
            raise unwritable(log, error) from None
        logging.raiseExceptions = False  # a full disk: Python would print a traceback for each line
        for handler in logging.getLogger().handlers:
            handler.addFilter(_without_refusals)
        logging.info("seqblocks %s", __version__)
    server(allow_use).start_io(cast(BinaryIO, Headers(reading)), writing)


def _without_refusals(record: logging.LogRecord) -> bool:
    """Log a refused request as one line: its traceback would look like a fault of the server."""
    refusal = _refusal(record.exc_info[1]) if record.exc_info and record.exc_info[1] else None
    if refusal:
        record.msg, record.args, record.exc_info, record.exc_text = "refused: %s", (refusal.message,), None, None
        record.levelno, record.levelname = logging.INFO, "INFO"
    elif str(record.msg).startswith("Unable to deserialize"):  # pygls puts a traceback into the text
        record.msg, record.args = "a message of the client is not one of the protocol", ()
    return True


def _refusal(error: BaseException) -> JsonRpcException | None:
    """Return how an error is answered that the client caused, or None if it is a fault of the server."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return JsonRpcParseError(f"this is not JSON: {error}")
    codes = (REFUSED, JsonRpcInvalidParams.CODE, JsonRpcInvalidRequest.CODE)
    return error if isinstance(error, JsonRpcException) and error.code in codes else None


def _changes(server: Server) -> None:
    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: types.DidOpenTextDocumentParams) -> None:
        server.publish(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def did_change(params: types.DidChangeTextDocumentParams) -> None:
        await server.changed(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def did_save(params: types.DidSaveTextDocumentParams) -> None:
        server.analyse_again(set(server.opened) - {params.text_document.uri})

    @server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def did_change_files(params: types.DidChangeWatchedFilesParams) -> None:
        server.analyse_again(set(server.opened) - {each.uri for each in params.changes})

    @server.feature(types.INITIALIZE)
    def on_initialize(params: types.InitializeParams) -> None:
        server.configure(params.initialization_options)

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def did_configure(params: types.DidChangeConfigurationParams) -> None:
        settings = params.settings
        if server.configure(settings.get("seqblocks") if isinstance(settings, dict) else None):
            server.refresh()

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(params: types.DidCloseTextDocumentParams) -> None:
        server.closed(params.text_document.uri)


def _descriptions(server: Server) -> None:
    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def on_hover(params: types.HoverParams) -> types.Hover | None:
        opened = server.spec(params.text_document.uri)
        found = hover(opened, server.spot(opened, params.position)) if opened else None
        if found is None:
            return None
        return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, found.text), server.range(found.span))

    @server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    def on_hints(params: types.InlayHintParams) -> list[types.InlayHint]:
        opened = server.spec(params.text_document.uri)
        if opened is None:
            return []
        first, last = server.spot(opened, params.range.start).line, server.spot(opened, params.range.end).line
        return [
            types.InlayHint(
                server.position(opened, each.spot), each.text, padding_left=True,
                tooltip=types.MarkupContent(types.MarkupKind.PlainText, each.more),
            )
            for each in hints.hints(opened, first, last, server.hints)
        ]  # fmt: skip

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def on_symbols(params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
        opened = server.spec(params.text_document.uri)
        return [_symbol(server, each) for each in symbols.symbols(opened)] if opened else []

    @server.feature(types.TEXT_DOCUMENT_FOLDING_RANGE)
    def on_folds(params: types.FoldingRangeParams) -> list[types.FoldingRange]:
        opened = server.spec(params.text_document.uri)
        found = folding.folds(opened) if opened else []
        lines = [[server.position(opened, Spot(line, 1)).line for line in each] for each in found] if opened else []
        return [types.FoldingRange(first, last) for first, last in lines]

    @server.feature(types.TEXT_DOCUMENT_SELECTION_RANGE)
    def on_selection(params: types.SelectionRangeParams) -> list[types.SelectionRange] | None:
        opened = server.spec(params.text_document.uri)
        return [_selection(server, opened, each) for each in params.positions] if opened else None

    @server.feature(types.TEXT_DOCUMENT_CODE_LENS)
    def on_lens(params: types.CodeLensParams) -> list[types.CodeLens]:
        opened = server.spec(params.text_document.uri)
        found = lens.lenses(opened) if opened else []
        return [types.CodeLens(server.range(each.span), types.Command(each.text, "")) for each in found]

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_LINK)
    def on_links(params: types.DocumentLinkParams) -> list[types.DocumentLink]:
        uri = params.text_document.uri
        opened = server.spec(uri)
        if opened is None:
            return []
        found = ((span, server.uri(uri, opened, file.source.name)) for span, file in navigation.links(opened))
        return [types.DocumentLink(server.range(span), target) for span, target in found]


def _selection(server: Server, opened: Opened, position: types.Position) -> types.SelectionRange:
    found: types.SelectionRange | None = None
    for span in reversed(folding.around(opened, server.spot(opened, position))):
        found = types.SelectionRange(server.range(span), found)
    return found or types.SelectionRange(types.Range(position, position))  # one for each position


def _symbol(server: Server, each: symbols.Symbol) -> types.DocumentSymbol:
    children = [_symbol(server, inner) for inner in each.children]
    whole, own = server.range(each.span), server.range(each.own)
    return types.DocumentSymbol(each.name, KINDS[each.kind], whole, own, each.detail or None, children=children)


def _navigation(server: Server) -> None:
    def ask(params: Any, find: Callable[[Opened, Spot], Any]) -> Any:
        """Return what a function finds at the position of a request, as locations."""
        uri = params.text_document.uri
        opened = server.spec(uri)
        found = find(opened, server.spot(opened, params.position)) if opened else None
        if opened is None or not found:
            return None
        spans = [found] if isinstance(found, Span) else found
        return [where for span in spans if (where := server.location(uri, opened, span))]

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    def on_definition(params: types.DefinitionParams) -> list[types.Location] | None:
        found: list[types.Location] | None = ask(params, navigation.definition)
        return found

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    def on_references(params: types.ReferenceParams) -> list[types.Location] | None:
        wanted = params.context.include_declaration
        find = partial(navigation.references, with_definition=wanted)
        found: list[types.Location] | None = ask(params, find)
        return found

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    def on_highlight(params: types.DocumentHighlightParams) -> list[types.DocumentHighlight]:
        return [types.DocumentHighlight(each.range) for each in ask(params, navigation.occurrences) or ()]


def _completion(server: Server) -> None:
    options = types.CompletionOptions(trigger_characters=[" ", "[", "{", "."])

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, options)
    def on_completion(params: types.CompletionParams) -> types.CompletionList | None:
        opened = server.spec(params.text_document.uri)
        found = complete(opened, server.spot(opened, params.position)) if opened else None
        return types.CompletionList(False, _completion_items(server, found)) if found else None


def _completion_items(server: Server, found: Completion) -> list[types.CompletionItem]:
    """Return the items of the protocol, which an editor sorts by `sort_text` where they match equally well."""
    capabilities = server.client_capabilities.text_document
    able = capabilities.completion.completion_item if capabilities and capabilities.completion else None
    snippets = bool(able and able.snippet_support)
    where = server.range(found.span)
    items = []
    for number, each in enumerate(found.items):
        plain = re.sub(r"\$\d", "", each.text)
        is_snippet = snippets and plain != each.text
        items.append(
            types.CompletionItem(
                each.label,
                kind=ITEM_KINDS[each.kind],
                detail=each.detail or None,
                documentation=types.MarkupContent(types.MarkupKind.Markdown, each.about) if each.about else None,
                sort_text=f"{number:04}",
                insert_text_format=types.InsertTextFormat.Snippet if is_snippet else types.InsertTextFormat.PlainText,
                text_edit=types.TextEdit(where, each.text if is_snippet else plain),
                additional_text_edits=[types.TextEdit(server.range(each.more[0]), each.more[1])] if each.more else None,
            )
        )
    return items


def _changes_of_text(server: Server) -> None:
    @server.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions([types.CodeActionKind.QuickFix]))
    def on_fixes(params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = params.text_document.uri
        opened = server.spec(uri)
        if opened is None:
            return []
        found = fixes.fixes(opened, server.spot(opened, params.range.start), server.spot(opened, params.range.end))
        return [
            types.CodeAction(
                each.title, types.CodeActionKind.QuickFix, is_preferred=len(found) == 1,
                diagnostics=[server.diagnostic(uri, opened, each.diagnostic.span, each.diagnostic)],
                edit=server.changes(uri, opened, each.edits),
            )
            for each in found
            if each.diagnostic.span
        ]  # fmt: skip

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    def on_prepare(params: types.PrepareRenameParams) -> types.PrepareRenamePlaceholder | None:
        opened = server.spec(params.text_document.uri)
        if opened is None:
            return None
        try:
            found = rename.target(opened, server.spot(opened, params.position))
        except rename.Refused as error:
            raise JsonRpcException(str(error), REFUSED) from None
        return types.PrepareRenamePlaceholder(server.range(found.span), found.name)

    @server.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    def on_rename(params: types.RenameParams) -> types.WorkspaceEdit | None:
        uri = params.text_document.uri
        opened = server.spec(uri)
        if opened is None:
            return None
        try:
            edits = rename.rename(opened, server.spot(opened, params.position), params.new_name)
        except rename.Refused as error:
            raise JsonRpcException(str(error), REFUSED) from None
        return server.changes(uri, opened, edits)
