-- Finds documents by name, and removes the names of expired documents from the index.
-- KEYS: the names of one shard. ARGV: the start of the range, and its end, which is excluded.
-- Returns the names.
local shard = string.match(KEYS[1], '^([^{]*{[^}]*}:%d+:)documents$')
local names = {}
for _, name in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[' .. ARGV[1], '(' .. ARGV[2])) do
    if redis.call('EXISTS', shard .. 'document:' .. name) == 1 then
        names[#names + 1] = name
    else
        redis.call('ZREM', KEYS[1], name)
    end
end
return names
