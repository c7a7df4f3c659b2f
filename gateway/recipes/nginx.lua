-- The Lua side of nginx.conf: asks kvrouted-gateway for a list of engines, follows it, and says who served.
local balancer = require "ngx.balancer"

-- [pick] log_address of the gateway.
local LOG_HOST, LOG_PORT = "127.0.0.1", 8082

-- Headers of the gateway's refusals that callers get.
local PASSED = {["content-type"] = true, ["retry-after"] = true, ["x-request-id"] = true}

local M = {}

local function send(_, line)
  -- A new socket each time: a connected one reports that the gateway was down, and drops the line, once it is up again.
  local socket = ngx.socket.udp()
  local ok, why = socket:setpeername(LOG_HOST, LOG_PORT)
  if ok then ok, why = socket:send(line) end
  if not ok then ngx.log(ngx.ERR, "the gateway cannot be told ", line, ": ", why) end
  socket:close()
end

-- Filters and the log phase cannot use sockets; timers can.
local function tell(line)
  local ok, why = ngx.timer.at(0, send, line)
  if not ok then ngx.log(ngx.ERR, "the gateway cannot be told ", line, ": ", why) end
end

local function split(list)
  local parts = {}
  for part in (list or ""):gmatch("[^,]+") do parts[#parts + 1] = part end
  return parts
end

local function refuse(status, code, message)
  local kind = status < 500 and "invalid_request_error" or "server_error"
  ngx.status = status
  ngx.header["content-type"] = "application/json"
  if not ngx.is_subrequest then ngx.header["x-request-id"] = ngx.var.request_id end
  ngx.print('{"error": {"message": "', message, '", "type": "', kind, '", "param": null, "code": "', code, '"}}')
end

-- The engines of the gateway's answer, best first. nil = nginx cannot connect to one of them.
local function engines(answer)
  local list = {}
  local workers, ranks = split(answer.header["x-workers"]), split(answer.header["x-ranks"])
  for place, endpoint in ipairs(split(answer.header["x-endpoints"])) do
    local host, port = endpoint:match("^(.+):(%d+)$")
    -- A balancer takes addresses only: nginx resolves names before it.
    if not host or not (host:find("^%d+%.%d+%.%d+%.%d+$") or host:find("^%[.+%]$")) then return nil, endpoint end
    local rank = ranks[place]
    list[place] = {
      endpoint = endpoint, host = host, port = tonumber(port), worker = workers[place], rank = rank == "-" and "" or rank,
    }
  end
  return list
end

-- Asks the gateway. Its refusals go to the caller. Without the gateway, requests go to the engines in turn.
function M.pick()
  ngx.req.read_body()
  ngx.var.picked = "1"
  local answer = ngx.location.capture("/_kvrouted_pick", {
    method = ngx.HTTP_POST,
    always_forward_body = true,
    vars = {pick_id = ngx.var.request_id, pick_path = ngx.var.uri},
  })
  -- Every answer of the gateway has a request id; nginx's own errors have none.
  if not answer.header["x-request-id"] or answer.truncated then
    ngx.log(ngx.ERR, "the gateway does not answer (", answer.status, "): the engines get requests in turn")
    return ngx.exec("@without_gateway")
  end
  if answer.status ~= 200 then
    ngx.status = answer.status
    for name, value in pairs(answer.header) do
      if PASSED[name:lower()] then ngx.header[name] = value end
    end
    ngx.print(answer.body)
    return ngx.exit(ngx.HTTP_OK)
  end
  local list, odd = engines(answer)
  if not list then
    ngx.log(ngx.ERR, "nginx cannot follow the gateway to ", odd, ": name engines by IP address, or by dns+http://")
    return ngx.exec("@without_gateway")
  end
  ngx.ctx.list, ngx.ctx.place = list, 0
  ngx.var.rank = list[1].rank
end

-- The balancer: one call for each attempt.
function M.next_engine()
  local list, place = ngx.ctx.list, ngx.ctx.place
  if place > 0 then ngx.var.failed = ngx.var.failed .. " failed=" .. list[place].endpoint end
  place = place + 1
  ngx.ctx.place = place
  local engine = list[place]
  if not engine then return ngx.exit(502) end
  if place == 1 then
    -- nginx lowers the number to proxy_next_upstream_tries.
    balancer.set_more_tries(#list - 1)
  elseif engine.rank ~= list[place - 1].rank then
    ngx.var.rank = engine.rank
    balancer.recreate_request()
  end
  local ok, why = balancer.set_current_peer(engine.host, engine.port)
  if not ok then
    ngx.log(ngx.ERR, engine.endpoint, ": ", why)
    return ngx.exit(502)
  end
end

-- With the first byte of a reply, the prompt is computed: the worker's backlog is shorter.
function M.first_byte()
  local list = ngx.ctx.list
  if not list or ngx.arg[1] == "" or ngx.status ~= 200 then return end
  ngx.ctx.list = nil
  tell("prefilled=" .. ngx.var.request_id .. " worker=" .. list[ngx.ctx.place].worker)
end

-- The end of a request that the gateway was asked for.
function M.ended()
  if ngx.is_subrequest or ngx.var.picked == "" then return end
  tell("id=" .. ngx.var.request_id .. ngx.var.failed .. " status=" .. ngx.status)
end

local OWN_ERRORS = {
  [400] = {"invalid_request", "nginx cannot read the request"},
  [411] = {"length_required", "the request needs a content-length"},
  [413] = {"body_too_large", "the body is larger than may be; send a shorter one"},
  [414] = {"uri_too_large", "the URI is too long"},
  [431] = {"headers_too_large", "the headers are larger than may be"},     -- 494 within nginx
  [500] = {"proxy_failed", "nginx failed; see its error log"},
  [502] = {"engine_unreachable", "no engine took the request; try again"},
  [504] = {"engine_timeout", "the engine did not answer in time"},
}

-- nginx's own errors, in OpenAI's shape.
function M.own_error()
  local status = ngx.status == 494 and 431 or ngx.status
  if not OWN_ERRORS[status] then status = 500 end
  if status >= 502 then ngx.header["retry-after"] = "1" end
  refuse(status, OWN_ERRORS[status][1], OWN_ERRORS[status][2])
end

function M.unknown_path()
  refuse(404, "unknown_path", "this path is not served here; see /v1/models for the models")
end

return M
