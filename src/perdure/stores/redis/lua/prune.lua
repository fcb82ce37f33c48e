-- KEYS: a list of runs that are over. ARGV: age, limit, prefix, offset. Gives how many were
-- deleted, how many of others were passed over, and whether there is more to look at.
local WINDOW = 500
local limit, prefix = tonumber(ARGV[2]), ARGV[3]
local before = '(' .. text(now - tonumber(ARGV[1]))
local shard = string.match(KEYS[1], '^([^{]*{[^}]*}:)')
local lines = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'LIMIT', ARGV[4], WINDOW)
local deleted, passed = 0, 0
for _, line in ipairs(lines) do
    if string.sub(line, 1, #prefix) ~= prefix then
        passed = passed + 1
    elseif deleted < limit then
        remove(shard, string.match(line, '^%Z+'))
        deleted = deleted + 1
    end
end
return {deleted, passed, #lines == WINDOW and 1 or 0}
