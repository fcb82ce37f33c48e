-- Writes a document: a string under <namespace>:{<shard>}:2:document:<name>, which the server deletes
-- when it has expired. Its name is indexed by keys with the same hash tag:
--   documents      zset  the names, all with the score 0, so that they are in order
--   document-ends  zset  the names of documents with a time to live, by its end in milliseconds
-- KEYS: the document. ARGV: the expected value and the new one, each as "=<value>", or "" for none;
-- and the time to live in milliseconds, or "". The expected value may also be "*", which stands for
-- any value or none: then the new value is always written, and 1 is returned if there was a value.
-- Otherwise it is written, and 1 returned, only if the document has the expected value.
local shard, name = string.match(KEYS[1], '^([^{]*{[^}]*}:%d+:)document:(.*)$')
local names, ends = shard .. 'documents', shard .. 'document-ends'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local value = redis.call('GET', KEYS[1])
if ARGV[1] ~= '*' and (value and '=' .. value or '') ~= ARGV[1] then
    return 0
end
if ARGV[2] == '' then
    redis.call('UNLINK', KEYS[1])
    redis.call('ZREM', names, name)
    redis.call('ZREM', ends, name)
else
    local new = string.sub(ARGV[2], 2)
    -- The name is written first: a name without a document is removed when a search finds it.
    redis.call('ZADD', names, 0, name)
    if ARGV[3] == '' then
        redis.call('SET', KEYS[1], new)
        redis.call('ZREM', ends, name)
    else
        redis.call('SET', KEYS[1], new, 'PX', ARGV[3])
        redis.call('ZADD', ends, string.format('%.0f', now + ARGV[3]), name)
    end
end

local before_now = '(' .. string.format('%.0f', now)
local old_names = redis.call('ZRANGEBYSCORE', ends, '-inf', before_now, 'LIMIT', 0, 10)
for _, old_name in ipairs(old_names) do
    redis.call('ZREM', ends, old_name)
    if redis.call('EXISTS', shard .. 'document:' .. old_name) == 0 then
        redis.call('ZREM', names, old_name)
    end
end
if ARGV[1] == '*' then
    return value and 1 or 0
end
return 1
