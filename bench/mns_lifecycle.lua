-- Load for wrk: send, receive and delete in equal parts over the MNS protocol, every request really signed (V2, HMAC-SHA1).
--   MNS_ID=.. MNS_SECRET=.. QUEUE=/queues/bench wrk -t1 -c32 -d10s -s mns_lifecycle.lua http://127.0.0.1:9326/
-- NUM=1 (default) to 16 messages a request; BODY_BYTES=200; ONLY=send; MD5=1 sends Content-MD5 as the Python SDK does.
-- Prints one RESULT line.
local ffi = require("ffi")
ffi.cdef[[
typedef struct evp_md_st EVP_MD;
const EVP_MD *EVP_sha1(void);
unsigned char *HMAC(const EVP_MD *m, const void *key, int key_len, const unsigned char *d, size_t n, unsigned char *md, unsigned int *md_len);
int EVP_EncodeBlock(unsigned char *t, const unsigned char *f, int n);
unsigned char *MD5(const unsigned char *d, size_t n, unsigned char *md);
]]
local ok, crypto = pcall(ffi.load, "crypto")
if not ok then ok, crypto = pcall(ffi.load, "libcrypto.so.3") end
local env = os.getenv
local key, secret, queue = env("MNS_ID") or "test", env("MNS_SECRET") or "test", env("QUEUE") or "/queues/bench"
local num, only, checksum = tonumber(env("NUM") or "1"), env("ONLY"), env("MD5") == "1"
local body = string.rep("x", tonumber(env("BODY_BYTES") or "200"))
local out, outlen = ffi.new("unsigned char[32]"), ffi.new("unsigned int[1]")
local text64 = ffi.new("unsigned char[128]")
local function base64(s) return ffi.string(text64, crypto.EVP_EncodeBlock(text64, s, #s)) end
local function hmac(d) crypto.HMAC(crypto.EVP_sha1(), secret, #secret, d, #d, out, outlen); return ffi.string(out, 20) end
local hexchars = "0123456789abcdef"
local function md5(d)
  crypto.MD5(d, #d, out)
  local t = {}
  for i = 0, 15 do local b = out[i]; local h = math.floor(b / 16); t[#t + 1] = hexchars:sub(h + 1, h + 1) .. hexchars:sub(b % 16 + 1, b % 16 + 1) end
  return table.concat(t)
end
local date = os.date("!%a, %d %b %Y %H:%M:%S GMT", os.time())
local function request_for(method, target, payload)
  local kind, digest = payload and "text/xml;charset=UTF-8" or "", payload and checksum and base64(md5(payload)) or ""
  local text = method .. "\n" .. digest .. "\n" .. kind .. "\n" .. date .. "\nx-mns-version:2015-06-06\n" .. target
  local h = { ["Date"] = date, ["x-mns-version"] = "2015-06-06", ["User-Agent"] = "aliyun-sdk-python/1.3.0",
    ["Authorization"] = "MNS " .. key .. ":" .. base64(hmac(text)) }
  if payload then h["Content-Type"] = kind; if digest ~= "" then h["Content-MD5"] = digest end end
  return wrk.format(method, target, h, payload)
end
local head, xmlns = '<?xml version="1.0" encoding="utf-8"?>', ' xmlns="http://mns.aliyuncs.com/doc/v1/"'
local receipts, turn, serial = {}, 0, 0
sent, received, deleted, bad = 0, 0, 0, 0
-- no two bodies alike: a serial number leads each
local function send_request()
  serial = serial + 1
  local text = string.format("%010d", serial) .. body:sub(11)
  local one = "<MessageBody>" .. text .. "</MessageBody>"
  if num == 1 then return request_for("POST", queue .. "/messages", head .. "<Message" .. xmlns .. ">" .. one .. "</Message>") end
  return request_for("POST", queue .. "/messages", head .. "<Messages" .. xmlns .. ">" .. string.rep("<Message>" .. one .. "</Message>", num) .. "</Messages>")
end
function request()
  if only == "send" then sent = sent + num; return send_request() end
  if #receipts >= num then
    deleted = deleted + num
    if num == 1 then return request_for("DELETE", queue .. "/messages?ReceiptHandle=" .. table.remove(receipts)) end
    local t = {}
    for i = 1, num do t[i] = "<ReceiptHandle>" .. table.remove(receipts) .. "</ReceiptHandle>" end
    return request_for("DELETE", queue .. "/messages", head .. "<ReceiptHandles" .. xmlns .. ">" .. table.concat(t) .. "</ReceiptHandles>")
  end
  turn = turn + 1
  if turn % 2 == 1 then sent = sent + num; return send_request() end
  return request_for("GET", queue .. "/messages?" .. (num == 1 and "waitseconds=0" or "numOfMessages=" .. num .. "&waitseconds=0"))
end
-- An empty receive is a 404 (SQS answers 200): one that overtook its send. More than one in a hundred is a fault.
local empty = 0
function response(status, headers, b)
  if status == 404 and b:find("<Code>MessageNotExist<", 1, true) then
    empty = empty + 1
    if empty * 100 < sent + 1000 then return end
  end
  if status >= 300 then bad = bad + 1; if bad < 3 then print(status, b:sub(1, 300)) end return end
  if only then return end
  for r in b:gmatch("<ReceiptHandle>([^<]+)<") do receipts[#receipts + 1] = r; received = received + 1 end
end
local threads = {}
function setup(t) threads[#threads + 1] = t end
function done(s, l)
  local S, R, D, B = 0, 0, 0, 0
  for _, t in ipairs(threads) do S = S + t:get("sent"); R = R + t:get("received"); D = D + t:get("deleted"); B = B + t:get("bad") end
  local sec = s.duration / 1e6
  print(string.format("RESULT rps=%.0f sent/s=%.0f recv/s=%.0f del/s=%.0f bad=%d p50=%.2fms p99=%.2fms", s.requests / sec, S / sec, R / sec, D / sec, B, l:percentile(50) / 1000, l:percentile(99) / 1000))
end
