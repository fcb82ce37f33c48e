-- KEYS: the run of each lease. ARGV: ttl, then two for each: epoch, owner. Gives for each the new
-- end and whether there is mail, or nil when it was lost.
local ends = text(now + tonumber(ARGV[1]))
local answers = {}
for number, run in ipairs(KEYS) do
    local was = redis.call('HMGET', run, 'epoch', 'owner', 'workflow')
    if was[1] == ARGV[2 * number] and was[2] == ARGV[2 * number + 1] then
        local shard, id = shard_and_id(run)
        look(shard, id, was[3] or nil)
        redis.call('HSET', run, 'wake', ends)
        wake(shard, id, was[3] or nil, ends)
        answers[number] = {ends, redis.call('EXISTS', shard .. 'mail:' .. id)}
    else
        answers[number] = false
    end
end
return answers
