-- KEYS: the run. ARGV: name, payload, dedup id as "=<id>" or "". Gives a letter: Delivered,
-- Known already, Unknown run, Over.
local run = KEYS[1]
local shard, id = shard_and_id(run)
local was = redis.call('HMGET', run, 'status', 'workflow', 'awaits')
local seen = shard .. 'seen:' .. id
if not was[1] then
    return 'U'
end
look(shard, id, was[2] or nil)
if ARGV[3] ~= '' and redis.call('SISMEMBER', seen, ARGV[3]) == 1 then
    return 'K'
end
if was[1] == 'completed' or was[1] == 'failed' or was[1] == 'cancelled' then
    return 'O'
end
if ARGV[3] ~= '' then
    redis.call('SADD', seen, ARGV[3])
end
redis.call('HSET', shard .. 'mail:' .. id, tick(shard) .. ' ' .. ARGV[1], ARGV[2])
for _, name in ipairs(was[3] and cjson.decode(was[3]) or {}) do
    if name == ARGV[1] then
        redis.call('HSET', run, 'wake', moment)
        wake(shard, id, was[2] or nil, moment)
        hint(shard)
    end
end
return 'D'
