-- The Lua side of haproxy.cfg: asks kvrouted-gateway for a list of engines, and names the server of each attempt.

-- [pick] address of the gateway.
local GATEWAY_HOST, GATEWAY_PORT = "127.0.0.1", 8081
-- More than tokens.timeout_ms and daemon.timeout_ms together.
local TIMEOUT_S = 10
-- Headers that the gateway reads; the lines of haproxy.cfg say which of them callers may set.
local HINTS = {"x-kvrouted-session", "x-kvrouted-priority", "x-gateway-inference-objective", "x-gateway-inference-fairness-id"}

-- The servers of the backend in its order, and the place of each, from 0, by its address.
local servers, places = {}, {}
-- For requests that the gateway does not place.
local turn = 0

core.register_init(function()
  local found = {}
  for _, server in pairs(core.backends["engines"].servers) do
    found[#found + 1] = {id = tonumber(server:get_stats().sid), address = server:get_addr()}
  end
  table.sort(found, function(a, b) return a.id < b.id end)
  for place, server in ipairs(found) do
    servers[place], places[server.address] = server.address, place - 1
  end
end)

local function split(list)
  local parts = {}
  for part in (list or ""):gmatch("[^,]+") do parts[#parts + 1] = part end
  return parts
end

-- Sends a request to the gateway. nil = it does not answer.
local function ask(head, body)
  local socket = core.tcp()
  socket:settimeout(TIMEOUT_S)
  if not socket:connect(GATEWAY_HOST, GATEWAY_PORT) then return nil end
  -- One write: the first one must not wait for the second.
  if not socket:send(head .. "content-length: " .. #body .. "\r\nconnection: close\r\n\r\n" .. body) then
    socket:close()
    return nil
  end
  local status = tonumber(((socket:receive("*l") or ""):match("^HTTP/1%.1 (%d+)")))
  local headers, line = {}, status and socket:receive("*l")
  while line and line:find("%S") do
    local name, value = line:match("^([^:]+):%s*(.-)%s*$")
    if name then headers[name:lower()] = value end
    line = socket:receive("*l")
  end
  local length = tonumber(headers["content-length"] or "")
  local content = line and length and (length == 0 and "" or socket:receive(length))
  socket:close()
  if not content then return nil end
  return {status = status, headers = headers, body = content}
end

-- The servers of the gateway's answer, best first.
local function follow(txn, headers)
  local ranks, list, rank = split(headers["x-ranks"]), {}, nil
  for at, endpoint in ipairs(split(headers["x-endpoints"])) do
    rank = rank or ranks[at]
    if not places[endpoint] then
      txn:Warning("HAProxy cannot follow the gateway to " .. endpoint .. ": the backend has no such server")
    -- The headers of a request are the same for each attempt, so that an engine with another rank cannot follow.
    elseif ranks[at] == rank then
      list[#list + 1] = endpoint
    end
  end
  if #list == 0 then return end
  if rank ~= "-" then txn.http:req_set_header("x-data-parallel-rank", rank) end
  txn:set_priv({list = list, place = 0})
end

-- Asks the gateway. Its refusals go to the caller. Without the gateway, the servers take turns.
core.register_action("pick", {"http-req"}, function(txn)
  local lines = {
    "POST /pick HTTP/1.1", "host: gateway", "content-type: application/json", "x-request-id: " .. txn.f:unique_id(),
    "x-kvrouted-path: " .. txn.f:path(),
  }
  local own = txn.http:req_get_headers()
  for _, name in ipairs(HINTS) do
    if own[name] then lines[#lines + 1] = name .. ": " .. own[name][0] end
  end
  local answer = ask(table.concat(lines, "\r\n") .. "\r\n", txn.f:req_body() or "")
  if not answer then
    txn:Warning("the gateway does not answer: the engines get requests in turn")
    return
  end
  if answer.status == 200 then return follow(txn, answer.headers) end
  local reply = txn:reply {status = answer.status, body = answer.body}
  for _, name in ipairs {"content-type", "retry-after", "x-request-id"} do
    if answer.headers[name] then reply:add_header(name, answer.headers[name]) end
  end
  txn:done(reply)
end)

-- All servers, beginning with another one each time.
local function in_turn()
  turn = turn + 1
  local list = {}
  for place = 1, #servers do list[place] = servers[(turn + place) % #servers + 1] end
  return {list = list, place = 0}
end

-- One call for each attempt: a key whose hash is the place of the next engine of the list.
core.register_fetches("next_engine", function(txn)
  local picked = txn:get_priv() or in_turn()
  local list = picked.list
  if list[picked.place] then
    txn:set_var("txn.failed", (txn:get_var("txn.failed") or "") .. " failed=" .. list[picked.place])
  end
  picked.place = picked.place + 1
  txn:set_priv(picked)
  -- Further attempts stay at the last engine: the others cannot run the request.
  local endpoint = list[picked.place] or list[#list]
  -- djb2 of one byte is 177573 + byte, and HAProxy takes it modulo the number of servers.
  return string.char((places[endpoint] - 177573) % #servers)
end)
