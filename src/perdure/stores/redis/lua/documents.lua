-- Finds documents by their names, and forgets those that have expired.
-- KEYS: the names of one shard. ARGV: the first name and the end of the range. Returns the names.
local shard = string.match(KEYS[1], '^([^{]*{[^}]*}:%d+:)documents$')
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[' .. ARGV[1], '(' .. ARGV[2])) do
    if redis.call('EXISTS', shard .. 'document:' .. name) == 1 then
        found[#found + 1] = name
    else
        redis.call('ZREM', KEYS[1], name)
    end
end
return found
