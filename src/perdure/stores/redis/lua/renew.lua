-- Extends leases, each if it is still held.
-- KEYS: the run of each lease. ARGV: the ttl, then epoch and owner of each lease. Returns for each
-- lease its new end and whether the inbox has messages, or nil if the lease was lost.
local ends = integer(now + tonumber(ARGV[1]))
local answers = {}
for number, run in ipairs(KEYS) do
    local header = read_header(run)
    if header and header.epoch == ARGV[2 * number] and header.owner == ARGV[2 * number + 1] then
        local shard, id = shard_and_id(run)
        local set = wake_set_of(id, header)
        require_keys(shard, {run, shard .. 'inbox:' .. id, shard .. 'wake:' .. set})
        redis.call('HSET', run, 'wake', ends)
        schedule(shard, id, header, ends)
        answers[number] = {ends, redis.call('EXISTS', shard .. 'inbox:' .. id)}
    else
        answers[number] = false
    end
end
return answers
