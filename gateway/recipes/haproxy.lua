-- The Lua side of haproxy.cfg: asks kvrouted-gateway for a list of engines, and names the server of each attempt.

-- [pick] address of the gateway.
local GATEWAY = "127.0.0.1:8081"
-- More than tokens.timeout_ms and daemon.timeout_ms together.
local TIMEOUT_MS = 10000
-- Headers that the gateway reads; the lines of haproxy.cfg say which of them callers may set.
local HINTS = {"x-kvrouted-session", "x-kvrouted-priority", "x-gateway-inference-objective", "x-gateway-inference-fairness-id"}

-- The place of each server in the backend, from 0, by its address.
local places, count = {}, 0

core.register_init(function()
  local servers = {}
  for _, server in pairs(core.backends["engines"].servers) do
    servers[#servers + 1] = {id = tonumber(server:get_stats().sid), address = server:get_addr()}
  end
  table.sort(servers, function(a, b) return a.id < b.id end)
  for place, server in ipairs(servers) do places[server.address] = place - 1 end
  count = #servers
end)

local function split(list)
  local parts = {}
  for part in (list or ""):gmatch("[^,]+") do parts[#parts + 1] = part end
  return parts
end

local function first(headers, name) return headers and headers[name] and headers[name][0] end

-- The servers of the gateway's answer, best first.
local function follow(txn, headers)
  local ranks, list = split(first(headers, "x-ranks")), {}
  for at, endpoint in ipairs(split(first(headers, "x-endpoints"))) do
    if not places[endpoint] then
      txn:Warning("HAProxy cannot follow the gateway to " .. endpoint .. ": the backend has no such server")
    -- The headers of a request are the same for each attempt, so that an engine with another rank cannot follow.
    elseif #list == 0 or ranks[at] == list[1].rank then
      list[#list + 1] = {endpoint = endpoint, rank = ranks[at]}
    end
  end
  if #list == 0 then return end
  if list[1].rank ~= "-" then txn.http:req_set_header("x-data-parallel-rank", list[1].rank) end
  txn:set_priv({list = list, place = 0})
end

-- Asks the gateway. Its refusals go to the caller. Without the gateway, no server is named.
core.register_action("pick", {"http-req"}, function(txn)
  local headers = {
    ["content-type"] = {"application/json"},
    ["x-request-id"] = {txn.f:unique_id()},
    ["x-kvrouted-path"] = {txn.f:path()},
  }
  local own = txn.http:req_get_headers()
  for _, name in ipairs(HINTS) do
    if own[name] then headers[name] = {own[name][0]} end
  end
  local client = core.httpclient()
  local answer = client:post {
    url = "http://" .. GATEWAY .. "/pick", headers = headers, body = txn.f:req_body() or "", timeout = TIMEOUT_MS,
  }
  -- Every answer of the gateway has a request id; HAProxy's own errors have none.
  if not answer or not first(answer.headers, "x-request-id") then
    txn:Warning("the gateway does not answer: the engines get requests in turn")
    return
  end
  if answer.status == 200 then return follow(txn, answer.headers) end
  local reply = txn:reply {status = answer.status, body = answer.body or ""}
  for _, name in ipairs {"content-type", "retry-after", "x-request-id"} do
    local value = first(answer.headers, name)
    if value then reply:add_header(name, value) end
  end
  txn:done(reply)
end)

-- One call for each attempt: a key whose hash is the place of the next engine of the list.
core.register_fetches("next_engine", function(txn)
  local picked = txn:get_priv()
  if not picked then return nil end
  local list = picked.list
  if list[picked.place] then
    txn:set_var("txn.failed", (txn:get_var("txn.failed") or "") .. " failed=" .. list[picked.place].endpoint)
  end
  picked.place = picked.place + 1
  local engine = list[picked.place]
  if not engine then return nil end
  -- djb2 of one byte is 177573 + byte, and HAProxy takes it modulo the number of servers.
  return string.char((places[engine.endpoint] - 177573) % count)
end)
