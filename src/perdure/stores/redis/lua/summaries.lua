-- KEYS: runs. Returns "<revision>\0<description>" for each, or nil for a missing run.
--
-- The revision changes with each write: a grant has a new epoch, an entry adds a field, a release
-- and a rest remove the owner, and between two of these the inbox only grows.
local answers = {}
for number, run in ipairs(KEYS) do
    local shard, id = shard_and_id(run)
    local description, header = describe(shard, id)
    answers[number] = description and table.concat({
        header.epoch, redis.call('HLEN', run), redis.call('ZCARD', shard .. 'inbox:' .. id),
        header.owner and '1' or '0',
    }, '.') .. '\0' .. description
end
return answers
