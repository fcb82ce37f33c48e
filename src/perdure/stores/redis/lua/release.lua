-- KEYS: the run of each lease. ARGV: wake time or "", then two for each: epoch, owner.
local at = ARGV[1] ~= '' and ARGV[1] or moment
for number, run in ipairs(KEYS) do
    local was = redis.call('HMGET', run, 'epoch', 'owner', 'workflow')
    if was[1] == ARGV[2 * number] and was[2] == ARGV[2 * number + 1] then
        local shard, id = shard_and_id(run)
        look(shard, id, was[3] or nil)
        redis.call('HDEL', run, 'owner')
        redis.call('HSET', run, 'wake', at)
        wake(shard, id, was[3] or nil, at)
        if tonumber(at) <= now then
            hint(shard)
        end
    end
end
