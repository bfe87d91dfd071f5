-- Drive the language server from a headless Neovim, and print what its functions returned as one line of JSON.

local found = {}

local function wait(what, check)
  if not vim.wait(20000, check, 20) then
    error("nothing came of " .. what)
  end
end

local function diagnostics()
  local all = {}
  for _, each in ipairs(vim.diagnostic.get(0)) do
    table.insert(all, { each.lnum, each.col, each.end_col, each.code, (each.message:gsub("\n.*", "")) })
  end
  return all
end

local function ask(method, params)
  local answers = vim.lsp.buf_request_sync(0, "textDocument/" .. method, params, 20000)
  for _, answer in pairs(answers or {}) do
    return answer.result
  end
end

local function at(line, column)
  vim.api.nvim_win_set_cursor(0, { line, column })
  local encoding = vim.fn.has("nvim-0.11") == 1 and "utf-16" or nil
  return vim.lsp.util.make_position_params(0, encoding)
end

local ok, problem = pcall(function()
  wait("the faults", function() return #vim.diagnostic.get(0) > 0 end)
  found.faults = diagnostics()
  found.hover = ask("hover", at(6, 7)).contents.value
  found.definition = ask("definition", at(8, 21))[1].range
  local line = vim.fn.getline(7)
  local range = { start = { line = 6, character = 0 }, ["end"] = { line = 6, character = #line } }
  local params = { textDocument = at(7, 0).textDocument, range = range, context = { diagnostics = {} } }
  local action = ask("codeAction", params)[1]
  vim.lsp.util.apply_workspace_edit(action.edit, "utf-16")
  wait("the quick fix", function() return #vim.diagnostic.get(0) == 0 end)
  local rename = at(6, 38)
  rename.newName = "wide"
  vim.lsp.util.apply_workspace_edit(ask("rename", rename), "utf-16")
  found.text = vim.api.nvim_buf_get_lines(0, 0, -1, false)
  if vim.lsp.inlay_hint then
    wait("the hints", function() return #vim.lsp.inlay_hint.get({ bufnr = 0 }) == 3 end)
    found.hints = vim.tbl_map(function(each) return each.inlay_hint.label end, vim.lsp.inlay_hint.get({ bufnr = 0 }))
  end
end)
if not ok then
  found.problem = problem
end
io.stdout:write(vim.fn.json_encode(found) .. "\n")
vim.cmd("qa!")
