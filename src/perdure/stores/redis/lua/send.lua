-- Puts a message in a run's inbox, and makes a run due that awaits it.
-- KEYS: the run. ARGV: name, payload, dedup id as "=<id>" or "". Returns one character: Delivered,
-- Known already, Unknown run, or Over.
local run = KEYS[1]
local shard, id = shard_and_id(run)
local header = redis.call('HMGET', run, 'status', 'workflow', 'awaits')
local status, workflow, awaits = header[1], header[2] or nil, header[3]
local dedup = shard .. 'dedup:' .. id
if not status then
    return 'U'
end
require_keys(shard, id, workflow)
-- Before the status: a duplicate of a message that was delivered is known, also after the end.
if ARGV[3] ~= '' and redis.call('SISMEMBER', dedup, ARGV[3]) == 1 then
    return 'K'
end
if status == 'completed' or status == 'failed' or status == 'cancelled' then
    return 'O'
end
if ARGV[3] ~= '' then
    redis.call('SADD', dedup, ARGV[3])
end
redis.call('HSET', shard .. 'inbox:' .. id, next_number(shard) .. ' ' .. ARGV[1], ARGV[2])
for _, name in ipairs(awaits and cjson.decode(awaits) or {}) do
    if name == ARGV[1] then
        redis.call('HSET', run, 'wake', now_text)
        schedule(shard, id, workflow, now_text)
        notify(shard)
    end
end
return 'D'
